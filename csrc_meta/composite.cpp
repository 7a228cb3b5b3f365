// xent::cross_entropy, as in xent_ops/ops/composite.py: the operator of a reduced loss, or the row operator and the
// z-loss of each row. xent::linear_cross_entropy: rows and their reduction, for without formulas there are no gradients
// to make in one pass. They call operators only, so they serve any device, symbolic sizes and tracers.
#include "checks.h"
#include "operators.h"
#include "reductions.h"

namespace xent::operators {

void cross_entropy(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  const Options options = stack.options();
  const double lse_square_scale = stack.number();
  const std::string reduction = stack.next<std::string>();
  checks::reduction(reduction);
  checks::lse_square_scale(lse_square_scale, logits);

  if (reduction != "none") {
    const auto results = aten::call_all<3>("xent::cross_entropy_reduced", "", logits, target, weight, fields(options),
                                           lse_square_scale, reduction);
    return stack.returns({results[0]});
  }
  const auto rows = aten::call_all<4>("xent::cross_entropy_forward", "", logits, target, weight, false, false,
                                      fields(options));
  stack.returns({reduced(rows[0], rows[1], target, std::nullopt, std::nullopt, options.ignore_index, lse_square_scale)});
}

void linear_cross_entropy(Stack& stack) {
  const Tensor input = stack.tensor();
  const Tensor linear_weight = stack.tensor();
  const Tensor target = stack.tensor();
  const MaybeTensor linear_bias = stack.maybe_tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  const MaybeTensor divisor = stack.maybe_tensor();
  const MaybeTensor token_weight = stack.maybe_tensor();
  const Options options = stack.options();
  const double lse_square_scale = stack.number();
  const std::string reduction = stack.next<std::string>();
  const auto accumulate_dtype = stack.next<std::optional<ScalarType>>();
  const auto chunk_rows = stack.next<std::optional<int64_t>>();
  const bool skip_ignored = stack.next<bool>();
  const auto logits_dtype = stack.next<std::optional<ScalarType>>();
  const auto products = stack.next<std::optional<std::string>>();
  checks::reduction(reduction);
  checks::lse_square_scale(lse_square_scale, input);
  checks::sum_divisor(divisor, input, reduction);
  checks::token_weight(token_weight, target);

  const auto rows = aten::call_all<4>("xent::linear_cross_entropy_forward", "", input, linear_weight, target,
                                      linear_bias, weight, false, false, fields(options), accumulate_dtype,
                                      chunk_rows, skip_ignored, logits_dtype, products);
  MaybeTensor divisors;
  if (reduction != "none") {
    divisors = divided_by(linear_weight, target, weight, divisor, token_weight, options.ignore_index,
                          rows[1].scalar_type(), reduction);
  }
  stack.returns(
      {reduced(rows[0], rows[1], target, divisors, token_weight, options.ignore_index, lse_square_scale)});
}

}  // namespace xent::operators
