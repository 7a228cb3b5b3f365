// Class probabilities as targets.
#include "operators.h"

#include "outputs.h"

namespace xent::operators {
namespace {

struct SoftBackward {
  static constexpr std::optional<ScalarType> grad_dtype{};

  explicit SoftBackward(Stack& stack)
      : grad_loss(stack.tensor()),
        grad_lse(stack.maybe_tensor()),
        logits(stack.tensor()),
        target(stack.tensor()),
        lse(stack.tensor()),
        weight(stack.maybe_tensor()),
        options(stack.soft_options()) {
    checks::soft_forward(logits, target, weight, options);
    checks::row_values("grad_loss", grad_loss, logits);
    checks::row_values("grad_lse", grad_lse, logits);
    checks::row_values("lse", lse, logits);
  }

  std::vector<Tensor> outputs() const { return {}; }

  void write(const std::vector<Tensor>&, const Tensor& values, cpu::MutableRows grad) const {
    const bridge::Read probabilities = bridge::read(target);
    const Tensor dense_lse = bridge::dense(lse, bridge::accumulator(logits));
    cpu::soft_backward(bridge::Problem(values, std::nullopt, weight, options), bridge::dtype(target),
                       probabilities.rows, bridge::Upstream(logits, grad_loss, grad_lse), dense_lse.const_data_ptr(),
                       grad, bridge::threads(logits, options.softcap));
  }

  Tensor grad_loss;
  MaybeTensor grad_lse;
  Tensor logits;
  Tensor target;
  Tensor lse;
  MaybeTensor weight;
  Options options;
};

}  // namespace

void soft_cross_entropy_forward(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  const bool check_target = stack.next<bool>();
  const Options options = stack.soft_options();
  checks::soft_forward(logits, target, weight, options);
  const Tensor column = aten::select(logits, -1, 0);
  const Tensor loss = per_row(logits, column), lse = per_row(logits, column);
  if (!stack.meta) {
    const bridge::Read probabilities = bridge::read(target);
    const double least =
        cpu::soft_forward(bridge::Problem(logits, std::nullopt, weight, options), bridge::dtype(target),
                          probabilities.rows, check_target, loss.mutable_data_ptr(), lse.mutable_data_ptr(),
                          bridge::threads(logits, options.softcap));
    checks::soft_values(least);
  }
  stack.returns({loss, lse});
}

void soft_cross_entropy_backward(Stack& stack) {
  write_gradient<SoftBackward, false>(stack);
}

}  // namespace xent::operators
