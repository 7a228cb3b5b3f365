// xent::cross_entropy, as in xent_ops/ops/composite.py: the operator of a reduced loss, or the row operator and the
// z-loss of each row. It calls operators only, so it serves any device, symbolic sizes and tracers.
#include "checks.h"
#include "operators.h"

namespace xent::operators {
namespace {

// The z-loss of each row, 0 in ignored ones.
Tensor z_losses(const Tensor& lse, const Tensor& target, int64_t ignore_index, double lse_square_scale) {
  const ScalarType dtype = lse.scalar_type();
  const Tensor counted = aten::call("aten::ne", "Tensor", aten::to(target, ScalarType::Long),
                                    aten::scalar(ignore_index));
  // Masked before the square: a row of padding may hold anything.
  const Tensor kept = aten::call("aten::where", "self", counted, lse, aten::scalar(0.0, dtype));
  return aten::call("aten::mul", "Tensor", aten::call("aten::square", "", kept), aten::scalar(lse_square_scale, dtype));
}

}  // namespace

void cross_entropy(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  const Options options = stack.options();
  const double lse_square_scale = stack.number();
  const std::string reduction = stack.next<std::string>();
  checks::reduction(reduction);
  checks::lse_square_scale(lse_square_scale, logits);

  if (reduction != "none") {
    const auto results = aten::call_all<3>("xent::cross_entropy_reduced", "", logits, target, weight,
                                           options.ignore_index, options.label_smoothing, options.softcap,
                                           options.logit_scale, lse_square_scale, reduction);
    return stack.returns({results[0]});
  }
  const auto rows = aten::call_all<2>("xent::cross_entropy_forward", "", logits, target, weight,
                                      options.ignore_index, options.label_smoothing, options.softcap,
                                      options.logit_scale);
  if (lse_square_scale == 0.0) {
    return stack.returns({rows[0]});
  }
  // A sum, because aten::add takes a Scalar, which the stable ABI does not have.
  const Tensor z_loss = z_losses(rows[1], target, options.ignore_index, lse_square_scale);
  stack.returns({torch::stable::subtract(rows[0], z_loss, -1.0)});
}

}  // namespace xent::operators
