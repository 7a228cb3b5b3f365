// Allocation of results, and gradients in a tensor of their own or over the logits.
#pragma once

#include "checks.h"
#include "tensors.h"

#include <initializer_list>
#include <string>
#include <tuple>

namespace xent::operators {

// Results are allocated by torch operators on existing tensors. No size is read, since it may be symbolic.

// One number for each row of the logits; `like` has that shape.
inline Tensor per_row(const Tensor& logits, const Tensor& like) {
  return aten::empty_like(like, tensors::accumulator(logits));
}

// The shape is a constant: () is one number.
inline Tensor numbers(const Tensor& logits, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(logits, {shape.begin(), shape.size()}, tensors::accumulator(logits));
}

// (0,): a result that nobody asked for. Its pointer is null.
inline Tensor none(const Tensor& like, ScalarType dtype) {
  const std::vector<int64_t> shape{0};
  return torch::stable::new_empty(like, shape, dtype);
}

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// loss, lse, argmax, entropy.
inline Four statistics(const Tensor& logits, const Tensor& target, bool with_argmax, bool with_entropy) {
  return {per_row(logits, target), per_row(logits, target),
          with_argmax ? aten::empty_like(target, ScalarType::Long) : none(logits, ScalarType::Long),
          with_entropy ? per_row(logits, target) : none(logits, tensors::accumulator(logits))};
}

// Losses of rows to one number. target_weight: one value a row, or null to take it from the problem's weight.
inline void reduce(const tensors::Problem& problem, const Tensor& loss, const Tensor& lse, const void* target_weight,
                   double lse_square_scale, const std::string& reduction, const Tensor& divisors, const Tensor& value) {
  cpu::divisor(problem, target_weight, divisors.mutable_data_ptr(), nullptr);
  cpu::reduce(problem, loss.const_data_ptr(), lse.const_data_ptr(), divisors.const_data_ptr(), lse_square_scale,
              reduction == "mean", value.mutable_data_ptr());
}

// write(values, grad) reads the logits from `values` and writes their gradient to `grad`, which may be the same memory.
// So logits that the kernels cannot read in place are copied once.
template <class Write>
void write_over(const Tensor& logits, MaybeDtype grad_dtype, const Write& write) {
  if (is_meta(logits)) {
    return;
  }
  checks::writable("logits", logits);
  const tensors::Write grad(logits);
  write(grad.memory(), grad.rows);
  grad.finish();
  if (grad_dtype.value_or(logits.scalar_type()) != logits.scalar_type()) {
    Tensor front = aten::front_of(logits, *grad_dtype);
    torch::stable::copy_(front, aten::to(logits, *grad_dtype));
  }
}

// Contiguous, whatever the strides of the logits.
template <class Write>
Tensor new_gradient(const Tensor& logits, MaybeDtype grad_dtype, const Write& write) {
  const Tensor grad = aten::empty_like(logits, logits.scalar_type());
  if (!is_meta(logits)) {
    write(logits, tensors::Write(grad).rows);
  }
  return aten::to(grad, grad_dtype.value_or(logits.scalar_type()));
}

// The results: with the gradient last, or in the in-place form, written over the logits.
template <bool in_place, class Write>
auto with_gradient(const Tensor& logits, MaybeDtype grad_dtype, const Four& other_results, const Write& write) {
  if constexpr (in_place) {
    write_over(logits, grad_dtype, write);
    return other_results;
  } else {
    return std::tuple_cat(other_results, std::make_tuple(new_gradient(logits, grad_dtype, write)));
  }
}

}  // namespace xent::operators
