// Class indices as targets.
#include "operators/operators.h"

#include "operators/outputs.h"

namespace xent::operators {
namespace {

tensors::Problem checked(const Tensor& logits, const Tensor& target, const MaybeTensor& weight,
                         const RowOptions& options) {
  const tensors::Problem problem(logits, target, weight, options, tensors::Values::apart);
  problem.check_targets(problem.classes);
  return problem;
}

Four forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, bool with_argmax, bool with_entropy,
             bool batch_invariant, int64_t ignore_index, double label_smoothing, MaybeNumber softcap,
             double logit_scale) {
  (void)batch_invariant;  // a row's bits depend on it alone in any case: rows.h, fold
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  const Four outputs = statistics(logits, target, with_argmax, with_entropy);
  if (!is_meta(logits)) {
    const auto& [loss, lse, argmax, entropy] = outputs;
    cpu::forward(checked(logits, target, weight, options), loss.mutable_data_ptr(), lse.mutable_data_ptr(),
                 argmax.mutable_data_ptr<int64_t>(), entropy.mutable_data_ptr(), tensors::threads(logits, softcap));
  }
  return outputs;
}

Three forward_reduced(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                      double label_smoothing, MaybeNumber softcap, double logit_scale, double lse_square_scale,
                      const std::string& reduction) {
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  checks::reduction(reduction, false);
  const Tensor value = numbers(logits, {}), divisors = numbers(logits, {2}), lse = per_row(logits, target);
  if (!is_meta(logits)) {
    const Tensor loss = per_row(logits, target);
    const tensors::Problem problem = checked(logits, target, weight, options);
    cpu::forward_counted(problem, loss.mutable_data_ptr(), lse.mutable_data_ptr(), tensors::threads(logits, softcap));
    reduce(problem, loss, lse, nullptr, lse_square_scale, reduction, divisors, value);
  }
  return {value, divisors, lse};
}

Two divisor(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index) {
  const RowOptions options{ignore_index};
  checks::index(logits, target, weight, options);
  const Tensor divisors = numbers(logits, {2}), inverse = numbers(logits, {2});
  if (!is_meta(logits)) {
    cpu::divisor(tensors::Problem(logits, target, weight, options, tensors::Values::absent), nullptr,
                 divisors.mutable_data_ptr(), inverse.mutable_data_ptr());
  }
  return {divisors, inverse};
}

template <bool in_place>
auto backward(const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& logits, const Tensor& target,
              const Tensor& lse, const MaybeTensor& weight, const MaybeTensor& divisors,
              const MaybeTensor& grad_entropy, const MaybeTensor& entropy, const MaybeTensor& lse_coefficient,
              int64_t class_start, MaybeInt num_classes, MaybeDtype grad_dtype, int64_t ignore_index,
              double label_smoothing, MaybeNumber softcap, double logit_scale, double lse_square_scale) {
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  checks::slice(class_start, num_classes, weight, lse_coefficient);
  checks::rows("lse_coefficient", lse_coefficient, logits);
  checks::upstream(logits, grad_loss, grad_lse, lse, divisors, grad_entropy, entropy);
  const auto write = [&](const Tensor& values, cpu::MutableRows grad) {
    const ScalarType dtype = tensors::accumulator(logits);
    const Tensor dense_lse = tensors::dense(lse, dtype);
    const MaybeTensor dense_entropy = tensors::dense(entropy, dtype);
    const MaybeTensor dense_lse_coefficient = tensors::dense(lse_coefficient, dtype);
    const tensors::Upstream upstream(logits, grad_loss, grad_lse, grad_entropy, divisors, lse_square_scale);
    const tensors::Problem problem(values, target, weight, options, tensors::Values::apart);
    cpu::backward(problem, {class_start, num_classes.value_or(problem.classes)}, upstream, dense_lse.const_data_ptr(),
                  tensors::data(dense_entropy), tensors::data(dense_lse_coefficient), grad,
                  tensors::threads(logits, softcap));
  };
  if constexpr (in_place) {
    write_over(logits, grad_dtype, write);
  } else {
    return new_gradient(logits, grad_dtype, write);
  }
}

template <bool in_place>
auto with_grad(const Tensor& logits, const Tensor& target, const Tensor& grad_scale, const MaybeTensor& grad_lse_square,
               const MaybeTensor& weight, bool with_argmax, bool with_entropy, MaybeDtype grad_dtype,
               int64_t ignore_index, double label_smoothing, MaybeNumber softcap, double logit_scale) {
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  checks::scalar_or_rows("grad_scale", grad_scale, logits);
  checks::scalar_or_rows("grad_lse_square", grad_lse_square, logits);
  const Four outputs = statistics(logits, target, with_argmax, with_entropy);
  return with_gradient<in_place>(logits, grad_dtype, outputs, [&](const Tensor& values, cpu::MutableRows grad) {
    const auto& [loss, lse, argmax, entropy] = outputs;
    const ScalarType dtype = tensors::accumulator(logits);
    const tensors::PerRow scale(grad_scale, dtype), lse_square(grad_lse_square, dtype);
    cpu::with_grad(checked(values, target, weight, options), scale.values, lse_square.values, loss.mutable_data_ptr(),
                   lse.mutable_data_ptr(), argmax.mutable_data_ptr<int64_t>(), entropy.mutable_data_ptr(), grad,
                   tensors::threads(logits, softcap));
  });
}

void scale_grad(const Tensor& grad, const Tensor& factor) {
  checks::scale(grad, factor);
  if (!is_meta(grad)) {
    checks::writable("grad", grad);
    const tensors::Write out(grad);
    const tensors::PerRow values(factor, tensors::accumulator(grad));
    const tensors::Problem problem(out.memory(), std::nullopt, std::nullopt, RowOptions(), tensors::Values::absent);
    cpu::scale_grad(problem, out.rows, values.values, tensors::threads(grad, std::nullopt));
    out.finish();
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
