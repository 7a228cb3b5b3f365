// Class indices as targets.
#include "operators/operators.h"

#include "operators/outputs.h"

namespace xent::operators {
namespace {

cpu::Problem checked(tensors::Arguments& arguments, const Tensor& logits, const Tensor& target,
                     const MaybeTensor& weight, const RowOptions& options) {
  const cpu::Problem problem = arguments.problem(logits, target, weight, options, tensors::Values::apart);
  checks::target_values(problem, problem.classes);
  return problem;
}

Five forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, bool with_argmax, bool with_entropy,
             bool batch_invariant, int64_t ignore_index, double label_smoothing, MaybeNumber softcap,
             double logit_scale) {
  (void)batch_invariant;  // a row's bits depend on it alone in any case: rows.h, fold
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  const Four outputs = statistics(logits, target, with_argmax, with_entropy);
  const Tensor lse_low = per_row(logits, target);
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    cpu::RowResults memory = memory_of(outputs);
    memory.lse_low = lse_low.mutable_data_ptr();
    cpu::forward(checked(arguments, logits, target, weight, options), false, memory,
                 tensors::threads(logits, softcap));
  }
  return std::tuple_cat(outputs, std::make_tuple(lse_low));
}

Four forward_reduced(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                      double label_smoothing, MaybeNumber softcap, double logit_scale, double lse_square_scale,
                      const std::string& reduction) {
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  checks::reduction(reduction, false);
  const Tensor value = numbers(logits, {}), divisors = numbers(logits, {2});
  const Tensor lse = per_row(logits, target), lse_low = per_row(logits, target);
  if (!is_meta(logits)) {
    const Tensor loss = per_row(logits, target);
    tensors::Arguments arguments(logits);
    const cpu::Problem problem = checked(arguments, logits, target, weight, options);
    const cpu::RowResults memory{.loss = loss.mutable_data_ptr(),
                                 .lse = lse.mutable_data_ptr(),
                                 .lse_low = lse_low.mutable_data_ptr()};
    cpu::forward(problem, true, memory, tensors::threads(logits, softcap));
    reduce(problem, loss, lse, nullptr, lse_square_scale, reduction, divisors, value);
  }
  return {value, divisors, lse, lse_low};
}

Two divisor(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index) {
  const RowOptions options{ignore_index};
  checks::index(logits, target, weight, options);
  const Tensor divisors = numbers(logits, {2}), inverse = numbers(logits, {2});
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    cpu::divisor(arguments.problem(logits, target, weight, options, tensors::Values::absent), nullptr,
                 divisors.mutable_data_ptr(), inverse.mutable_data_ptr());
  }
  return {divisors, inverse};
}

template <bool over_logits>
auto backward(const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& logits, const Tensor& target,
              const Tensor& lse, const MaybeTensor& weight, const MaybeTensor& divisors,
              const MaybeTensor& grad_entropy, const MaybeTensor& entropy, const MaybeTensor& lse_coefficient,
              int64_t class_start, MaybeInt num_classes, MaybeDtype grad_dtype, const MaybeTensor& lse_low,
              int64_t ignore_index, double label_smoothing, MaybeNumber softcap, double logit_scale,
              double lse_square_scale) {
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  checks::slice(class_start, num_classes, weight, lse_coefficient);
  checks::rows("lse_coefficient", lse_coefficient, logits);
  checks::rows("lse_low", lse_low, logits);
  checks::upstream(logits, grad_loss, grad_lse, lse, divisors, grad_entropy, entropy);
  return with_gradient<over_logits>(logits, grad_dtype, std::tuple(), [&](const Tensor& values, cpu::MutableRows grad) {
    tensors::Arguments arguments(logits);
    const cpu::Problem problem = arguments.problem(values, target, weight, options, tensors::Values::apart);
    const cpu::Upstream upstream{.loss = arguments.per_row(grad_loss),
                                 .lse = arguments.per_row(grad_lse),
                                 .entropy = arguments.per_row(grad_entropy),
                                 .saved_lse = arguments.dense(lse),
                                 .saved_lse_low = arguments.dense(lse_low),
                                 .saved_entropy = arguments.dense(entropy),
                                 .lse_coefficient = arguments.dense(lse_coefficient),
                                 .divisor = arguments.dense(divisors),
                                 .lse_square_scale = lse_square_scale};
    cpu::backward(problem, {class_start, num_classes.value_or(problem.classes)}, upstream, grad,
                  tensors::threads(logits, softcap));
  });
}

template <bool over_logits>
auto with_grad(const Tensor& logits, const Tensor& target, const Tensor& grad_scale, const MaybeTensor& grad_lse_square,
               const MaybeTensor& weight, bool with_argmax, bool with_entropy, MaybeDtype grad_dtype,
               int64_t ignore_index, double label_smoothing, MaybeNumber softcap, double logit_scale) {
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  checks::scalar_or_rows("grad_scale", grad_scale, logits);
  checks::scalar_or_rows("grad_lse_square", grad_lse_square, logits);
  const Four outputs = statistics(logits, target, with_argmax, with_entropy);
  return with_gradient<over_logits>(logits, grad_dtype, outputs, [&](const Tensor& values, cpu::MutableRows grad) {
    tensors::Arguments arguments(logits);
    cpu::with_grad(checked(arguments, values, target, weight, options), arguments.per_row(grad_scale),
                   arguments.per_row(grad_lse_square), memory_of(outputs), grad, tensors::threads(logits, softcap));
  });
}

void scale_grad(const Tensor& grad, const Tensor& factor) {
  checks::scale(grad, factor);
  if (!is_meta(grad)) {
    in_place("grad", grad, [&](const Tensor& values, cpu::MutableRows rows) {
      tensors::Arguments arguments(grad);
      cpu::scale_grad(arguments.problem(values, std::nullopt, std::nullopt, {}, tensors::Values::absent), rows,
                      arguments.per_row(factor), tensors::threads(grad, std::nullopt));
    });
  }
}

}  // namespace

void add_index(const Add& add) {
  add("cross_entropy_forward", TORCH_BOX(&forward));
  add("cross_entropy_reduced", TORCH_BOX(&forward_reduced));
  add("cross_entropy_divisor", TORCH_BOX(&divisor));
  add("cross_entropy_backward", TORCH_BOX(&backward<false>));
  add("cross_entropy_backward_", TORCH_BOX(&backward<true>));
  add("cross_entropy_with_grad", TORCH_BOX(&with_grad<false>));
  add("cross_entropy_with_grad_", TORCH_BOX(&with_grad<true>));
  add("scale_grad_", TORCH_BOX(&scale_grad));
}

}  // namespace xent::operators
