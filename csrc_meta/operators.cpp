// Class indices as targets. Each operator once, for the CPU and for meta tensors: read the arguments in the order of the
// schema, check them, allocate the results, compute.
#include "operators.h"

#include "outputs.h"

namespace xent::operators {
namespace {

struct Forward {
  explicit Forward(Stack& stack)
      : logits(stack.tensor()), target(stack.tensor()), weight(stack.maybe_tensor()), options(stack.options()) {
    checks::index_forward(logits, target, weight, options);
  }

  Tensor row_values() const { return per_row(logits, target); }

  bridge::Problem problem() const {
    const bridge::Problem problem(logits, target, weight, options);
    problem.check_targets(problem.classes);
    return problem;
  }

  // argmax and entropy may be null.
  void write(const Tensor& loss, const Tensor& lse, int64_t* argmax = nullptr, void* entropy = nullptr) const {
    cpu::forward(problem(), loss.mutable_data_ptr(), lse.mutable_data_ptr(), argmax, entropy, bridge::threads());
  }

  Tensor logits;
  Tensor target;
  MaybeTensor weight;
  Options options;
};

struct Backward {
  Backward(Stack& stack, bool with_entropy = false)
      : grad_loss(stack.tensor()),
        grad_lse(stack.maybe_tensor()),
        grad_entropy(with_entropy ? stack.maybe_tensor() : std::nullopt),
        logits(stack.tensor()),
        target(stack.tensor()),
        lse(stack.tensor()),
        entropy(with_entropy ? MaybeTensor(stack.tensor()) : std::nullopt),
        weight(stack.maybe_tensor()),
        divisor(with_entropy ? std::nullopt : stack.maybe_tensor()),
        options(stack.options()),
        lse_square_scale(with_entropy ? 0.0 : stack.number()) {
    checks::index_forward(logits, target, weight, options);
    if (with_entropy) {
      checks::row_values("grad_loss", grad_loss, logits);
    } else {
      checks::scalar_or_row_values("logits", logits, "grad_loss", grad_loss);
    }
    checks::row_values("grad_lse", grad_lse, logits);
    checks::row_values("lse", lse, logits);
    checks::divisor(divisor, logits);
    checks::row_values("grad_entropy", grad_entropy, logits);
    checks::row_values("entropy", entropy, logits);
  }

  std::vector<Tensor> outputs() const { return {}; }

  void write(const std::vector<Tensor>&, const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const Tensor dense_lse = bridge::dense(lse, dtype);
    const MaybeTensor dense_entropy = bridge::dense(entropy, dtype);
    const bridge::Upstream upstream(logits, grad_loss, grad_lse, grad_entropy, divisor, lse_square_scale);
    cpu::backward(bridge::Problem(values, target, weight, options), upstream, dense_lse.const_data_ptr(),
                  bridge::data(dense_entropy), grad, bridge::threads());
  }

  Tensor grad_loss;
  MaybeTensor grad_lse;
  MaybeTensor grad_entropy;
  Tensor logits;
  Tensor target;
  Tensor lse;
  MaybeTensor entropy;
  MaybeTensor weight;
  MaybeTensor divisor;
  Options options;
  double lse_square_scale;
};

struct BackwardEntropy : Backward {
  explicit BackwardEntropy(Stack& stack) : Backward(stack, true) {}
};

struct WithGrad {
  explicit WithGrad(Stack& stack)
      : logits(stack.tensor()),
        target(stack.tensor()),
        grad_scale(stack.tensor()),
        grad_lse_square(stack.maybe_tensor()),
        weight(stack.maybe_tensor()),
        options(stack.options()) {
    checks::index_forward(logits, target, weight, options);
    checks::scalar_or_row_values("logits", logits, "grad_scale", grad_scale);
    checks::scalar_or_row_values("logits", logits, "grad_lse_square", grad_lse_square);
  }

  // loss, lse
  std::vector<Tensor> outputs() const { return {per_row(logits, target), per_row(logits, target)}; }

  void write(const std::vector<Tensor>& outputs, const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const bridge::Problem problem(values, target, weight, options);
    problem.check_targets(problem.classes);
    const bridge::PerRow scale(grad_scale, dtype), lse_square(grad_lse_square, dtype);
    cpu::with_grad(problem, scale.values, lse_square.values, outputs[0].mutable_data_ptr(),
                   outputs[1].mutable_data_ptr(), grad, bridge::threads());
  }

  Tensor logits;
  Tensor target;
  Tensor grad_scale;
  MaybeTensor grad_lse_square;
  MaybeTensor weight;
  Options options;
};

}  // namespace

void cross_entropy_forward(Stack& stack) {
  const Forward in(stack);
  const Tensor loss = in.row_values(), lse = in.row_values();
  if (!stack.meta) {
    in.write(loss, lse);
  }
  stack.returns({loss, lse});
}

void cross_entropy_forward_argmax(Stack& stack) {
  const Forward in(stack);
  const Tensor loss = in.row_values(), lse = in.row_values(), argmax = aten::empty_like(in.target, ScalarType::Long);
  if (!stack.meta) {
    in.write(loss, lse, argmax.mutable_data_ptr<int64_t>());
  }
  stack.returns({loss, lse, argmax});
}

void cross_entropy_forward_entropy(Stack& stack) {
  const Forward in(stack);
  const Tensor loss = in.row_values(), lse = in.row_values(), entropy = in.row_values();
  if (!stack.meta) {
    in.write(loss, lse, nullptr, entropy.mutable_data_ptr());
  }
  stack.returns({loss, lse, entropy});
}

void cross_entropy_reduced(Stack& stack) {
  const Forward in(stack);
  const Reduction reduction(stack, in.logits);
  const Tensor value = numbers(in.logits, {}), divisor = numbers(in.logits, {2}), lse = in.row_values();
  if (!stack.meta) {
    const Tensor loss = in.row_values();
    const bridge::Problem problem = in.problem();
    cpu::forward_counted(problem, loss.mutable_data_ptr(), lse.mutable_data_ptr(), bridge::threads());
    reduction.write(problem, loss, lse, nullptr, divisor, value);
  }
  stack.returns({value, divisor, lse});
}

void cross_entropy_divisor(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  Options options;
  options.ignore_index = stack.integer();
  checks::index_forward(logits, target, weight, options);
  const Tensor divisor = numbers(logits, {2}), inverse = numbers(logits, {2});
  if (!stack.meta) {
    cpu::divisor(bridge::Problem(logits, target, weight, options, false), nullptr, divisor.mutable_data_ptr(),
                 inverse.mutable_data_ptr());
  }
  stack.returns({divisor, inverse});
}

XENT_WITH_TWIN(cross_entropy_backward, Backward)
XENT_WITH_TWIN(cross_entropy_with_grad, WithGrad)

void cross_entropy_backward_entropy(Stack& stack) {
  write_gradient<BackwardEntropy, false>(stack);
}

void scale_grad_(Stack& stack) {
  const Tensor grad = stack.tensor();
  const Tensor factor = stack.tensor();
  checks::scale_grad(grad, factor);
  if (!stack.meta) {
    checks::writable("grad", grad);
    const bridge::Write out(grad);
    const bridge::PerRow values(factor, bridge::accumulator(grad));
    cpu::scale_grad(bridge::Problem(out.memory(), std::nullopt, std::nullopt, Options(), false), out.rows,
                    values.values, bridge::threads());
    out.finish();
  }
  stack.returns({});
}

}  // namespace xent::operators
