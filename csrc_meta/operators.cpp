// Every operator once, for the CPU and for meta tensors: read the arguments, check them, allocate the results, compute.
#include "operators.h"

#include "checks.h"
#include "bridge.h"

namespace xent::operators {
namespace {

// Results are allocated by operators of torch on tensors that are there: no size is read, since one may be symbolic.

// One number for each row of the logits; `like` has that shape.
Tensor per_row(const Tensor& logits, const Tensor& like) {
  return aten::empty_like(like, bridge::accumulator(logits));
}

// A gradient is contiguous, whatever the strides of the logits.
Tensor gradient_of(const Tensor& logits) {
  return aten::empty_like(logits, logits.scalar_type());
}

// Arguments as the kernels take them. Keeps the memory of what had to be converted.
class Problem : public cpu::Problem {
 public:
  Problem(const Tensor& logits, const MaybeTensor& weight, const Options& options) : logits_(bridge::read(logits)) {
    dtype = bridge::dtype(logits);
    rows = 1;
    for (int64_t i = 0; i + 1 < logits.dim(); ++i) {
      rows *= logits.size(i);
    }
    classes = logits.size(logits.dim() - 1);
    this->logits = logits_.rows;
    if (weight) {
      weight_ = bridge::dense(*weight, bridge::accumulator(logits));
      this->weight = weight_->const_data_ptr();
    }
    ignore_index = options.ignore_index;
    label_smoothing = options.label_smoothing;
    softcap = options.softcap.value_or(0.0);
    logit_scale = options.logit_scale;
  }

  Problem(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, const Options& options)
      : Problem(logits, weight, options) {
    target_ = bridge::dense(target, ScalarType::Long);
    this->target = target_->const_data_ptr<int64_t>();
  }

  void check_targets(int64_t num_classes) const { checks::target_values(*target_, num_classes, ignore_index); }

 private:
  bridge::Read logits_;
  MaybeTensor weight_;
  MaybeTensor target_;
};

class Upstream : public cpu::Upstream {
 public:
  Upstream(const Tensor& logits, const Tensor& grad_loss, const MaybeTensor& grad_lse,
           const MaybeTensor& grad_entropy = std::nullopt)
      : loss_(grad_loss, bridge::accumulator(logits)),
        lse_(grad_lse, bridge::accumulator(logits)),
        entropy_(grad_entropy, bridge::accumulator(logits)) {
    loss = loss_.values;
    lse = lse_.values;
    entropy = entropy_.values;
  }

 private:
  bridge::PerRow loss_;
  bridge::PerRow lse_;
  bridge::PerRow entropy_;
};

struct Forward {
  explicit Forward(Stack& stack)
      : logits(stack.tensor()), target(stack.tensor()), weight(stack.maybe_tensor()), options(stack.options()) {
    checks::index_forward(logits, target, weight, options);
  }

  Tensor logits;
  Tensor target;
  MaybeTensor weight;
  Options options;
};

struct Backward {
  Backward(Stack& stack, bool with_entropy)
      : grad_loss(stack.tensor()),
        grad_lse(stack.maybe_tensor()),
        grad_entropy(with_entropy ? stack.maybe_tensor() : std::nullopt),
        logits(stack.tensor()),
        target(stack.tensor()),
        lse(stack.tensor()),
        entropy(with_entropy ? MaybeTensor(stack.tensor()) : std::nullopt),
        weight(stack.maybe_tensor()),
        divisor(with_entropy ? std::nullopt : stack.maybe_tensor()),
        options(stack.options()) {
    checks::index_forward(logits, target, weight, options);
    checks::row_values("grad_loss", grad_loss, logits);
    checks::row_values("grad_lse", grad_lse, logits);
    checks::row_values("lse", lse, logits);
    checks::divisor(divisor, logits);
    checks::row_values("grad_entropy", grad_entropy, logits);
    checks::row_values("entropy", entropy, logits);
  }

  void write(const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const Tensor dense_lse = bridge::dense(lse, dtype);
    const MaybeTensor dense_entropy = bridge::dense(entropy, dtype);
    const Tensor divided = divisor ? aten::div(aten::to(grad_loss, dtype), aten::to(*divisor, dtype)) : grad_loss;
    cpu::backward(Problem(values, target, weight, options), Upstream(logits, divided, grad_lse, grad_entropy),
                  dense_lse.const_data_ptr(), bridge::data(dense_entropy), grad, bridge::threads());
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

  void write(const Tensor& loss, const Tensor& lse, const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const Problem problem(values, target, weight, options);
    problem.check_targets(problem.classes);
    const bridge::PerRow scale(grad_scale, dtype), lse_square(grad_lse_square, dtype);
    cpu::with_grad(problem, scale.values, lse_square.values, loss.mutable_data_ptr(), lse.mutable_data_ptr(), grad,
                   bridge::threads());
  }

  Tensor logits;
  Tensor target;
  Tensor grad_scale;
  MaybeTensor grad_lse_square;
  MaybeTensor weight;
  Options options;
};

// What follows the logits and the target of a shard differs: their place comes before the weight.
struct Place {
  explicit Place(Stack& stack) : shard(stack.shard()), weight(stack.maybe_tensor()) {}

