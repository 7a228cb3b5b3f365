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
             bool batch_invariant, bool skip_ignored, int64_t ignore_index, double label_smoothing,
             MaybeNumber softcap, double logit_scale) {
  (void)batch_invariant;  // a row's bits depend on it alone in any case: rows.h, fold
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  checks::index(logits, target, weight, options);
  const Four outputs = statistics(logits, target, with_argmax, with_entropy);
  const Tensor lse_low = per_row(logits, target);
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    cpu::RowResults memory = memory_of(outputs);
    memory.lse_low = lse_low.mutable_data_ptr();
    cpu::forward(checked(arguments, logits, target, weight, options), skip_ignored, memory,
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

Three row_divisors(const Tensor& target, const MaybeTensor& weight, const MaybeTensor& token_weight,
                   const MaybeTensor& divisor, int64_t ignore_index, double lse_square_scale,
                   const std::string& reduction, MaybeDtype dtype) {
  checks::reduced_rows(target, weight, token_weight, reduction);
  XENT_CHECK(!divisor || (divisor->dim() == 0 && reduction == "sum"), "divisor must be one number, of a sum");
  const ScalarType numbers_dtype = dtype.value_or(ScalarType::Float);
  XENT_CHECK(numbers_dtype == ScalarType::Float || numbers_dtype == ScalarType::Double,
             "dtype must be float32 or float64");
  const Tensor rows = aten::empty_like(target, numbers_dtype);  // its values are not read
  const auto factor = [&] { return token_weight ? aten::empty_like(rows, rows.scalar_type()) : numbers(rows, {}); };
  const Tensor divisors = numbers(rows, {2}), scale = factor();
  const Tensor square = lse_square_scale == 0 ? none(rows, rows.scalar_type()) : factor();
  if (!is_meta(target)) {
    tensors::Arguments arguments(rows);
    const cpu::Problem problem = arguments.rows_only(rows, target, weight, ignore_index);
    const void* token_weights = arguments.dense(token_weight);
    if (reduction == "mean") {
      cpu::divisors(problem, nullptr, token_weights, divisors.mutable_data_ptr());
    } else {  // of a sum: one number
      Tensor both = divisors;
      (void)arguments.dense(divisor);  // refuses one without memory
      torch::stable::copy_(both, divisor.value_or(aten::scalar(1.0, rows.scalar_type())));
    }
    cpu::row_factors(problem, divisors.const_data_ptr(), token_weights, lse_square_scale, scale.mutable_data_ptr(),
                     square.mutable_data_ptr());
  }
  return {divisors, scale, square};
}

Four row_summary(const Tensor& loss, const Tensor& lse, const Tensor& target, const MaybeTensor& weight,
                 const MaybeTensor& token_weight, const MaybeTensor& divisors, const MaybeTensor& argmax,
                 int64_t ignore_index, double lse_square_scale, const std::string& reduction) {
  checks::reduced_rows(target, weight, token_weight, reduction);
  checks::numbers_of_rows("loss", loss, target);
  checks::numbers_of_rows("lse", lse, target);
  checks::same_rows("argmax", argmax, target);
  XENT_CHECK(!divisors || (divisors->dim() == 1 && divisors->size(0) == 2), "divisors must be two numbers");
  const ScalarType dtype = tensors::accumulator(loss);
  const Tensor value = numbers(loss, {}), made = divisors ? none(loss, dtype) : numbers(loss, {2});
  const auto if_argmax = [&] { return argmax ? numbers(loss, {}) : none(loss, dtype); };
  const Tensor z_loss = if_argmax(), accuracy = if_argmax();
  if (!is_meta(loss)) {
    tensors::Arguments arguments(loss);
    const cpu::Problem problem = arguments.rows_only(loss, target, weight, ignore_index);
    const void* token_weights = arguments.dense(token_weight);
    const void* by = arguments.dense(divisors);
    if (!divisors) {
      cpu::divisors(problem, nullptr, token_weights, made.mutable_data_ptr());
      by = made.const_data_ptr();
    }
    cpu::reduce(problem, arguments.dense(loss), arguments.dense(lse), token_weights,
                static_cast<const int64_t*>(arguments.dense(argmax, ScalarType::Long)), by, lse_square_scale,
                reduction == "mean", {value.mutable_data_ptr(), z_loss.mutable_data_ptr(), accuracy.mutable_data_ptr()});
  }
  return {value, made, z_loss, accuracy};
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
                                 .saved_entropy = arguments.dense(entropy),
                                 .lse_coefficient = arguments.dense(lse_coefficient),
                                 .divisor = arguments.dense(divisors),
                                 .lse_square_scale = lse_square_scale,
                                 .saved_lse_low = arguments.dense(lse_low)};
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
  add("row_divisors", TORCH_BOX(&row_divisors));
  add("row_summary", TORCH_BOX(&row_summary));
  add("cross_entropy_backward", TORCH_BOX(&backward<false>));
  add("cross_entropy_backward_", TORCH_BOX(&backward<true>));
  add("cross_entropy_with_grad", TORCH_BOX(&with_grad<false>));
  add("cross_entropy_with_grad_", TORCH_BOX(&with_grad<true>));
  add("scale_grad_", TORCH_BOX(&scale_grad));
}

}  // namespace xent::operators
