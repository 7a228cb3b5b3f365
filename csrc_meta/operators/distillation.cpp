// A student's logits beside its teacher's.
#include "operators/operators.h"

#include "operators/outputs.h"

namespace xent::operators {
namespace {

// The arguments as the kernels take them. Keeps the memory of converted tensors.
class Problem : public cpu::Distillation {
 public:
  Problem(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, MaybeInt class_start,
          const DistillationOptions& options)
      : student_(logits, target, std::nullopt, options.student()),
        teacher_(in_precision_of(logits, teacher_logits), std::nullopt, std::nullopt, options.teacher()) {
    student = student_;
    teacher = teacher_;
    slice = {class_start.value_or(0), options.num_classes.value_or(student.classes)};
    all_classes = !class_start;
    beta = options.beta;
    temperature = options.temperature;
    hard_weight = options.hard_weight;
    if (hard_weight != 0.0) {
      student_.check_targets(slice.num_classes);
    }
  }

  cpu::Threads threads(const Tensor& logits) const {
    return tensors::threads(logits, student.softcap ? student.softcap : teacher.softcap);
  }

 private:
  // The kernels mix all dtypes of 32 bits or fewer. float64 goes with float64 only.
  static Tensor in_precision_of(const Tensor& logits, const Tensor& teacher) {
    const ScalarType dtype = tensors::accumulator(logits);
    return tensors::accumulator(teacher) == dtype ? teacher : aten::to(teacher, dtype);
  }

  tensors::Problem student_;
  tensors::Problem teacher_;
};

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
    const MaybeTensor dense_joined = tensors::dense(joined, tensors::accumulator(logits));
    const Problem problem(logits, teacher_logits, target, class_start, options);
    cpu::distillation_forward(problem, tensors::data(dense_joined), loss.mutable_data_ptr(),
                              statistics.mutable_data_ptr(), problem.threads(logits));
  }
  return {loss, statistics};
}

template <bool in_place>
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
    const ScalarType dtype = tensors::accumulator(logits);
    const Tensor dense_statistics = tensors::dense(statistics, dtype);
    const Problem problem(values, teacher_logits, target, class_start, options);
    cpu::distillation_backward(problem, tensors::PerRow(grad_loss, dtype).values, dense_statistics.const_data_ptr(),
                               grad, problem.threads(logits));
  };
  if constexpr (in_place) {
    write_over(logits, std::nullopt, write);
  } else {
    return new_gradient(logits, std::nullopt, write);
  }
}

template <bool in_place>
auto with_grad(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, const Tensor& grad_scale,
               int64_t ignore_index, MaybeInt num_classes, double beta, double temperature, double hard_weight,
               MaybeNumber softcap, double logit_scale, MaybeNumber teacher_softcap, double teacher_logit_scale) {
  const DistillationOptions options{ignore_index, num_classes, beta,            temperature,        hard_weight,
                                    softcap,      logit_scale, teacher_softcap, teacher_logit_scale};
  checks::distillation(logits, teacher_logits, target, std::nullopt, options);
  checks::scalar_or_rows("grad_scale", grad_scale, logits);
  const Tensor loss = per_row(logits, target);
  const auto write = [&](const Tensor& values, cpu::MutableRows grad) {
    const tensors::PerRow scale(grad_scale, tensors::accumulator(logits));
    const Problem problem(values, teacher_logits, target, std::nullopt, options);
    cpu::distillation_with_grad(problem, scale.values, loss.mutable_data_ptr(), grad, problem.threads(logits));
  };
  if constexpr (in_place) {
    write_over(logits, std::nullopt, write);
    return loss;
  } else {
    return Two{loss, new_gradient(logits, std::nullopt, write)};
  }
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
