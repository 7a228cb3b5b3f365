// A student's logits beside its teacher's.
#include "operators/operators.h"

#include "operators/outputs.h"

namespace xent::operators {
namespace {

cpu::Divergences problem(tensors::Arguments& arguments, const Tensor& logits, const Tensor& teacher_logits,
                         const Tensor& target, MaybeInt class_start, const DivergenceOptions& options) {
  // The kernels mix all dtypes of 32 bits or fewer. float64 goes with float64 only.
  const ScalarType dtype = tensors::accumulator(logits);
  const bool mixes = tensors::accumulator(teacher_logits) == dtype;
  const Tensor teacher = mixes ? teacher_logits : aten::to(teacher_logits, dtype);
  const int64_t columns = logits.size(logits.dim() - 1);
  cpu::Divergences result{
      .student = arguments.problem(logits, target, std::nullopt, options.student()),
      .teacher = arguments.problem(teacher, std::nullopt, std::nullopt, options.teacher()),
      .slice = {class_start.value_or(0), options.num_classes.value_or(columns)},
      .all_classes = !class_start,
      .beta = options.beta,
      .temperature = options.temperature};
  for (int field = 0; field < cpu::kFields; ++field) {
    result.reads[field] = options.reads(field);
  }
  if (result.reads[cpu::kLogProb]) {
    checks::target_values(result.student, result.slice.num_classes);
  }
  return result;
}

cpu::Threads threads(const Tensor& logits, const DivergenceOptions& options) {
  return tensors::threads(logits, options.softcap ? options.softcap : options.teacher_softcap);
}

Two forward(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const MaybeTensor& teacher_lse,
            const MaybeTensor& joined, MaybeInt class_start, int64_t ignore_index, MaybeInt num_classes, double beta,
            double temperature, MaybeNumber softcap, double logit_scale, MaybeNumber teacher_softcap,
            double teacher_logit_scale, const std::string& fields) {
  const DivergenceOptions options{ignore_index, num_classes, beta,                temperature, softcap,
                                  logit_scale,  teacher_softcap, teacher_logit_scale, fields};
  checks::divergences(logits, teacher_logits, target, class_start, options);
  checks::numbers_of_each_row("teacher_lse", teacher_lse, target, 2);
  checks::numbers_of_each_row("joined", joined, target, cpu::kStatistics);
  const Tensor values = per_row(logits, aten::times(target, cpu::kFields));
  const Tensor statistics = per_row(logits, aten::times(target, cpu::kStatistics));
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    cpu::divergences_forward(problem(arguments, logits, teacher_logits, target, class_start, options),
                             arguments.dense(teacher_lse), arguments.dense(joined), values.mutable_data_ptr(),
                             statistics.mutable_data_ptr(), threads(logits, options));
  }
  return {values, statistics};
}

template <bool over_logits>
auto backward(const Tensor& grad_values, const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
              const Tensor& statistics, MaybeInt class_start, MaybeDtype grad_dtype, int64_t ignore_index,
              MaybeInt num_classes, double beta, double temperature, MaybeNumber softcap, double logit_scale,
              MaybeNumber teacher_softcap, double teacher_logit_scale, const std::string& fields) {
  const DivergenceOptions options{ignore_index, num_classes, beta,                temperature, softcap,
                                  logit_scale,  teacher_softcap, teacher_logit_scale, fields};
  checks::divergences(logits, teacher_logits, target, class_start, options);
  checks::numbers_of_each_row("grad_values", grad_values, target, cpu::kFields);
  checks::numbers_of_each_row("statistics", statistics, target, cpu::kStatistics);
  const auto write = [&](const Tensor& values, cpu::MutableRows grad) {
    tensors::Arguments arguments(logits);
    cpu::divergences_backward(problem(arguments, values, teacher_logits, target, class_start, options),
                              arguments.dense(grad_values), arguments.dense(statistics), grad,
                              threads(logits, options));
  };
  return with_gradient<over_logits>(logits, grad_dtype, std::tuple(), write);
}

template <bool over_logits>
auto with_grad(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const Tensor& grad_scale,
               MaybeDtype grad_dtype, int64_t ignore_index, MaybeInt num_classes, double beta, double temperature,
               MaybeNumber softcap, double logit_scale, MaybeNumber teacher_softcap, double teacher_logit_scale,
               const std::string& fields, double hard_weight) {
  const DivergenceOptions options{ignore_index, num_classes, beta,                temperature, softcap,
                                  logit_scale,  teacher_softcap, teacher_logit_scale, fields};
  checks::divergences(logits, teacher_logits, target, std::nullopt, options);
  checks::scalar_or_rows("grad_scale", grad_scale, logits);
  const Tensor loss = per_row(logits, target);
  const auto write = [&](const Tensor& values, cpu::MutableRows grad) {
    tensors::Arguments arguments(logits);
    cpu::divergences_with_grad(problem(arguments, values, teacher_logits, target, std::nullopt, options), hard_weight,
                               arguments.per_row(grad_scale), loss.mutable_data_ptr(), grad, threads(logits, options));
  };
  return with_gradient<over_logits>(logits, grad_dtype, std::tuple(loss), write);
}

}  // namespace

void add_divergences(const Add& add) {
  add("divergences_forward", TORCH_BOX(&forward));
  add("divergences_backward", TORCH_BOX(&backward<false>));
  add("divergences_backward_", TORCH_BOX(&backward<true>));
  add("divergences_with_grad", TORCH_BOX(&with_grad<false>));
  add("divergences_with_grad_", TORCH_BOX(&with_grad<true>));
}

}  // namespace xent::operators
