// The head and the loss as one, by chunks of rows: xent_ops/ops/linear/chunks.py, whose reasons hold here. The products
// are torch's, the rows are those of the operators that take logits.
#include "operators.h"

#include "outputs.h"
#include "reductions.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>

namespace xent::operators {
namespace {

using Mask = std::vector<bool>;  // which gradients are wanted: of input, linear_weight and linear_bias

// For the life of one: calls of torch record nothing for autograd, which stands above the operators.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGrad(const NoGrad&) = delete;

 private:
  bool enabled_;
};

struct Head {
  Tensor input;
  Tensor linear_weight;
  Tensor target;
  MaybeTensor linear_bias;
  MaybeTensor weight;
  Options options;
  std::optional<ScalarType> accumulate_dtype;
  std::optional<int64_t> chunk_rows;

  void read_chunking(Stack& stack) {
    accumulate_dtype = stack.next<std::optional<ScalarType>>();
    chunk_rows = stack.next<std::optional<int64_t>>();
  }

  void check() const {
    checks::linear(input, linear_weight, target, linear_bias, weight, options, accumulate_dtype, chunk_rows);
  }

  ScalarType dtype() const { return input.scalar_type(); }

  // In which the chunks' parts of linear_weight's gradient are added up.
  ScalarType sums() const {
    return accumulate_dtype.value_or(dtype() == ScalarType::Half ? ScalarType::Float : dtype());
  }

  Tensor row_values() const { return per_row(input, target); }

  // Calls a row operator, whose options come last.
  template <size_t results, class... Args>
  std::vector<Tensor> rows(const char* name, const Args&... args) const {
    return aten::call_all<results>(name, "", args..., options.ignore_index, options.label_smoothing, options.softcap,
                                   options.logit_scale);
  }
};

// Room for the gradients, (0,) for those that are not wanted; that of the bias holds zeros.
std::vector<Tensor> gradients(const Head& head, const Mask& mask, ScalarType weight_dtype, ScalarType bias_dtype) {
  const auto none = [&](ScalarType dtype) {
    const std::vector<int64_t> shape{0};
    return torch::stable::new_empty(head.input, shape, dtype);
  };
  return {mask[0] ? aten::empty_like(head.input, head.dtype()) : none(head.dtype()),
          mask[1] ? aten::empty_like(head.linear_weight, weight_dtype) : none(weight_dtype),
          mask[2] ? zero_per_class(head.linear_weight, bias_dtype) : none(bias_dtype)};
}

Tensor as_rows(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    rows *= tensor.size(i);
  }
  const std::vector<int64_t> shape{rows, tensor.size(tensor.dim() - 1)};
  return torch::stable::reshape(tensor, shape);
}

MaybeTensor flat(const MaybeTensor& tensor) { return tensor ? MaybeTensor(aten::flatten(*tensor)) : std::nullopt; }

struct Chunk {
  int64_t first;
  int64_t rows;

  Tensor of(const Tensor& tensor) const { return aten::narrow(tensor, 0, first, rows); }
  MaybeTensor of(const MaybeTensor& tensor) const { return tensor ? MaybeTensor(of(*tensor)) : std::nullopt; }
};

int64_t divided_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// sizes.py. wider: the gradient of the weight is added up in more bytes than it has in the end.
int64_t rows_of_chunk(const Tensor& input, int64_t classes, bool wider, std::optional<int64_t> chunk_rows) {
  const int64_t number = std::max<int64_t>(input.size(0), 1), features = input.size(1);
  if (chunk_rows) {
    return std::min(number, *chunk_rows);
  }
  const int64_t bytes = static_cast<int64_t>(input.element_size()), least = 4096 / bytes;
  int64_t rows = least;
  while (2 * rows * classes * bytes <= 256 << 20) {
    rows *= 2;
  }
  if (wider && rows < features) {
    rows = std::min(features / least * least, 2 * rows);
  }
  if (number <= rows) {
    return number;
  }
  const int64_t even = divided_up(number, divided_up(number, rows));
  return std::min(rows, divided_up(even, 128) * 128);
}

void multiply(const Tensor& out, const Tensor& left, const Tensor& right) {
  aten::call("aten::mm", "out", left, right, out);
}

// Without the dispatcher, whose aten::addmm takes Scalars: the stable ABI has none.
void multiply_and_add(const Tensor& out, const Tensor& added, const Tensor& left, const Tensor& right) {
  aten::succeed(aoti_torch_cpu_addmm_out(out.get(), added.get(), left.get(), right.get(), 1.0, 1.0), "aten::addmm");
}

