// The head and the loss as one: operators by chunks of rows, for the CPU and for meta tensors.
#include "chunks.h"
#include "float16.h"
#include "operators.h"

#include <array>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace xent::operators {
namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

// The gradients of each row's loss and lse, from those of a reduced loss: row_grads of xent_ops/kernels/reference.py.
std::pair<Tensor, MaybeTensor> row_grads(const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& target,
                                         const Tensor& lse, const MaybeTensor& divisor, int64_t ignore_index,
                                         double lse_square_scale) {
  const ScalarType dtype = lse.scalar_type();
  Tensor a = aten::to(grad_loss, dtype), per_row = a;
  if (divisor) {
    per_row = aten::div(a, aten::to(aten::select(*divisor, 0, 1), dtype));
    a = aten::div(a, aten::to(aten::select(*divisor, 0, 0), dtype));
  }
  a = aten::call("aten::expand_as", "", a, lse);
  if (lse_square_scale == 0.0) {
    return {a, grad_lse};
  }
  const Tensor both = aten::mul(lse, aten::mul(aten::scalar(2 * lse_square_scale, dtype), per_row));
  const Tensor square = aten::where(is_counted(target, ignore_index), both, aten::scalar(0.0, dtype));
  return {a, grad_lse ? aten::add(square, aten::to(*grad_lse, dtype)) : square};
}

// loss, lse, argmax and entropy of the rows that are computed, as far as they are wanted.
class Statistics {
 public:
  Statistics(const Rows& rows, const std::vector<Tensor>& outputs, bool with_argmax, bool with_entropy)
      : wanted_{true, true, with_argmax, with_entropy}, values_(outputs) {
    for (size_t i = 0; i < values_.size(); ++i) {
      values_[i] = wanted_[i] ? rows.new_values(outputs[i].scalar_type()) : values_[i];
    }
  }

  void put(const Chunk& chunk, const std::vector<Tensor>& made) const {
    for (size_t i = 0; i < values_.size(); ++i) {
      if (wanted_[i]) {
        chunk.put(values_[i], made[i]);
      }
    }
  }

  // Of all rows.
  std::vector<Tensor> given(const Rows& rows) const {
    const std::array<double, 4> unread{0.0, INFINITE, -1.0, 0.0};  // in rows that are skipped
    std::vector<Tensor> all = values_;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = wanted_[i] ? rows.give_values(values_[i], unread[i]) : all[i];
    }
    return all;
  }

 private:
  std::array<bool, 4> wanted_;
  std::vector<Tensor> values_;
};

}  // namespace

void linear_cross_entropy_forward(Stack& stack) {
  Head head{stack.tensor(), stack.tensor(), stack.tensor(), stack.maybe_tensor(), stack.maybe_tensor()};
  const bool with_argmax = stack.next<bool>(), with_entropy = stack.next<bool>();
  head.options = stack.options();
  head.accumulate_dtype = stack.next<std::optional<ScalarType>>();
  head.read_chunking(stack);
  head.check();
  std::vector<Tensor> outputs = statistics(head.input, head.target, with_argmax, with_entropy);
  if (!stack.meta) {
    const NoGrad below;
    const Rows rows(head);
    Statistics values(rows, outputs, with_argmax, with_entropy);
    for_each_chunk(head, rows.take(as_rows(head.input)), [&](const Chunk& chunk, const Tensor& logits) {
      const Tensor indices = chunk.of(rows.target);
      checks::target_values(indices, head.linear_weight.size(0), head.options.ignore_index);
      const auto made = head.rows<4>("xent::cross_entropy_forward", logits, indices, head.weight, with_argmax,
                                     with_entropy);
      values.put(chunk, made);
    });
    outputs = values.given(rows);
  }
  stack.returns(outputs);
}

void linear_cross_entropy_backward(Stack& stack) {
  Head head;
  const Tensor grad_loss = stack.tensor();
  const MaybeTensor grad_lse = stack.maybe_tensor();
  head.input = stack.tensor();
  head.linear_weight = stack.tensor();
  head.target = stack.tensor();
  const Tensor lse = stack.tensor();
  head.linear_bias = stack.maybe_tensor();
  head.weight = stack.maybe_tensor();
  const MaybeTensor divisor = stack.maybe_tensor();
  const MaybeTensor grad_entropy = stack.maybe_tensor();
  const MaybeTensor entropy = stack.maybe_tensor();
  const MaybeTensor coefficient = stack.maybe_tensor();
  const int64_t class_start = stack.integer();
  const auto num_classes = stack.next<std::optional<int64_t>>();
  const Mask mask = stack.next<Mask>();
  head.options = stack.options();
  const double lse_square_scale = stack.number();
  head.accumulate_dtype = stack.next<std::optional<ScalarType>>();
  head.read_chunking(stack);
  head.check();
  checks::output_mask(mask);
  checks::row_values("grad_lse", grad_lse, head.input, "input");
  checks::row_values("lse", lse, head.input, "input");
  checks::scalar_or_row_values("input", head.input, "grad_loss", grad_loss);
  checks::divisor(divisor, head.input);
  checks::with_entropy("input", head.input, grad_entropy, entropy);
  checks::slice_of(class_start, num_classes, head.weight, coefficient);
  if (num_classes) {
    throw std::invalid_argument("a head split over ranks is served from Python alone, which has the collectives");
  }
  if (stack.meta) {
    return stack.returns(gradients(head, head.input, mask, head.dtype(), head.dtype()));
  }

  const NoGrad below;
  const auto upstream = row_grads(grad_loss, grad_lse, head.target, lse, divisor, head.options.ignore_index,
                                  lse_square_scale);
  const Rows rows(head);
  std::array<MaybeTensor, 6> all{upstream.first, upstream.second, grad_entropy, std::nullopt, lse, entropy};
  for (MaybeTensor& one : all) {
    one = rows.take_values(one);
  }
  all[3] = rows.target;
  MaybeTensor factor;
  if (head.dtype() == ScalarType::Half) {
    factor = largest(head, *all[3], *all[0], {all[1], all[2]});
    std::for_each_n(all.begin(), 3, [&](MaybeTensor& grad) { grad = grad ? aten::div(*grad, *factor) : grad; });
  }
  const Tensor input = rows.take(as_rows(head.input));
  Products products(head, input, mask);
  for_each_chunk(head, input, [&](const Chunk& chunk, const Tensor& logits) {
    auto [a, b, c, target, z, h] = all;
    for (MaybeTensor* one : {&a, &b, &c, &target, &z, &h}) {
      *one = *one ? MaybeTensor(chunk.of(**one)) : *one;
    }
    aten::call_all<0>("xent::cross_entropy_backward_", "", *a, b, logits, *target, *z, head.weight, MaybeTensor(), c, h,
                      MaybeTensor(), int64_t{0}, std::optional<int64_t>(), head.grad_dtype(), fields(head.options), 0.0);
    products.add(chunk, logits);
  });
  stack.returns(given_back(products.made, head, rows, mask, factor));
}

