// Allocation of results, and templates that make an operator and its in-place twin from one description.
#pragma once

#include "bridge.h"
#include "checks.h"

#include <initializer_list>
#include <string>

namespace xent::operators {

// Results are allocated by torch operators on existing tensors. No size is read, since it may be symbolic.

// One number for each row of the logits; `like` has that shape.
inline Tensor per_row(const Tensor& logits, const Tensor& like) {
  return aten::empty_like(like, bridge::accumulator(logits));
}

// The shape is a constant: () is one number.
inline Tensor numbers(const Tensor& logits, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(logits, {shape.begin(), shape.size()}, bridge::accumulator(logits));
}

// (0,): a result that is not wanted.
inline Tensor none(const Tensor& like, ScalarType dtype) {
  const std::vector<int64_t> shape{0};
  return torch::stable::new_empty(like, shape, dtype);
}

// loss, lse, argmax, entropy.
inline std::vector<Tensor> statistics(const Tensor& logits, const Tensor& target, bool with_argmax, bool with_entropy) {
  return {per_row(logits, target), per_row(logits, target),
          with_argmax ? aten::empty_like(target, ScalarType::Long) : none(logits, ScalarType::Long),
          with_entropy ? per_row(logits, target) : none(logits, bridge::accumulator(logits))};
}

// The last arguments of an operator that reduces the losses of its rows.
class Reduction {
 public:
  Reduction(Stack& stack, const Tensor& logits) : lse_square_scale_(stack.number()) {
    const std::string reduction = stack.next<std::string>();
    checks::lse_square_scale(lse_square_scale_, logits);
    checks::reduction_to_one(reduction);
    mean_ = reduction == "mean";
  }

  // target_weight: one value a row, or null to take it from the problem's weight.
  void write(const bridge::Problem& problem, const Tensor& loss, const Tensor& lse, const void* target_weight,
             const Tensor& divisor, const Tensor& value) const {
    cpu::divisor(problem, target_weight, divisor.mutable_data_ptr(), nullptr);
    cpu::reduce(problem, loss.const_data_ptr(), lse.const_data_ptr(), divisor.const_data_ptr(), lse_square_scale_,
                mean_, value.mutable_data_ptr());
  }

 private:
  double lse_square_scale_;
  bool mean_;
};

// An operator whose last result is the gradient of `logits`, or its twin that writes it over the logits. In has
//   outputs()                        the other results
//   write(outputs, values, grad)     reads the logits from `values` and writes their gradient to `grad`, which may be
//                                    the same memory. So logits that the kernels cannot read in place are copied once.
//   grad_dtype                       of the gradient, where that is not the logits'
template <class In, bool in_place>
void write_gradient(Stack& stack) {
  const In in(stack);
  std::vector<Tensor> outputs = in.outputs();
  const ScalarType dtype = in.grad_dtype.value_or(in.logits.scalar_type());
  if constexpr (in_place) {
    if (!stack.meta) {
      checks::writable("logits", in.logits);
      const bridge::Write grad(in.logits);
      in.write(outputs, grad.memory(), grad.rows);
      grad.finish();
      if (dtype != in.logits.scalar_type()) {
        Tensor front = aten::front_of(in.logits, dtype);
        torch::stable::copy_(front, aten::to(in.logits, dtype));
      }
    }
  } else {
    // Contiguous, whatever the strides of the logits.
    const Tensor grad = aten::empty_like(in.logits, in.logits.scalar_type());
    if (!stack.meta) {
      in.write(outputs, in.logits, bridge::Write(grad).rows);
    }
    outputs.push_back(aten::to(grad, dtype));
  }
  stack.returns(outputs);
}

// Defines the operator and its twin.
#define XENT_WITH_TWIN(name, In)                                        \
  void name(Stack& stack) { write_gradient<In, false>(stack); }         \
  void name##_(Stack& stack) { write_gradient<In, true>(stack); }

}  // namespace xent::operators
