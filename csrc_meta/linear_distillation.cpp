// Distillation from hidden states: xent_ops/head/distillation.py, whose reasons hold here.
#include "chunks.h"
#include "distilled.h"
#include "float16.h"
#include "operators.h"

namespace xent::operators {
namespace {

struct Heads {
  explicit Heads(Stack& stack)
      : student{stack.tensor(), stack.tensor(), stack.tensor()},
        teacher_input(stack.tensor()),
        teacher_weight(stack.tensor()) {
    student.linear_bias = stack.maybe_tensor();
    teacher_bias = stack.maybe_tensor();
  }

  void check(const Distilled& how) {
    student.options = how.student();
    checks::chunk_rows(student.chunk_rows);
    checks::distillation_heads(student.input, student.linear_weight, student.linear_bias, student.target, teacher_input,
                               teacher_weight, teacher_bias, how, student.accumulate_dtype);
  }

  // body(chunk, the student's logits, which may be overwritten, the teacher's). input: the student's rows.
  template <class Body>
  void for_each(const Rows& rows, const Tensor& input, const Distilled& how, const Body& body) const {
    const int64_t classes = how.num_classes.value_or(student.linear_weight.size(0));
    const int64_t size = rows_of_chunk(input, student.linear_weight.size(0), student.chunk_rows, std::nullopt);
    const ChunkLogits teacher(rows.take(as_rows(teacher_input)), teacher_weight, teacher_bias, size);
    for_each_chunk(student, input, [&](const Chunk& chunk, const Tensor& logits) {
      if (how.hard_weight != 0.0) {
        checks::target_values(chunk.of(rows.target), classes, how.ignore_index);
      }
      body(chunk, logits, teacher.of(chunk));
    });
  }

