// One rank's shard of a vocabulary that is split over ranks. Formulas: xent_ops/kernels/reference_shard.py.
#include "operators/operators.h"

#include "operators/outputs.h"

namespace xent::operators {
namespace {

// Of one rank's result: 3 numbers for each row, 4 with class weights, and a header of 5.
Tensor shard_part(const Tensor& logits, const Tensor& target, const MaybeTensor& weight) {
  std::vector<Tensor> parts(weight ? 4 : 3, torch::stable::flatten(per_row(logits, target)));
  parts.push_back(numbers(logits, {5}));
  return aten::cat(parts);
}

Tensor forward(const Tensor& logits, const Tensor& target, int64_t class_start, int64_t num_classes,
               const MaybeTensor& weight, bool batch_invariant, int64_t ignore_index, double label_smoothing,
               MaybeNumber softcap, double logit_scale) {
  (void)batch_invariant;  // a row's bits depend on it alone in any case: rows.h, fold
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  const cpu::Slice shard{class_start, num_classes};
  checks::shard(logits, target, shard, weight, options);
  const Tensor out = torch::stable::unsqueeze(shard_part(logits, target, weight), 0);
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    const cpu::Problem problem = arguments.problem(logits, target, weight, options);
    checks::target_values(problem, num_classes);
    STD_TORCH_CHECK(out.numel() == cpu::shard_width(problem), "a shard hands over another number of values");
    cpu::shard_forward(problem, shard, out.mutable_data_ptr(), tensors::threads(logits, softcap));
  }
  return out;
}

// loss, lse, target_weight, lse_coefficient, lse_low.
Five join(const Tensor& logits, const Tensor& target, const Tensor& gathered, int64_t class_start, int64_t num_classes,
          const MaybeTensor& weight, int64_t ignore_index, double label_smoothing, MaybeNumber softcap,
          double logit_scale) {
  const RowOptions options{ignore_index, label_smoothing, softcap, logit_scale};
  const cpu::Slice shard{class_start, num_classes};
  checks::shard(logits, target, shard, weight, options);
  const Tensor part = shard_part(logits, target, weight);
  XENT_CHECK(gathered.dim() == 2 && gathered.scalar_type() == part.scalar_type() &&
                 (is_meta(part) || gathered.size(1) == part.size(0)),
             "gathered must be the results of cross_entropy_shard, one for each rank");
  const Five outputs{per_row(logits, target), per_row(logits, target), per_row(logits, target),
                     per_row(logits, target), per_row(logits, target)};
  if (!is_meta(logits)) {
    const auto& [loss, lse, target_weight, lse_coefficient, lse_low] = outputs;
    tensors::Arguments arguments(logits);
    const cpu::Problem problem = arguments.problem(logits, target, weight, options, tensors::Values::absent);
    cpu::shard_join(problem, shard, arguments.dense(gathered), gathered.size(0), loss.mutable_data_ptr(),
                    lse.mutable_data_ptr(), target_weight.mutable_data_ptr(), lse_coefficient.mutable_data_ptr(),
                    lse_low.mutable_data_ptr(), tensors::threads(logits, softcap));
  }
  return outputs;
}

Five join_reduced(const Tensor& logits, const Tensor& target, const Tensor& gathered, int64_t class_start,
                  int64_t num_classes, const MaybeTensor& weight, int64_t ignore_index, double label_smoothing,
                  MaybeNumber softcap, double logit_scale, double lse_square_scale, const std::string& reduction) {
  checks::reduction(reduction, false);
  const auto [loss, lse, target_weight, lse_coefficient, lse_low] = join(
      logits, target, gathered, class_start, num_classes, weight, ignore_index, label_smoothing, softcap, logit_scale);
  const Tensor value = numbers(logits, {}), divisors = numbers(logits, {2});
  if (!is_meta(logits)) {
    tensors::Arguments arguments(logits);
    const cpu::Problem problem = arguments.problem(logits, target, weight, {ignore_index}, tensors::Values::absent);
    reduce(problem, loss, lse, target_weight.const_data_ptr(), lse_square_scale, reduction, divisors, value);
  }
  return {value, divisors, lse, lse_coefficient, lse_low};
}

}  // namespace

void add_shard(const Add& add) {
  add("cross_entropy_shard", TORCH_BOX(&forward));
  add("cross_entropy_shard_join", TORCH_BOX(&join));
  add("cross_entropy_shard_reduced", TORCH_BOX(&join_reduced));
}

}  // namespace xent::operators