// Calls body(chunk, its logits, which may be overwritten) for each chunk; without rows for one that is empty.
template <class Body>
void for_each_chunk(const Head& head, const Tensor& input, bool wider, const Body& body) {
  const int64_t number = input.size(0), classes = head.linear_weight.size(0);
  const int64_t size = rows_of_chunk(input, classes, wider, head.chunk_rows);
  const int64_t step = 16 / static_cast<int64_t>(input.element_size());
  const std::vector<int64_t> shape{size, divided_up(classes, step) * step};
  const Tensor memory = aten::narrow(torch::stable::new_empty(input, shape), 1, 0, classes);
  const Tensor columns = aten::call("aten::t", "", head.linear_weight);
  for (int64_t first = 0; first < std::max<int64_t>(number, 1); first += size) {
    const Chunk chunk{first, std::min(size, number - first)};
    const Tensor logits = aten::narrow(memory, 0, 0, chunk.rows);
    if (head.linear_bias) {
      multiply_and_add(logits, *head.linear_bias, chunk.of(input), columns);
    } else {
      multiply(logits, chunk.of(input), columns);
    }
    body(chunk, logits);
  }
}

// Turns the gradients of chunks of logits into those of input, linear_weight and linear_bias.
class Products {
 public:
  Products(const Head& head, const Tensor& input, const Mask& mask)
      : made(gradients(head, mask, head.sums(), bridge::accumulator(input))),
        wider(mask[1] && head.sums() != head.dtype()),
        head_(head.linear_weight),
        input_(input),
        mask_(mask) {}

  void add(const Chunk& chunk, const Tensor& gradient) {
    if (mask_[0]) {
      multiply(chunk.of(as_rows(made[0])), gradient, head_);
    }
    if (mask_[1]) {
      const ScalarType sums = made[1].scalar_type();
      const Tensor left = aten::to(aten::call("aten::t", "", gradient), sums);
      const Tensor right = aten::to(chunk.of(input_), sums);
      chunk.first == 0 ? multiply(made[1], left, right) : multiply_and_add(made[1], made[1], left, right);
    }
    if (mask_[2]) {
      made[2] = aten::add(made[2], aten::sum(gradient, {{0}}, made[2].scalar_type()));
    }
  }

  std::vector<Tensor> made;
  const bool wider;

 private:
  Tensor head_;
  Tensor input_;
  Mask mask_;
};

// The values of a forward row operator by chunks; the dtype of a third result, if there is one.
template <size_t results>
void forward(Stack& stack, const char* name, ScalarType third = ScalarType::Float) {
  Head head{stack.tensor(), stack.tensor(), stack.tensor(), stack.maybe_tensor(), stack.maybe_tensor(),
            stack.options()};
  head.read_chunking(stack);
  head.check();
  std::vector<Tensor> outputs{head.row_values(), head.row_values()};
  if (results == 3) {
    outputs.push_back(third == ScalarType::Long ? aten::empty_like(head.target, third) : head.row_values());
  }
  if (!stack.meta) {
    const NoGrad below;
    const Tensor target = aten::flatten(bridge::dense(head.target, ScalarType::Long));
    for_each_chunk(head, as_rows(head.input), false, [&](const Chunk& chunk, const Tensor& logits) {
      const Tensor indices = chunk.of(target);
      checks::target_values(indices, head.linear_weight.size(0), head.options.ignore_index);
      const auto made = head.rows<results>(name, logits, indices, head.weight);
      for (size_t i = 0; i < results; ++i) {
        Tensor rows = chunk.of(aten::flatten(outputs[i]));
        torch::stable::copy_(rows, made[i]);
      }
    });
  }
  stack.returns(outputs);
}

// The gradients of each row's loss and lse from those of a reduced loss: row_grads of xent_ops/kernels/reference.py.
void to_rows(Tensor& grad_loss, MaybeTensor& grad_lse, const Tensor& target, const Tensor& lse,
             const MaybeTensor& divisor, int64_t ignore_index, double lse_square_scale) {
  const ScalarType dtype = lse.scalar_type();
  Tensor a = aten::to(grad_loss, dtype), per_row = a;
  if (divisor) {
    per_row = aten::div(a, aten::to(aten::select(*divisor, 0, 1), dtype));
    a = aten::div(a, aten::to(aten::select(*divisor, 0, 0), dtype));
  }
  if (lse_square_scale != 0.0) {
    const Tensor both = aten::mul(lse, aten::mul(aten::scalar(2 * lse_square_scale, dtype), per_row));
    const Tensor square = aten::where(is_counted(target, ignore_index), both, aten::scalar(0.0, dtype));
    grad_lse = grad_lse ? aten::add(square, aten::to(*grad_lse, dtype)) : square;
  }
  grad_loss = aten::call("aten::expand_as", "", a, lse);
}