  Head student;
  Tensor teacher_input;
  Tensor teacher_weight;
  MaybeTensor teacher_bias;
};

// (4, ...) of as many tensors.
Tensor stacked(std::vector<Tensor> tensors) {
  for (Tensor& tensor : tensors) {
    tensor = aten::unsqueeze(tensor, 0);
  }
  return aten::cat(tensors);
}

}  // namespace

void linear_distillation_forward(Stack& stack) {
  Heads heads(stack);
  const Distilled how(stack);
  Head& student = heads.student;
  student.accumulate_dtype = stack.next<std::optional<ScalarType>>();
  student.read_chunks(stack);
  heads.check(how);
  if (stack.meta) {
    return stack.returns({student.row_values(), per_row(student.input, aten::four_times(student.target))});
  }
  const NoGrad below;
  const Rows rows(student);
  std::vector<Tensor> values;  // the loss, and the four statistics
  for (int i = 0; i < 5; ++i) {
    values.push_back(rows.new_values(bridge::accumulator(student.input)));
  }
  heads.for_each(rows, rows.take(as_rows(student.input)), how,
                 [&](const Chunk& chunk, const Tensor& logits, const Tensor& teacher_logits) {
    const auto made = aten::call_all<2>("xent::distillation_forward", "", logits, teacher_logits, chunk.of(rows.target),
                                        MaybeTensor(), std::optional<int64_t>(), how.fields());
    chunk.put(values[0], made[0]);
    for (int i = 0; i < 4; ++i) {
      chunk.put(values[i + 1], aten::select(made[1], 0, i));
    }
  });
  for (Tensor& one : values) {
    one = rows.give_values(one, 0.0);
  }
  stack.returns({values[0], stacked({values.begin() + 1, values.end()})});
}

void linear_distillation_backward(Stack& stack) {
  const Tensor grad_loss = stack.tensor();
  const Tensor statistics = stack.tensor();
  Heads heads(stack);
  const Mask mask = stack.next<Mask>();
  const Distilled how(stack);
  Head& student = heads.student;
  student.accumulate_dtype = stack.next<std::optional<ScalarType>>();
  student.read_chunks(stack);
  heads.check(how);
  checks::output_mask(mask);
  checks::scalar_or_row_values("input", student.input, "grad_loss", grad_loss);
  checks::distillation_statistics("statistics", statistics, student.target, student.input);
  if (stack.meta) {
    return stack.returns(gradients(student, student.input, mask, student.dtype(), student.dtype()));
  }
  const NoGrad below;
  const Rows rows(student);
  const Tensor of_rows = aten::to(grad_loss, bridge::accumulator(student.input));
  Tensor upstream = rows.take(aten::flatten(aten::call("aten::expand_as", "", of_rows, student.target)));
  MaybeTensor factor;
  if (student.dtype() == ScalarType::Half) {
    factor = largest(student, rows.target, upstream, {});
    upstream = aten::div(upstream, *factor);
  }
  std::vector<Tensor> taken;
  for (int i = 0; i < 4; ++i) {
    taken.push_back(rows.take(aten::flatten(aten::select(statistics, 0, i))));
  }
  const Tensor saved = stacked(taken), input = rows.take(as_rows(student.input));
  Products products(student, input, mask);
  heads.for_each(rows, input, how, [&](const Chunk& chunk, const Tensor& logits, const Tensor& teacher_logits) {
    aten::call_all<0>("xent::distillation_backward_", "", chunk.of(upstream), logits, teacher_logits,
                      chunk.of(rows.target), aten::narrow(saved, 1, chunk.first, chunk.rows), std::optional<int64_t>(),
                      how.fields());
    products.add(chunk, logits);
  });
  stack.returns(given_back(products.made, student, rows, mask, factor));
}

void linear_distillation_with_grad(Stack& stack) {
  Heads heads(stack);
  Head& student = heads.student;
  const MaybeTensor divisor = stack.maybe_tensor();
  const MaybeTensor token_weight = stack.maybe_tensor();
  const Mask mask = stack.next<Mask>();
  student.accumulate_dtype = stack.next<std::optional<ScalarType>>();
  const Distilled how(stack);
  const std::string reduction = stack.next<std::string>();
  student.read_chunks(stack);
  heads.check(how);
  checks::output_mask(mask);
  checks::token_weight(token_weight, student.target);
  checks::reduction_to_one(reduction);
  checks::sum_divisor(divisor, student.input, reduction);
  const ScalarType dtype = bridge::accumulator(student.input);
  const auto give = [&](const Tensor& value, const Tensor& divisors, const std::vector<Tensor>& made) {
    stack.returns({value, divisors, made[0], made[1], made[2]});
  };
  if (stack.meta) {
    return give(numbers(student.input, {}), numbers(student.input, {2}),
                gradients(student, student.input, mask, student.sums(), dtype));
  }
  const NoGrad below;
  const Tensor divisors = divided_by(student.linear_weight, student.target, std::nullopt, divisor, token_weight,
                                     how.ignore_index, dtype, reduction);
  Tensor scale = aten::call("aten::reciprocal", "", aten::select(divisors, 0, 0));
  const Rows rows(student);
  const MaybeTensor of_rows =
      rows.take_values(counted_weights(token_weight, student.target, how.ignore_index, dtype));
  if (of_rows) {
    scale = aten::mul(scale, *of_rows);
  }
  if (student.dtype() == ScalarType::Half) {  // the formula multiplies by it after the products
    const Tensor of_each = aten::call("aten::expand_as", "", scale, rows.target);
    scale = aten::div(scale, largest(student, rows.target, of_each, {}));
  }
  const Tensor input = rows.take(as_rows(student.input)), losses = rows.new_values(dtype);
  Products products(student, input, mask);
  heads.for_each(rows, input, how, [&](const Chunk& chunk, const Tensor& logits, const Tensor& teacher_logits) {
    const auto made = aten::call_all<1>("xent::distillation_with_grad_", "", logits, teacher_logits,
                                        chunk.of(rows.target), of_rows ? chunk.of(scale) : scale, how.fields());
    chunk.put(losses, made[0]);
    products.add(chunk, logits);
  });
  const Tensor loss = rows.give_values(losses, 0.0);
  products.made[0] = mask[0] ? rows.give(products.made[0], student.input, 0.0) : products.made[0];
  give(reduced(loss, loss, student.target, divisors, token_weight, how.ignore_index, 0.0), divisors, products.made);
}

}  // namespace xent::operators
