// One rank's shard of a vocabulary that is split over ranks. The algebra: xent_ops/kernels/reference_shard.py.
#include "operators.h"

#include "outputs.h"

namespace xent::operators {
namespace {

// class_start and num_classes come between the target and the weight.
struct Place {
  explicit Place(Stack& stack) : shard(stack.shard()), weight(stack.maybe_tensor()) {}

  cpu::Slice shard;
  MaybeTensor weight;
};

// The length of one rank's result: 3 numbers for each row, 4 with class weights, and a header of 5.
Tensor shard_part(const Tensor& logits, const Tensor& target, const MaybeTensor& weight) {
  std::vector<Tensor> parts(weight ? 4 : 3, aten::flatten(per_row(logits, target)));
  parts.push_back(numbers(logits, {5}));
  return aten::cat(parts);
}

struct Join {
  explicit Join(Stack& stack)
      : logits(stack.tensor()),
        target(stack.tensor()),
        gathered(stack.tensor()),
        place(stack),
        options(stack.options()) {
    checks::shard(logits, target, place.shard, place.weight, options);
    checks::shard_gathered(gathered, shard_part(logits, target, place.weight));
  }

  Tensor row_values() const { return per_row(logits, target); }

  bridge::Problem write(const Tensor& loss, const Tensor& lse, const Tensor& target_weight,
                        const Tensor& coefficient) const {
    const Tensor dense = torch::stable::contiguous(gathered);
    const bridge::Problem problem(logits, target, place.weight, options, false);
    cpu::shard_join(problem, place.shard, dense.const_data_ptr(), dense.size(0), loss.mutable_data_ptr(),
                    lse.mutable_data_ptr(), target_weight.mutable_data_ptr(), coefficient.mutable_data_ptr(),
                    bridge::threads(logits, problem.softcap));
    return problem;
  }

  Tensor logits;
  Tensor target;
  Tensor gathered;
  Place place;
  Options options;
};

}  // namespace

void cross_entropy_shard(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const Place place(stack);
  const Options options = stack.options();
  checks::shard(logits, target, place.shard, place.weight, options);
  const Tensor out = aten::unsqueeze(shard_part(logits, target, place.weight), 0);
  if (!stack.meta) {
    const bridge::Problem problem(logits, target, place.weight, options);
    problem.check_targets(place.shard.num_classes);
    if (out.numel() != cpu::shard_width(problem)) {
      throw std::logic_error("xent: the kernel hands over another number of values than was allocated");
    }
    cpu::shard_forward(problem, place.shard, out.mutable_data_ptr(), bridge::threads(logits, problem.softcap));
  }
  stack.returns({out});
}

void cross_entropy_shard_join(Stack& stack) {
  const Join in(stack);
  const Tensor loss = in.row_values(), lse = in.row_values();
  const Tensor target_weight = in.row_values(), coefficient = in.row_values();
  if (!stack.meta) {
    in.write(loss, lse, target_weight, coefficient);
  }
  stack.returns({loss, lse, target_weight, coefficient});
}

void cross_entropy_shard_reduced(Stack& stack) {
  const Join in(stack);
  const Reduction reduction(stack, in.logits);
  const Tensor value = numbers(in.logits, {}), divisor = numbers(in.logits, {2});
  const Tensor lse = in.row_values(), coefficient = in.row_values();
  if (!stack.meta) {
    const Tensor loss = in.row_values(), target_weight = in.row_values();
    const bridge::Problem problem = in.write(loss, lse, target_weight, coefficient);
    reduction.write(problem, loss, lse, target_weight.const_data_ptr(), divisor, value);
  }
  stack.returns({value, divisor, lse, coefficient});
}

}  // namespace xent::operators
