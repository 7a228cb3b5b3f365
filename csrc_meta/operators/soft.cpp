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
  const Tensor column = aten::select(logits, -1, 0);
  const Tensor loss = per_row(logits, column), lse = per_row(logits, column);
  if (!is_meta(logits)) {
    const tensors::Read targets = tensors::read(probabilities);
    const tensors::Problem problem(logits, std::nullopt, weight, options);
    const double least =
        cpu::soft_forward(problem, tensors::dtype(probabilities), targets.rows, check_target, loss.mutable_data_ptr(),
                          lse.mutable_data_ptr(), tensors::threads(logits, softcap));
    checks::soft_values(least);
  }
  return {loss, lse};
}

Tensor backward(const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& logits, const Tensor& probabilities,
                const Tensor& lse, const MaybeTensor& weight, double label_smoothing, MaybeNumber softcap,
                double logit_scale) {
  const RowOptions options = without_index(label_smoothing, softcap, logit_scale);
  checks::soft(logits, probabilities, weight, options);
  checks::rows("grad_loss", grad_loss, logits);
  checks::rows("grad_lse", grad_lse, logits);
  checks::rows("lse", lse, logits);
  return new_gradient(logits, std::nullopt, [&](const Tensor& values, cpu::MutableRows grad) {
    const tensors::Read targets = tensors::read(probabilities);
    const Tensor dense_lse = tensors::dense(lse, tensors::accumulator(logits));
    const tensors::Problem problem(values, std::nullopt, weight, options);
    const tensors::Upstream upstream(logits, grad_loss, grad_lse);
    cpu::soft_backward(problem, tensors::dtype(probabilities), targets.rows, upstream, dense_lse.const_data_ptr(), grad,
                       tensors::threads(logits, softcap));
  });
}

}  // namespace

void add_soft(const Add& add) {
  add("soft_cross_entropy_forward", TORCH_BOX(&forward));
  add("soft_cross_entropy_backward", TORCH_BOX(&backward));
}

}  // namespace xent::operators
