// What keeps the gradients of float16 logits in range: xent_ops/head/float16.py, whose reasons hold here.
#pragma once

#include "chunks.h"

#include <initializer_list>

namespace xent::operators {

// What to divide by, (): the number, or 1 in place of zero, infinity and NaN.
inline Tensor divisible(const Tensor& number) {
  const ScalarType dtype = number.scalar_type();
  const Tensor good = aten::call("aten::logical_and", "", number, aten::call("aten::isfinite", "", number));
  return aten::where(good, number, aten::scalar(1.0, dtype));
}

// What to divide upstream gradients by, so that none is above one, with its class weights. grad_loss, target: (N,).
inline Tensor largest(const Head& head, const Tensor& target, Tensor grad_loss, std::initializer_list<MaybeTensor> others) {
  const ScalarType dtype = grad_loss.scalar_type();
  const Tensor zero = aten::scalar(0.0, dtype);
  if (head.weight) {
    const Tensor weight = aten::to(*head.weight, dtype);
    const Tensor index = aten::call("aten::clamp", "Tensor", aten::to(target, ScalarType::Long),
                                    MaybeTensor(aten::scalar(0)), MaybeTensor(aten::scalar(weight.size(0) - 1)));
    Tensor masses = aten::call("aten::index_select", "", weight, int64_t{0}, index);
    if (head.options.label_smoothing > 0.0) {
      masses = aten::add(aten::call("aten::abs", "", masses),
                         aten::call("aten::mean", "", aten::call("aten::abs", "", weight), std::optional(dtype)));
    }
    grad_loss = aten::mul(grad_loss, masses);
  }
  std::vector<Tensor> all{aten::unsqueeze(zero, 0),
                          aten::where(is_counted(target, head.options.ignore_index), grad_loss, zero)};
  for (const MaybeTensor& other : others) {
    if (other) {
      all.push_back(*other);
    }
  }
  return divisible(aten::call("aten::max", "", aten::call("aten::abs", "", aten::cat(all))));
}

// The gradients of a backward: of all rows, times what their upstream gradients were divided by, in the input's dtype.
inline std::vector<Tensor> given_back(std::vector<Tensor> made, const Head& head, const Rows& rows, const Mask& mask,
                                      const MaybeTensor& factor) {
  made[0] = mask[0] ? rows.give(made[0], head.input, 0.0) : made[0];
  for (Tensor& gradient : made) {
    if (factor) {
      aten::call_all<0>("xent::scale_grad_", "", gradient, *factor);
    }
    gradient = aten::to(gradient, head.dtype());
  }
  return made;
}

}  // namespace xent::operators
