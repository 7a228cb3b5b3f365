// xent::cross_entropy: the row operator, then reductions on vectors of N elements; as xent_ops/ops/composite.py.
// Composed of operators for any device, symbolic sizes and tracers.
#include "checks.h"
#include "operators.h"

namespace xent::operators {
namespace {

using Indices = std::vector<std::optional<Tensor>>;

Tensor binary(const char* name, const Tensor& a, const Tensor& b) {
  return aten::call(name, "Tensor", a, b);
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  return aten::call("aten::where", "self", condition, a, b);
}

// What "mean" divides by where there are class weights: those of the targets that are counted and are classes.
Tensor sum_of_weights(const Tensor& target, const Tensor& counted, const Tensor& weight, ScalarType dtype) {
  // The number of classes as a tensor: as an integer, a symbolic one would be specialised.
  const Tensor classes = aten::sum(aten::call("aten::ones_like", "", weight, std::optional(ScalarType::Long),
                                              std::optional<torch::headeronly::Layout>(),
                                              std::optional<torch::stable::Device>(), std::optional<bool>(),
                                              std::optional<MemoryFormat>()));
  const Tensor zero = aten::scalar(0.0, ScalarType::Long);
  const Tensor is_class = binary("aten::bitwise_and", binary("aten::ge", target, zero),
                                 binary("aten::lt", target, classes));
  const Tensor used = binary("aten::bitwise_and", counted, is_class);
  const Tensor weights = aten::call("aten::index", "Tensor", aten::to(weight, dtype),
                                    Indices{where(used, target, zero)});
  return aten::sum(where(used, weights, aten::scalar(0.0, dtype)));
}

}  // namespace

void cross_entropy(Stack& stack) {
  const Tensor logits = stack.tensor();
  const Tensor target = stack.tensor();
  const MaybeTensor weight = stack.maybe_tensor();
  Options options;
  options.ignore_index = stack.integer();
  options.label_smoothing = stack.number();
  const double lse_square_scale = stack.number();
  options.softcap = stack.next<std::optional<double>>();
  options.logit_scale = stack.number();
  const std::string reduction = stack.next<std::string>();
  checks::reduction(reduction);
  checks::lse_square_scale(lse_square_scale, logits);

  std::array<StableIValue, 7> values{
      torch::stable::detail::from(logits),          torch::stable::detail::from(target),
      torch::stable::detail::from(weight),          torch::stable::detail::from(options.ignore_index),
      torch::stable::detail::from(options.label_smoothing), torch::stable::detail::from(options.softcap),
      torch::stable::detail::from(options.logit_scale)};
  const char* forward = "xent::cross_entropy_forward";
  aten::succeed(torch_call_dispatcher(forward, "", values.data(), TORCH_ABI_VERSION), forward);
  Tensor loss = torch::stable::detail::to<Tensor>(values[0]);
  const Tensor lse = torch::stable::detail::to<Tensor>(values[1]);

  if (reduction != "none") {
    loss = aten::sum(loss);
  }
  const bool mean = reduction == "mean";
  if (!mean && lse_square_scale == 0.0) {
    return stack.returns(loss);
  }
  const ScalarType dtype = loss.scalar_type();
  const Tensor indices = aten::to(target, ScalarType::Long);
  const Tensor counted = binary("aten::ne", indices, aten::scalar(options.ignore_index));
  const MaybeTensor number = mean ? MaybeTensor(aten::sum(counted)) : std::nullopt;
  if (mean) {
    loss = aten::div(loss, weight ? sum_of_weights(indices, counted, *weight, dtype) : *number);
  }
  if (lse_square_scale != 0.0) {
    // Masked before the square: a row of padding may hold anything.
    const Tensor kept = where(counted, lse, aten::scalar(0.0, dtype));
    Tensor z_loss = binary("aten::mul", aten::call("aten::square", "", kept), aten::scalar(lse_square_scale, dtype));
    z_loss = reduction == "none" ? z_loss : aten::sum(z_loss);
    z_loss = mean ? aten::div(z_loss, *number) : z_loss;
    loss = torch::stable::subtract(loss, z_loss, -1.0);
  }
  stack.returns(loss);
}

}  // namespace xent::operators
