// xent::cross_entropy, as in xent_ops/ops/composite.py: the operator of a reduced loss, or the row operator and the
// z-loss of each row. Calls operators only, so it serves any device, symbolic sizes and tracers.
#include "checks.h"
#include "operators/operators.h"

#include <string>

namespace xent::operators {
namespace {

Tensor cross_entropy(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index,
                     double label_smoothing, MaybeNumber softcap, double logit_scale, double lse_square_scale,
                     const std::string& reduction) {
  checks::reduction(reduction, true);
  if (reduction != "none") {
    return aten::call_all<4>("xent::cross_entropy_reduced", "", logits, target, weight, ignore_index, label_smoothing,
                             softcap, logit_scale, lse_square_scale, reduction)[0];
  }
  const auto rows = aten::call_all<5>("xent::cross_entropy_forward", "", logits, target, weight, false, false, false,
                                      false, ignore_index, label_smoothing, softcap, logit_scale);
  if (lse_square_scale == 0.0) {
    return rows[0];
  }
  const Tensor index = aten::to(target, ScalarType::Long);
  const Tensor counted = aten::call("aten::ne", "Tensor", index, aten::scalar(ignore_index));
  // Masked before the square: a row of padding may hold anything.
  const ScalarType dtype = rows[1].scalar_type();
  const Tensor kept = aten::call("aten::where", "self", counted, rows[1], aten::scalar(0.0, dtype));
  // By subtraction: aten::add takes a Scalar, and the stable ABI has no Scalar.
  const Tensor square = aten::call("aten::square", "", kept);
  return torch::stable::subtract(rows[0], square, -lse_square_scale);
}

}  // namespace

void add_composite(const Add& add) { add("cross_entropy", TORCH_BOX(&cross_entropy)); }

}  // namespace xent::operators
