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
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// loss, lse, argmax, entropy.
inline Four statistics(const Tensor& logits, const Tensor& target, bool with_argmax, bool with_entropy) {
  return {per_row(logits, target), per_row(logits, target),
          with_argmax ? aten::empty_like(target, ScalarType::Long) : none(logits, ScalarType::Long),
          with_entropy ? per_row(logits, target) : none(logits, tensors::accumulator(logits))};
}

// Where the kernels write them.
inline cpu::RowResults memory_of(const Four& statistics) {
  const auto& [loss, lse, argmax, entropy] = statistics;
  return {loss.mutable_data_ptr(), lse.mutable_data_ptr(), argmax.mutable_data_ptr<int64_t>(),
          entropy.mutable_data_ptr()};
}

// Losses of rows to one number. target_weight: one value a row, or null to take it from the problem's weight.
inline void reduce(const cpu::Problem& problem, const Tensor& loss, const Tensor& lse, const void* target_weight,
                   double lse_square_scale, const std::string& reduction, const Tensor& divisors, const Tensor& value) {
  cpu::divisors(problem, target_weight, nullptr, divisors.mutable_data_ptr());
  cpu::reduce(problem, loss.const_data_ptr(), lse.const_data_ptr(), nullptr, nullptr, divisors.const_data_ptr(),
              lse_square_scale, reduction == "mean", {value.mutable_data_ptr()});
}

// write(values, rows) reads a tensor from `values` and writes to its rows: this tensor's, or a copy's if the kernels
// cannot take its strides.
template <class Write>
void in_place(const char* name, const Tensor& tensor, const Write& write) {
  checks::writable(name, tensor);
  Tensor memory = tensor, written = tensor;
  const cpu::MutableRows rows = tensors::mutable_rows(memory);
  write(memory, rows);
  torch::stable::copy_(written, memory);  // onto itself if not copied: tells autograd that it was written
}

// The results, the gradient last; or over_logits: written over the logits. write(values, grad) reads the logits from
// `values` and writes their gradient to `grad`, which may be the same memory.
template <bool over_logits, class Results, class Write>
auto with_gradient(const Tensor& logits, MaybeDtype grad_dtype, const Results& other_results, const Write& write) {
  const ScalarType dtype = logits.scalar_type(), wanted = grad_dtype.value_or(dtype);
  if constexpr (over_logits) {
    if (!is_meta(logits)) {
      in_place("logits", logits, write);
      if (wanted != dtype) {
        Tensor front = aten::front_of(logits, wanted);
        torch::stable::copy_(front, aten::to(logits, wanted));
      }
    }
    return other_results;
  } else {
    Tensor grad = aten::empty_like(logits, dtype);  // contiguous, whatever the strides of the logits
    if (!is_meta(logits)) {
      write(logits, tensors::mutable_rows(grad));
    }
    return std::tuple_cat(other_results, std::make_tuple(aten::to(grad, wanted)));
  }
}

}  // namespace xent::operators