  cpu::Shard shard;
  MaybeTensor weight;
};

struct ShardBackward {
  explicit ShardBackward(Stack& stack)
      : grad_loss(stack.tensor()),
        grad_lse(stack.maybe_tensor()),
        logits(stack.tensor()),
        target(stack.tensor()),
        lse(stack.tensor()),
        place(stack),
        coefficient(stack.maybe_tensor()),
        options(stack.options()) {
    checks::shard(logits, target, place.shard, place.weight, options);
    checks::shard_coefficient(place.weight, coefficient);
    checks::row_values("grad_loss", grad_loss, logits);
    checks::row_values("grad_lse", grad_lse, logits);
    checks::row_values("lse", lse, logits);
    checks::row_values("coefficient", coefficient, logits);
  }

  void write(const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const Tensor dense_lse = bridge::dense(lse, dtype);
    const MaybeTensor dense_coefficient = bridge::dense(coefficient, dtype);
    cpu::shard_backward(Problem(values, target, place.weight, options), place.shard,
                        Upstream(logits, grad_loss, grad_lse), dense_lse.const_data_ptr(),
                        bridge::data(dense_coefficient), grad, bridge::threads());
  }

  Tensor grad_loss;
  MaybeTensor grad_lse;
  Tensor logits;
  Tensor target;
  Tensor lse;
  Place place;
  MaybeTensor coefficient;
  Options options;
};

// `write(..., values, grad)` reads the logits from `values` and writes their gradient to `grad`, which may be the same
// memory: so logits that do not lie as the kernels take them are copied once, not for each.

template <class In>
void return_gradient(Stack& stack, const In& in) {
  const Tensor grad_logits = gradient_of(in.logits);
  if (!stack.meta) {
    in.write(in.logits, bridge::Write(grad_logits).rows);
  }
  stack.returns(grad_logits);
}

template <class In, class... Results>
void write_over_logits(Stack& stack, const In& in, const Results&... results) {
  if (!stack.meta) {
    checks::writable("logits", in.logits);
    const bridge::Write out(in.logits);
    in.write(results..., out.memory(), out.rows);
    out.finish();
  }
  stack.returns(results...);
}

// What a rank hands over: 3 numbers for each row, 4 with class weights, and a header of 5.
Tensor shard_part(const Tensor& logits, const Tensor& target, const MaybeTensor& weight) {
  const Tensor row = aten::flatten(per_row(logits, target));
  std::vector<Tensor> parts(weight ? 4 : 3, row);
  parts.push_back(torch::stable::new_empty(row, {{5}}));
  return aten::cat(parts);
}

}  // namespace

void cross_entropy_forward(Stack& stack) {
  const Forward in(stack);
  const Tensor loss = per_row(in.logits, in.target), lse = per_row(in.logits, in.target);
  if (!stack.meta) {
    const Problem problem(in.logits, in.target, in.weight, in.options);
    problem.check_targets(problem.classes);
    cpu::forward(problem, loss.mutable_data_ptr(), lse.mutable_data_ptr(), nullptr, nullptr, bridge::threads());
  }
  stack.returns(loss, lse);
}

void cross_entropy_forward_argmax(Stack& stack) {
  const Forward in(stack);
  const Tensor loss = per_row(in.logits, in.target), lse = per_row(in.logits, in.target), argmax = aten::empty_like(in.target, ScalarType::Long);
  if (!stack.meta) {
    const Problem problem(in.logits, in.target, in.weight, in.options);
    problem.check_targets(problem.classes);
    cpu::forward(problem, loss.mutable_data_ptr(), lse.mutable_data_ptr(), argmax.mutable_data_ptr<int64_t>(), nullptr,
                 bridge::threads());
  }
  stack.returns(loss, lse, argmax);
}

void cross_entropy_forward_entropy(Stack& stack) {
  const Forward in(stack);
  const Tensor loss = per_row(in.logits, in.target), lse = per_row(in.logits, in.target), entropy = per_row(in.logits, in.target);
  if (!stack.meta) {
    const Problem problem(in.logits, in.target, in.weight, in.options);
    problem.check_targets(problem.classes);
    cpu::forward(problem, loss.mutable_data_ptr(), lse.mutable_data_ptr(), nullptr, entropy.mutable_data_ptr(),
                 bridge::threads());
  }
  stack.returns(loss, lse, entropy);
}

void cross_entropy_backward(Stack& stack) {
  return_gradient(stack, Backward(stack, false));
}

void cross_entropy_backward_entropy(Stack& stack) {
  return_gradient(stack, Backward(stack, true));
}

void cross_entropy_backward_(Stack& stack) {
  write_over_logits(stack, Backward(stack, false));
}

void cross_entropy_with_grad(Stack& stack) {
  const WithGrad in(stack);
  const Tensor loss = per_row(in.logits, in.target), lse = per_row(in.logits, in.target);
  const Tensor grad_logits = gradient_of(in.logits);
  if (!stack.meta) {
    in.write(loss, lse, in.logits, bridge::Write(grad_logits).rows);
  }
  stack.returns(loss, lse, grad_logits);
}

void cross_entropy_with_grad_(Stack& stack) {
  const WithGrad in(stack);
  const Tensor loss = per_row(in.logits, in.target), lse = per_row(in.logits, in.target);
  write_over_logits(stack, in, loss, lse);
}

void scale_grad_(Stack& stack) {
  const Tensor grad = stack.tensor();
  const Tensor factor = stack.tensor();
  checks::scale_grad(grad, factor);
  if (!stack.meta) {
    checks::writable("grad", grad);
    const bridge::Write out(grad);
    const bridge::PerRow values(factor, bridge::accumulator(grad));
    cpu::scale_grad(Problem(out.memory(), std::nullopt, Options()), out.rows, values.values, bridge::threads());
    out.finish();
  }
  stack.returns();
}

void soft_cross_entropy_forward(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  const Options options = stack.soft_options();
  checks::soft_forward(logits, target, weight, options);
  const Tensor column = aten::select(logits, -1, 0);
  const Tensor loss = per_row(logits, column), lse = per_row(logits, column);
  if (!stack.meta) {
    const bridge::Read probabilities = bridge::read(target);
    cpu::soft_forward(Problem(logits, weight, options), bridge::dtype(target), probabilities.rows,
                      loss.mutable_data_ptr(), lse.mutable_data_ptr(), bridge::threads());
  }
  stack.returns(loss, lse);
}

void soft_cross_entropy_backward(Stack& stack) {
  const Tensor grad_loss = stack.tensor();
  const MaybeTensor grad_lse = stack.maybe_tensor();
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const Tensor lse = stack.tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  const Options options = stack.soft_options();
  checks::soft_forward(logits, target, weight, options);
  checks::row_values("grad_loss", grad_loss, logits);
  checks::row_values("grad_lse", grad_lse, logits);
  checks::row_values("lse", lse, logits);
  const Tensor grad_logits = gradient_of(logits);
  if (!stack.meta) {
    const bridge::Read probabilities = bridge::read(target);
    const Tensor dense_lse = bridge::dense(lse, bridge::accumulator(logits));
    cpu::soft_backward(Problem(logits, weight, options), bridge::dtype(target), probabilities.rows,
                       Upstream(logits, grad_loss, grad_lse), dense_lse.const_data_ptr(),
                       bridge::Write(grad_logits).rows, bridge::threads());
  }
  stack.returns(grad_logits);
}

void cross_entropy_shard(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const Place place(stack);
  const Options options = stack.options();
  checks::shard(logits, target, place.shard, place.weight, options);
  const Tensor out = aten::unsqueeze(shard_part(logits, target, place.weight), 0);
  if (!stack.meta) {
    const Problem problem(logits, target, place.weight, options);
    problem.check_targets(place.shard.num_classes);
    if (out.numel() != cpu::shard_width(problem)) {
      throw std::logic_error("xent: the kernel hands over another number of values than was allocated");
    }
    cpu::shard_forward(problem, place.shard, out.mutable_data_ptr(), bridge::threads());
  }
  stack.returns(out);
}

void cross_entropy_shard_join(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const Tensor gathered = stack.tensor();
  const Place place(stack);
  const Options options = stack.options();
  checks::shard(logits, target, place.shard, place.weight, options);
  checks::shard_gathered(gathered, shard_part(logits, target, place.weight));
  const Tensor loss = per_row(logits, target), lse = per_row(logits, target);
  const Tensor target_weight = per_row(logits, target), coefficient = per_row(logits, target);
  if (!stack.meta) {
    const Tensor dense = torch::stable::contiguous(gathered);
    cpu::shard_join(Problem(logits, target, place.weight, options), place.shard, dense.const_data_ptr(), dense.size(0),
                    loss.mutable_data_ptr(), lse.mutable_data_ptr(), target_weight.mutable_data_ptr(),
                    coefficient.mutable_data_ptr(), bridge::threads());
  }
  stack.returns(loss, lse, target_weight, coefficient);
}

void cross_entropy_shard_backward(Stack& stack) {
  return_gradient(stack, ShardBackward(stack));
}

void cross_entropy_shard_backward_(Stack& stack) {
  write_over_logits(stack, ShardBackward(stack));
}

}  // namespace xent::operators