// What to divide upstream gradients by, (), so that none is above one.
Tensor largest(const Tensor& target, int64_t ignore_index, const Tensor& grad_loss,
               std::initializer_list<MaybeTensor> others) {
  const ScalarType dtype = grad_loss.scalar_type();
  const Tensor zero = aten::scalar(0.0, dtype);
  std::vector<Tensor> all{aten::unsqueeze(zero, 0), aten::where(is_counted(target, ignore_index), grad_loss, zero)};
  for (const MaybeTensor& other : others) {
    if (other) {
      all.push_back(*other);
    }
  }
  const Tensor most = aten::call("aten::max", "", aten::call("aten::abs", "", aten::cat(all)));
  const Tensor good = aten::call("aten::logical_and", "", aten::call("aten::gt", "Tensor", most, zero),
                                 aten::call("aten::isfinite", "", most));
  return aten::where(good, most, aten::scalar(1.0, dtype));
}

void backward(Stack& stack, bool with_entropy) {
  Head head;
  Tensor grad_loss = stack.tensor();
  MaybeTensor grad_lse = stack.maybe_tensor();
  MaybeTensor grad_entropy = with_entropy ? stack.maybe_tensor() : std::nullopt;
  head.input = stack.tensor();
  head.linear_weight = stack.tensor();
  head.target = stack.tensor();
  const Tensor lse = stack.tensor();
  const MaybeTensor entropy = with_entropy ? MaybeTensor(stack.tensor()) : std::nullopt;
  head.linear_bias = stack.maybe_tensor();
  head.weight = stack.maybe_tensor();
  const MaybeTensor divisor = with_entropy ? std::nullopt : stack.maybe_tensor();
  const Mask mask = stack.next<Mask>();
  head.options = stack.options();
  const double lse_square_scale = with_entropy ? 0.0 : stack.number();
  head.read_chunking(stack);
  head.check();
  checks::output_mask(mask);
  checks::row_values("grad_lse", grad_lse, head.input, "input");
  checks::row_values("lse", lse, head.input, "input");
  checks::scalar_or_row_values("input", head.input, "grad_loss", grad_loss);
  checks::divisor(divisor, head.input);
  checks::row_values("grad_entropy", grad_entropy, head.input, "input");
  checks::row_values("entropy", entropy, head.input, "input");
  if (stack.meta) {
    return stack.returns(gradients(head, mask, head.dtype(), head.dtype()));
  }

  const NoGrad below;
  const int64_t ignore_index = head.options.ignore_index;
  to_rows(grad_loss, grad_lse, head.target, lse, divisor, ignore_index, lse_square_scale);
  const Tensor target = aten::flatten(head.target), rows_lse = aten::flatten(lse);
  const MaybeTensor rows_entropy = flat(entropy);
  grad_loss = aten::flatten(grad_loss);
  grad_lse = flat(grad_lse);
  grad_entropy = flat(grad_entropy);
  MaybeTensor factor;
  if (head.dtype() == ScalarType::Half) {
    factor = largest(target, ignore_index, grad_loss, {grad_lse, grad_entropy});
    const auto divide = [&](MaybeTensor grad) { return grad ? MaybeTensor(aten::div(*grad, *factor)) : grad; };
    grad_loss = *divide(grad_loss);
    grad_lse = divide(grad_lse);
    grad_entropy = divide(grad_entropy);
  }
  const Tensor input = as_rows(head.input);
  Products products(head, input, mask);
  for_each_chunk(head, input, products.wider, [&](const Chunk& chunk, const Tensor& logits) {
    const Tensor a = chunk.of(grad_loss), indices = chunk.of(target), z = chunk.of(rows_lse);
    const MaybeTensor b = chunk.of(grad_lse);
    if (with_entropy) {
      const auto gradient = head.rows<1>("xent::cross_entropy_backward_entropy", a, b, chunk.of(grad_entropy), logits,
                                         indices, z, *chunk.of(rows_entropy), head.weight);
      products.add(chunk, gradient[0]);
    } else {
      const Options& of = head.options;
      aten::call_all<0>("xent::cross_entropy_backward_", "", a, b, logits, indices, z, head.weight, MaybeTensor(),
                        of.ignore_index, of.label_smoothing, of.softcap, of.logit_scale, 0.0);
      products.add(chunk, logits);
    }
  });
  for (Tensor& gradient : products.made) {
    if (factor) {
      aten::call_all<0>("xent::scale_grad_", "", gradient, *factor);
    }
    gradient = aten::to(gradient, head.dtype());
  }
  stack.returns(products.made);
}

}  // namespace

