// From losses of rows to a reduced loss, as in xent_ops/kernels/reductions.py, by operators alone: for any device,
// symbolic sizes and tracers.
#pragma once

#include "aten.h"

#include <string>

namespace xent::operators {

// (V,) zeros for a linear_weight (V, H), without a look at V.
inline Tensor zero_per_class(const Tensor& linear_weight, ScalarType dtype) {
  return aten::sum(aten::narrow(linear_weight, 1, 0, 0), {{1}}, dtype);
}

inline Tensor is_counted(const Tensor& target, int64_t ignore_index) {
  return aten::call("aten::ne", "Tensor", aten::to(target, ScalarType::Long), aten::scalar(ignore_index));
}

// The weights of rows, 0 in ignored ones, whatever theirs are.
inline Tensor counted_weights(const Tensor& token_weight, const Tensor& target, int64_t ignore_index,
                              ScalarType dtype) {
  return aten::where(is_counted(target, ignore_index), aten::to(token_weight, dtype), aten::scalar(0.0, dtype));
}

inline MaybeTensor counted_weights(const MaybeTensor& token_weight, const Tensor& target, int64_t ignore_index,
                                   ScalarType dtype) {
  return token_weight ? MaybeTensor(counted_weights(*token_weight, target, ignore_index, dtype)) : token_weight;
}

// (2,): what the reduced loss of a linear cross entropy and its z-loss are divided by.
inline Tensor divided_by(const Tensor& linear_weight, const Tensor& target, const MaybeTensor& weight,
                         const MaybeTensor& divisor, const MaybeTensor& token_weight, int64_t ignore_index,
                         ScalarType dtype, const std::string& reduction) {
  if (reduction == "mean" && token_weight) {
    const Tensor of_tokens = counted_weights(*token_weight, target, ignore_index, dtype);
    Tensor of_targets = of_tokens;
    if (weight) {
      const Tensor counted = is_counted(target, ignore_index);
      const Tensor index = aten::where(counted, aten::to(target, ScalarType::Long), aten::scalar(0));
      const Tensor flat = aten::call("aten::reshape", "", index, std::vector<int64_t>{-1});
      const Tensor found = aten::call("aten::index_select", "", aten::to(*weight, dtype), int64_t{0}, flat);
      of_targets = aten::mul(of_tokens, aten::call("aten::view_as", "", found, target));
    }
    const std::vector<Tensor> sums{aten::unsqueeze(aten::sum(of_targets), 0), aten::unsqueeze(aten::sum(of_tokens), 0)};
    return aten::cat(sums);
  }
  if (reduction == "mean") {
    // Logits without memory: the operator reads their sizes alone.
    const std::vector<Tensor> parts{aten::unsqueeze(aten::empty_like(target, dtype), -1),
                                    zero_per_class(linear_weight, dtype)};
    const Tensor logits = aten::call<std::vector<Tensor>>("aten::broadcast_tensors", "", parts)[0];
    return aten::call_all<2>("xent::cross_entropy_divisor", "", logits, target, weight, ignore_index)[0];
  }
  if (!divisor) {
    const std::vector<int64_t> shape{2};
    return torch::stable::fill_(torch::stable::new_empty(target, shape, dtype), 1.0);
  }
  return torch::stable::contiguous(
      aten::call("aten::expand", "", aten::to(*divisor, dtype), std::vector<int64_t>{2}, false));
}

// The losses of rows to one number, or without divisors to themselves, with the z-loss; both times token_weight.
inline Tensor reduced(const Tensor& loss, const Tensor& lse, const Tensor& target, const MaybeTensor& divisors,
                      const MaybeTensor& token_weight, int64_t ignore_index, double lse_square_scale) {
  const auto reduce = [&](Tensor rows, int64_t divisor) {
    if (token_weight) {
      const Tensor factor = counted_weights(*token_weight, target, ignore_index, rows.scalar_type());
      const Tensor zero = aten::scalar(0.0, rows.scalar_type());
      rows = aten::where(aten::call("aten::ne", "Tensor", factor, zero), aten::mul(rows, factor), zero);
    }
    return divisors ? aten::div(aten::sum(rows), aten::select(*divisors, 0, divisor)) : rows;
  };
  const Tensor value = reduce(loss, 0);
  if (lse_square_scale == 0.0) {
    return value;
  }
  const ScalarType dtype = lse.scalar_type();
  // Masked before the square: a row of padding may hold anything.
  const Tensor kept = aten::where(is_counted(target, ignore_index), lse, aten::scalar(0.0, dtype));
  const Tensor z_losses = aten::mul(aten::call("aten::square", "", kept), aten::scalar(lse_square_scale, dtype));
  return aten::add(value, reduce(z_losses, 1));
}

}  // namespace xent::operators
