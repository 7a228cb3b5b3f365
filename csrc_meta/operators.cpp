// Class indices as targets. Each operator once, for the CPU and for meta tensors: read the arguments in the order of the
// schema, check them, allocate the results, compute.
#include "operators.h"

#include "outputs.h"

namespace xent::operators {
namespace {

struct Forward {
  explicit Forward(Stack& stack) : logits(stack.tensor()), target(stack.tensor()), weight(stack.maybe_tensor()) {}

  void read_options(Stack& stack) {
    options = stack.options();
    checks::index_forward(logits, target, weight, options);
  }

  Tensor row_values() const { return per_row(logits, target); }

  bridge::Problem problem() const {
    const bridge::Problem problem(logits, target, weight, options);
    problem.check_targets(problem.classes);
    return problem;
  }

  Tensor logits;
  Tensor target;
  MaybeTensor weight;
  Options options;
};

struct Backward {
  explicit Backward(Stack& stack)
      : grad_loss(stack.tensor()),
        grad_lse(stack.maybe_tensor()),
        logits(stack.tensor()),
        target(stack.tensor()),
        lse(stack.tensor()),
        weight(stack.maybe_tensor()),
        divisor(stack.maybe_tensor()),
        grad_entropy(stack.maybe_tensor()),
        entropy(stack.maybe_tensor()),
        coefficient(stack.maybe_tensor()),
        class_start(stack.integer()),
        num_classes(stack.next<std::optional<int64_t>>()),
        grad_dtype(stack.next<std::optional<ScalarType>>()),
        options(stack.options()),
        lse_square_scale(stack.number()) {
    if (num_classes) {
      checks::shard(logits, target, {class_start, *num_classes}, weight, options);
    } else {
      checks::index_forward(logits, target, weight, options);
    }
    checks::narrower(grad_dtype, logits);
    checks::slice_of(class_start, num_classes, weight, coefficient);
    checks::scalar_or_row_values("logits", logits, "grad_loss", grad_loss);
    checks::row_values("grad_lse", grad_lse, logits);
    checks::row_values("lse", lse, logits);
    checks::row_values("coefficient", coefficient, logits);
    checks::divisor(divisor, logits);
    checks::with_entropy("logits", logits, grad_entropy, entropy);
  }

  std::vector<Tensor> outputs() const { return {}; }

  void write(const std::vector<Tensor>&, const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const Tensor dense_lse = bridge::dense(lse, dtype);
    const MaybeTensor dense_entropy = bridge::dense(entropy, dtype), dense_coefficient = bridge::dense(coefficient, dtype);
    const bridge::Upstream upstream(logits, grad_loss, grad_lse, grad_entropy, divisor, lse_square_scale);
    const bridge::Problem problem(values, target, weight, options);
    cpu::backward(problem, {class_start, num_classes.value_or(problem.classes)}, upstream, dense_lse.const_data_ptr(),
                  bridge::data(dense_entropy), bridge::data(dense_coefficient), grad, bridge::threads(logits, problem.softcap));
  }

  Tensor grad_loss;
  MaybeTensor grad_lse;
  Tensor logits;
  Tensor target;
  Tensor lse;
  MaybeTensor weight;
  MaybeTensor divisor;
  MaybeTensor grad_entropy;
  MaybeTensor entropy;
  MaybeTensor coefficient;
  int64_t class_start;
  std::optional<int64_t> num_classes;
  std::optional<ScalarType> grad_dtype;
  Options options;
  double lse_square_scale;
};

struct WithGrad {
  explicit WithGrad(Stack& stack)
      : logits(stack.tensor()),
        target(stack.tensor()),
        grad_scale(stack.tensor()),
        grad_lse_square(stack.maybe_tensor()),
        weight(stack.maybe_tensor()),
        with_argmax(stack.next<bool>()),
        with_entropy(stack.next<bool>()),
        grad_dtype(stack.next<std::optional<ScalarType>>()),
        options(stack.options()) {
    checks::narrower(grad_dtype, logits);
    checks::index_forward(logits, target, weight, options);
    checks::scalar_or_row_values("logits", logits, "grad_scale", grad_scale);
    checks::scalar_or_row_values("logits", logits, "grad_lse_square", grad_lse_square);
  }

  std::vector<Tensor> outputs() const { return statistics(logits, target, with_argmax, with_entropy); }

  void write(const std::vector<Tensor>& outputs, const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const bridge::Problem problem(values, target, weight, options);
    problem.check_targets(problem.classes);
    const bridge::PerRow scale(grad_scale, dtype), lse_square(grad_lse_square, dtype);
    cpu::with_grad(problem, scale.values, lse_square.values, outputs[0].mutable_data_ptr(),
                   outputs[1].mutable_data_ptr(), with_argmax ? outputs[2].mutable_data_ptr<int64_t>() : nullptr,
                   with_entropy ? outputs[3].mutable_data_ptr() : nullptr, grad, bridge::threads(logits, problem.softcap));
  }

  Tensor logits;
  Tensor target;
  Tensor grad_scale;
  MaybeTensor grad_lse_square;
  MaybeTensor weight;
  bool with_argmax;
  bool with_entropy;
  std::optional<ScalarType> grad_dtype;
  Options options;
};

}  // namespace

void cross_entropy_forward(Stack& stack) {
  Forward in(stack);
  const bool with_argmax = stack.next<bool>(), with_entropy = stack.next<bool>();
  in.read_options(stack);
  const std::vector<Tensor> made = statistics(in.logits, in.target, with_argmax, with_entropy);
  if (!stack.meta) {
    cpu::forward(in.problem(), made[0].mutable_data_ptr(), made[1].mutable_data_ptr(),
                 with_argmax ? made[2].mutable_data_ptr<int64_t>() : nullptr,
                 with_entropy ? made[3].mutable_data_ptr() : nullptr, bridge::threads(in.logits, in.options.softcap));
  }
  stack.returns(made);
}

void cross_entropy_reduced(Stack& stack) {
  Forward in(stack);
  in.read_options(stack);
  const Reduction reduction(stack, in.logits);
  const Tensor value = numbers(in.logits, {}), divisor = numbers(in.logits, {2}), lse = in.row_values();
  if (!stack.meta) {
    const Tensor loss = in.row_values();
    const bridge::Problem problem = in.problem();
    cpu::forward_counted(problem, loss.mutable_data_ptr(), lse.mutable_data_ptr(), bridge::threads(in.logits, problem.softcap));
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

void scale_grad_(Stack& stack) {
  const Tensor grad = stack.tensor();
  const Tensor factor = stack.tensor();
  checks::scale_grad(grad, factor);
  if (!stack.meta) {
    checks::writable("grad", grad);
    const bridge::Write out(grad);
    const bridge::PerRow values(factor, bridge::accumulator(grad));
    cpu::scale_grad(bridge::Problem(out.memory(), std::nullopt, std::nullopt, Options(), false), out.rows,
                    values.values, bridge::threads(grad, std::nullopt));
    out.finish();
  }
  stack.returns({});
}

}  // namespace xent::operators
