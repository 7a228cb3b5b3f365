// A student's logits beside its teacher's.
#include "operators/operators.h"

#include "operators/outputs.h"

namespace xent::operators {
namespace {

cpu::Distillation problem(tensors::Arguments& arguments, const Tensor& logits, const Tensor& teacher_logits,
                          const Tensor& target, MaybeInt class_start, const DistillationOptions& options) {
  // The kernels mix all dtypes of 32 bits or fewer. float64 goes with float64 only.
  const ScalarType dtype = tensors::accumulator(logits);
  const bool mixes = tensors::accumulator(teacher_logits) == dtype;
  const Tensor teacher = mixes ? teacher_logits : aten::to(teacher_logits, dtype);
  const int64_t columns = logits.size(logits.dim() - 1);
  const cpu::Distillation result{
      .student = arguments.problem(logits, target, std::nullopt, options.student()),
      .teacher = arguments.problem(teacher, std::nullopt, std::nullopt, options.teacher()),
      .slice = {class_start.value_or(0), options.num_classes.value_or(columns)},
      .all_classes = !class_start,
      .beta = options.beta,
      .temperature = options.temperature,
      .hard_weight = options.hard_weight};
  if (options.hard_weight != 0.0) {
    checks::target_values(result.student, result.slice.num_classes);
  }
  return result;
}

cpu::Threads threads(const Tensor& logits, const DistillationOptions& options) {
  return tensors::threads(logits, options.softcap ? options.softcap : options.teacher_softcap);
}

Two forward(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const MaybeTensor& joined,
            MaybeInt class_start, int64_t ignore_index, MaybeInt num_classes, double beta, double temperature,
            double hard_weight, MaybeNumber softcap, double logit_scale, MaybeNumber teacher_softcap,
            double teacher_logit_scale) {
  const DistillationOptions options{ignore_index, num_classes, beta,            temperature,        hard_weight,
                                    softcap,      logit_scale, teacher_softcap, teacher_logit_scale};
  checks::distillation(logits, teacher_logits, target, class_start, options);
  checks::statistics("joined", joined, target);
  const Tensor loss = per_row(logits, target), statistics = per_row(logits, aten::four_times(target));
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    cpu::distillation_forward(problem(arguments, logits, teacher_logits, target, class_start, options),
                              arguments.dense(joined), loss.mutable_data_ptr(), statistics.mutable_data_ptr(),
                              threads(logits, options));
  }
  return {loss, statistics};
}

template <bool over_logits>
auto backward(const Tensor& grad_loss, const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
              const Tensor& statistics, MaybeInt class_start, int64_t ignore_index, MaybeInt num_classes, double beta,
              double temperature, double hard_weight, MaybeNumber softcap, double logit_scale,
              MaybeNumber teacher_softcap, double teacher_logit_scale) {
  const DistillationOptions options{ignore_index, num_classes, beta,            temperature,        hard_weight,
                                    softcap,      logit_scale, teacher_softcap, teacher_logit_scale};
  checks::distillation(logits, teacher_logits, target, class_start, options);
  checks::scalar_or_rows("grad_loss", grad_loss, logits);
  checks::statistics("statistics", statistics, target);
  const auto write = [&](const Tensor& values, cpu::MutableRows grad) {
    tensors::Arguments arguments(logits);
    cpu::distillation_backward(problem(arguments, values, teacher_logits, target, class_start, options),
                               arguments.per_row(grad_loss), arguments.dense(statistics), grad,
                               threads(logits, options));
  };
  return with_gradient<over_logits>(logits, std::nullopt, std::tuple(), write);
}

template <bool over_logits>
auto with_grad(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const Tensor& grad_scale,
               int64_t ignore_index, MaybeInt num_classes, double beta, double temperature, double hard_weight,
               MaybeNumber softcap, double logit_scale, MaybeNumber teacher_softcap, double teacher_logit_scale) {
  const DistillationOptions options{ignore_index, num_classes, beta,            temperature,        hard_weight,
                                    softcap,      logit_scale, teacher_softcap, teacher_logit_scale};
  checks::distillation(logits, teacher_logits, target, std::nullopt, options);
  checks::scalar_or_rows("grad_scale", grad_scale, logits);
  const Tensor loss = per_row(logits, target);
  const auto write = [&](const Tensor& values, cpu::MutableRows grad) {
    tensors::Arguments arguments(logits);
    cpu::distillation_with_grad(problem(arguments, values, teacher_logits, target, std::nullopt, options),
                                arguments.per_row(grad_scale), loss.mutable_data_ptr(), grad, threads(logits, options));
  };
  return with_gradient<over_logits>(logits, std::nullopt, std::tuple(loss), write);
}

}  // namespace

void add_distillation(const Add& add) {
  add("distillation_forward", TORCH_BOX(&forward));
  add("distillation_backward", TORCH_BOX(&backward<false>));
  add("distillation_backward_", TORCH_BOX(&backward<true>));
  add("distillation_with_grad", TORCH_BOX(&with_grad<false>));
  add("distillation_with_grad_", TORCH_BOX(&with_grad<true>));
}

}  // namespace xent::operators
