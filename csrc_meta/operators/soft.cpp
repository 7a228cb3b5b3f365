// Class probabilities as targets.
#include "operators/operators.h"

#include "operators/outputs.h"

namespace xent::operators {
namespace {

// They have no ignore_index.
RowOptions without_index(double label_smoothing, MaybeNumber softcap, double logit_scale) {
  return {RowOptions().ignore_index, label_smoothing, softcap, logit_scale};
}

Two forward(const Tensor& logits, const Tensor& probabilities, const MaybeTensor& weight, bool check_target,
            double label_smoothing, MaybeNumber softcap, double logit_scale) {
  const RowOptions options = without_index(label_smoothing, softcap, logit_scale);
  checks::soft(logits, probabilities, weight, options);
  const Tensor column = torch::stable::select(logits, -1, 0);
  const Tensor loss = per_row(logits, column), lse = per_row(logits, column);
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    const cpu::Problem problem = arguments.problem(logits, std::nullopt, weight, options);
    checks::soft_values(cpu::soft_forward(
        problem, tensors::dtype(probabilities), arguments.rows(probabilities), check_target, loss.mutable_data_ptr(),
        lse.mutable_data_ptr(), tensors::threads(logits, softcap)));
  }
  return {loss, lse};
}

auto backward(const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& logits, const Tensor& probabilities,
              const Tensor& lse, const MaybeTensor& weight, double label_smoothing, MaybeNumber softcap,
              double logit_scale) {
  const RowOptions options = without_index(label_smoothing, softcap, logit_scale);
  checks::soft(logits, probabilities, weight, options);
  checks::rows("grad_loss", grad_loss, logits);
  checks::rows("grad_lse", grad_lse, logits);
  checks::rows("lse", lse, logits);
  return with_gradient<false>(logits, std::nullopt, std::tuple(), [&](const Tensor& values, cpu::MutableRows grad) {
    tensors::Arguments arguments(logits);
    const cpu::Upstream upstream{.loss = arguments.per_row(grad_loss),
                                 .lse = arguments.per_row(grad_lse),
                                 .saved_lse = arguments.dense(lse)};
    cpu::soft_backward(arguments.problem(values, std::nullopt, weight, options), tensors::dtype(probabilities),
                       arguments.rows(probabilities), upstream, grad, tensors::threads(logits, softcap));
  });
}

}  // namespace

void add_soft(const Add& add) {
  add("soft_cross_entropy_forward", TORCH_BOX(&forward));
  add("soft_cross_entropy_backward", TORCH_BOX(&backward));
}

}  // namespace xent::operators