void linear_cross_entropy_forward(Stack& stack) { forward<2>(stack, "xent::cross_entropy_forward"); }

void linear_cross_entropy_forward_argmax(Stack& stack) {
  forward<3>(stack, "xent::cross_entropy_forward_argmax", ScalarType::Long);
}

void linear_cross_entropy_forward_entropy(Stack& stack) {
  forward<3>(stack, "xent::cross_entropy_forward_entropy");
}

void linear_cross_entropy_backward(Stack& stack) { backward(stack, false); }

void linear_cross_entropy_backward_entropy(Stack& stack) { backward(stack, true); }

void linear_cross_entropy_with_grad(Stack& stack) {
  Head head{stack.tensor(), stack.tensor(), stack.tensor(), stack.maybe_tensor(), stack.maybe_tensor()};
  const MaybeTensor divisor = stack.maybe_tensor();
  const Mask mask = stack.next<Mask>();
  head.accumulate_dtype = stack.next<std::optional<ScalarType>>();
  head.options = stack.options();
  const double lse_square_scale = stack.number();
  const std::string reduction = stack.next<std::string>();
  head.chunk_rows = stack.next<std::optional<int64_t>>();
  head.check();
  checks::output_mask(mask);
  checks::lse_square_scale(lse_square_scale, head.input);
  checks::reduction_to_one(reduction);
  checks::sum_divisor(divisor, head.input, reduction);
  const Tensor lse = head.row_values();
  const ScalarType dtype = lse.scalar_type();
  if (stack.meta) {
    const auto made = gradients(head, mask, head.sums(), dtype);
    return stack.returns({numbers(head.input, {}), numbers(head.input, {2}), lse, made[0], made[1], made[2]});
  }

  const NoGrad below;
  const int64_t ignore_index = head.options.ignore_index;
  const Tensor divisors =
      divided_by(head.linear_weight, head.target, head.weight, divisor, ignore_index, dtype, reduction);
  Tensor inverse = aten::call("aten::reciprocal", "", divisors);
  if (head.dtype() == ScalarType::Half) {
    inverse = aten::mul(inverse, aten::select(divisors, 0, 0));
  }
  const Tensor scale = aten::select(inverse, 0, 0);
  MaybeTensor square;
  if (lse_square_scale != 0.0) {
    square = aten::mul(aten::scalar(lse_square_scale, dtype), aten::select(inverse, 0, 1));
  }
  const Tensor input = as_rows(head.input), loss = head.row_values();
  const Tensor target = aten::flatten(bridge::dense(head.target, ScalarType::Long));
  Products products(head, input, mask);
  for_each_chunk(head, input, products.wider, [&](const Chunk& chunk, const Tensor& logits) {
    const Tensor indices = chunk.of(target);
    checks::target_values(indices, head.linear_weight.size(0), ignore_index);
    const auto made =
        head.rows<2>("xent::cross_entropy_with_grad_", logits, indices, scale, square, head.weight);
    Tensor rows_loss = chunk.of(aten::flatten(loss)), rows_lse = chunk.of(aten::flatten(lse));
    torch::stable::copy_(rows_loss, made[0]);
    torch::stable::copy_(rows_lse, made[1]);
    products.add(chunk, logits);
  });
  const Tensor value = reduced(loss, lse, head.target, divisors, ignore_index, lse_square_scale);
  stack.returns({value, divisors, lse, products.made[0], products.made[1], products.made[2]});
}

void linear_scale_grad(Stack& stack) {
  const Tensor grad = stack.tensor();
  const Tensor factor = stack.tensor();
  checks::scale_grad(grad, factor);
  const Tensor scaled = aten::empty_like(grad, grad.scalar_type());
  if (!stack.meta) {
    const NoGrad below;
    Tensor written = scaled;
    torch::stable::copy_(written, grad);
    aten::call_all<0>("xent::scale_grad_", "", scaled, factor);
  }
  stack.returns({scaled});
}

}  // namespace xent::operators