void linear_cross_entropy_with_grad(Stack& stack) {
  Head head{stack.tensor(), stack.tensor(), stack.tensor(), stack.maybe_tensor(), stack.maybe_tensor()};
  const MaybeTensor divisor = stack.maybe_tensor();
  const MaybeTensor token_weight = stack.maybe_tensor();
  const Mask mask = stack.next<Mask>();
  head.accumulate_dtype = stack.next<std::optional<ScalarType>>();
  const bool with_argmax = stack.next<bool>(), with_entropy = stack.next<bool>();
  head.options = stack.options();
  const double lse_square_scale = stack.number();
  const std::string reduction = stack.next<std::string>();
  head.read_chunking(stack);
  head.check();
  checks::output_mask(mask);
  checks::lse_square_scale(lse_square_scale, head.input);
  checks::reduction_to_one(reduction);
  checks::sum_divisor(divisor, head.input, reduction);
  checks::token_weight(token_weight, head.target);
  const ScalarType dtype = bridge::accumulator(head.input);
  const std::vector<Tensor> rows_of = statistics(head.input, head.target, with_argmax, with_entropy);
  const auto give = [&](const Tensor& value, const Tensor& divisors, const std::vector<Tensor>& of_rows,
                        const std::vector<Tensor>& made) {
    stack.returns({value, divisors, of_rows[0], of_rows[1], of_rows[2], of_rows[3], made[0], made[1], made[2]});
  };
  if (stack.meta) {
    return give(numbers(head.input, {}), numbers(head.input, {2}), rows_of,
                gradients(head, head.input, mask, head.sums(), dtype));
  }

  const NoGrad below;
  const int64_t ignore_index = head.options.ignore_index;
  const Tensor divisors =
      divided_by(head.linear_weight, head.target, head.weight, divisor, token_weight, ignore_index, dtype, reduction);
  const Tensor inverse = aten::call("aten::reciprocal", "", divisors);
  Tensor scale = aten::select(inverse, 0, 0);
  MaybeTensor square;
  if (lse_square_scale != 0.0) {
    square = aten::mul(aten::scalar(lse_square_scale, dtype), aten::select(inverse, 0, 1));
  }
  const Rows rows(head);
  const MaybeTensor of_rows = rows.take_values(counted_weights(token_weight, head.target, ignore_index, dtype));
  if (of_rows) {
    scale = aten::mul(scale, *of_rows);
    square = square ? MaybeTensor(aten::mul(*square, *of_rows)) : square;
  }
  if (head.dtype() == ScalarType::Half) {  // the formula multiplies by it after the products
    const auto of_each = [&](const Tensor& factor) { return aten::call("aten::expand_as", "", factor, rows.target); };
    const Tensor factor = largest(head, rows.target, of_each(scale), {square ? MaybeTensor(of_each(*square)) : square});
    scale = aten::div(scale, factor);
    square = square ? MaybeTensor(aten::div(*square, factor)) : square;
  }
  const Tensor input = rows.take(as_rows(head.input));
  const Statistics values(rows, rows_of, with_argmax, with_entropy);
  Products products(head, input, mask);
  for_each_chunk(head, input, [&](const Chunk& chunk, const Tensor& logits) {
    const Tensor indices = chunk.of(rows.target);
    checks::target_values(indices, head.linear_weight.size(0), ignore_index);
    const auto made =
        head.rows<4>("xent::cross_entropy_with_grad_", logits, indices, of_rows ? chunk.of(scale) : scale,
                     of_rows && square ? MaybeTensor(chunk.of(*square)) : square, head.weight, with_argmax,
                     with_entropy, head.grad_dtype());
    values.put(chunk, made);
    products.add(chunk, logits);
  });
  const std::vector<Tensor> all = values.given(rows);
  products.made[0] = mask[0] ? rows.give(products.made[0], head.input, 0.0) : products.made[0];
  give(reduced(all[0], all[1], head.target, divisors, token_weight, ignore_index, lse_square_scale), divisors, all,
       products.made);
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
