#include "checks_parts.h"

#include <algorithm>
#include <utility>

namespace xent::checks {

void index_forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, const Options& options) {
  check_logits(logits);
  check_index_target(logits, target);
  check_options(weight, logits, options);
}

void soft_forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, const Options& options) {
  check_logits(logits);
  check_dtype("target of class probabilities", target, FLOATS);
  same_shape("target", target, logits, 0, logits.dim(), "one probability for each logit");
  same_device("target", target, logits);
  check_options(weight, logits, options);
}

void soft_values(double least) {
  require(least >= 0.0, "target of class probabilities has ", least,
          " in a row that adds up to less than 0: pass target.exp() of log-probabilities, target.softmax(dim) of logits");
}

void shard(const Tensor& logits, const Tensor& target, const cpu::Slice& place, const MaybeTensor& weight,
           const Options& options) {
  check_logits(logits, true);
  check_index_target(logits, target);
  check_options(weight, logits, options);
  const auto sizes = sizes_of(logits);
  shard_range(sizes ? std::optional(sizes->back()) : std::nullopt, place);
}

void shard_gathered(const Tensor& gathered, const Tensor& part) {
  const auto found = sizes_of(gathered);
  const auto expected = sizes_of(part);
  require(gathered.dim() == 2 && (found ? found->back() == expected->back()
                                        : aten::call<bool>("aten::is_same_size", "", aten::sum(gathered, {{0}}), part)),
          "gathered has shape ", shape(found), "; expected (ranks, ", expected ? expected->back() : -1,
          "), one result of cross_entropy_shard for each rank");
  require(gathered.scalar_type() == part.scalar_type(), "gathered has dtype torch.", name_of(gathered.scalar_type()),
          "; expected torch.", name_of(part.scalar_type()));
}

void slice_of(int64_t class_start, const std::optional<int64_t>& num_classes, const MaybeTensor& weight,
              const MaybeTensor& coefficient) {
  require(num_classes || (class_start == 0 && !coefficient),
          "class_start and coefficient go with num_classes, of a slice of the classes");
  require(!num_classes || weight.has_value() == coefficient.has_value(),
          "a class weight needs the coefficient that cross_entropy_shard_join returned: both or neither");
}

void with_entropy(const char* owner, const Tensor& matrix, const MaybeTensor& grad_entropy,
                  const MaybeTensor& entropy) {
  row_values("grad_entropy", grad_entropy, matrix, owner);
  row_values("entropy", entropy, matrix, owner);
  require(grad_entropy.has_value() == entropy.has_value(),
          "grad_entropy and entropy go together: the gradient of an entropy needs its value");
}

void row_values(const char* name, const MaybeTensor& tensor, const Tensor& matrix, const char* owner) {
  if (tensor) {
    check_dtype(name, *tensor, FLOATS);
    same_shape(name, *tensor, matrix, 0, matrix.dim() - 1, "one value for each row of the ", owner);
    same_device(name, *tensor, matrix, are(owner));
  }
}

void divisor(const MaybeTensor& tensor, const Tensor& logits) {
  if (tensor) {
    check_dtype("divisors", *tensor, DIVISORS);
    // Only 2 is valid, so a symbolic size may be specialised.
    require(tensor->dim() == 1 && tensor->size(0) == 2, "divisors has shape ", shape(sizes_of(*tensor)),
            "; expected (2,), the sum of the weights and the number of counted rows");
    same_device("divisors", *tensor, logits);
  }
}

void scalar_or_row_values(const char* owner, const Tensor& matrix, const char* name, const MaybeTensor& tensor) {
  if (tensor) {
    check_dtype(name, *tensor, FLOATS);
    if (tensor->dim() > 0) {
      same_shape(name, *tensor, matrix, 0, matrix.dim() - 1, "one value for each row of the ", owner, ", or ()");
    }
    same_device(name, *tensor, matrix, are(owner));
  }
}

void scale_grad(const Tensor& grad, const Tensor& factor) {
  require(grad.dim() >= 1, "grad has no dimension; expected shape (..., V)");
  check_dtype("grad", grad, FLOATS);
  scalar_or_row_values("grad", grad, "factor", factor);
}

namespace {

// Has this weight the rows that the input should have? (Liger-Kernel's order of arguments.)
std::string swapped(const Tensor& input, const Tensor& weight, const char* name,
                    std::optional<std::vector<int64_t>> rows) {
  const auto head = sizes_of(weight), sizes = sizes_of(input);
  if (!rows || !head || !sizes || sizes->size() != 2) {
    return "";
  }
  rows->push_back(sizes->back());
  return rows != head ? ""
                      : text(": input and ", name, " seem to be swapped, the order is input, ", name,
                             ", target (Liger-Kernel's has the weight first)");
}

void may_be_wider(const char* name, std::optional<ScalarType> given, const Tensor& input) {
  const ScalarType dtype = input.scalar_type(), kept = given.value_or(dtype);
  const bool wider = kept == ScalarType::Float && (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half);
  require(kept == dtype || wider, name, " must be None, the input's torch.", name_of(dtype),
          " or, for 16-bit inputs, torch.float32; got torch.", name_of(kept));
}

}  // namespace

void head(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
          std::optional<ScalarType> accumulate_dtype, const HeadNames& names) {
  const std::string input_is = text(names.input, " is");
  const auto as_input = [&](const char* name, const Tensor& tensor) {
    same_device(name, tensor, input, input_is.c_str());
    require(tensor.scalar_type() == input.scalar_type(), name, " has dtype torch.", name_of(tensor.scalar_type()),
            " but ", names.input, " torch.", name_of(input.scalar_type()),
            "; both must be the same, as for nn.Linear (torch.autocast casts both)");
  };
  check_dtype(names.input, input, FLOATS);
  const int64_t last = input.dim() - 1;
  require(last >= 0, names.input, " has no dimension; expected shape (..., H), the features last");
  const auto head = sizes_of(weight), sizes = sizes_of(input);
  if (weight.dim() != 2) {
    auto rows = head;
    if (rows && !rows->empty()) {
      rows->pop_back();
    }
    require(false, names.weight, " has shape ", shape(head), "; expected (V, H), as nn.Linear has it",
            swapped(input, weight, names.weight, rows));
  }
  as_input(names.weight, weight);
  const auto same_features = [&] {
    return aten::call<bool>("aten::is_same_size", "", part_of(weight, 1, 2), part_of(input, last, last + 1));
  };
  if (!(sizes ? head->back() == sizes->back() : same_features())) {
    const bool transposed = sizes && head->front() == sizes->back();
    const auto expected = sizes ? std::optional(std::vector{transposed ? head->back() : head->front(), sizes->back()})
                                : std::nullopt;
    require(false, names.weight, " has shape ", shape(head), "; expected ", shape(expected),
            ", one row of the input's features for each class",
            transposed ? text(": it is transposed, pass ", names.weight, ".t(); LinearCrossEntropyLoss takes (H, V)") : "");
  }
  if (!head) {
    aten::amax(aten::call("aten::t", "", weight));  // raises where there is no class
  }
  require(!head || head->front() > 0, names.weight, " of shape ", shape(head), " has 0 classes; expected at least 1");
  if (bias) {
    as_input(names.bias, *bias);
    same_shape(names.bias, *bias, weight, 0, 1, "one number a class");
  }
  may_be_wider("accumulate_dtype", accumulate_dtype, input);
}

void chunk_rows(std::optional<int64_t> number) {
  require(number.value_or(1) >= 1, "chunk_rows must be at least 1, or None for the default, got ", number.value_or(1));
}

void target_of_head(const Tensor& input, const Tensor& target, const std::string& hint) {
  check_dtype("target", target, INDICES);
  same_shape("target", target, input, 0, input.dim() - 1, "one class index for each row of the input", hint);
  same_device("target", target, input, "input is");
}

void linear(const Tensor& input, const Tensor& linear_weight, const Tensor& target, const MaybeTensor& linear_bias,
            const MaybeTensor& weight, const Options& options, std::optional<ScalarType> accumulate_dtype,
            std::optional<int64_t> rows, std::optional<ScalarType> logits_dtype,
            const std::optional<std::string>& products) {
  head(input, linear_weight, linear_bias, accumulate_dtype, {});
  may_be_wider("logits_dtype", logits_dtype, input);
  require(!products, "products of 8-bit numbers are made from Python alone");
  chunk_rows(rows);
  target_of_head(input, target, swapped(input, linear_weight, "linear_weight", sizes_of(target)));
  check_options(weight, aten::call("aten::t", "", linear_weight), options);  // of its last dimension
}

void narrower(std::optional<ScalarType> grad_dtype, const Tensor& logits) {
  const ScalarType dtype = logits.scalar_type(), given = grad_dtype.value_or(dtype);
  const bool sixteen = given == ScalarType::BFloat16 || given == ScalarType::Half;
  require(given == dtype || (dtype == ScalarType::Float && sixteen), "grad_dtype must be None, the logits' torch.",
          name_of(dtype), " or, for float32 logits, torch.bfloat16 or torch.float16; got torch.", name_of(given));
}

void output_mask(const std::vector<bool>& mask) {
  require(mask.size() == 3, "output_mask has ", mask.size(),
          " entries; expected 3, for input, linear_weight and linear_bias");
}

void sum_divisor(const MaybeTensor& tensor, const Tensor& input, const std::string& reduction) {
  if (tensor) {
    require(reduction == "sum", "divisor is what a sum is divided by: expected reduction=\"sum\", got '", reduction,
            "'");
    check_dtype("divisor", *tensor, DIVISORS);
    require(tensor->dim() == 0, "divisor has shape ", shape(sizes_of(*tensor)), "; expected (), one number");
    same_device("divisor", *tensor, input, "input is");
  }
}

void token_weight(const MaybeTensor& tensor, const Tensor& target) {
  if (tensor) {
    require(!aten::call<bool>("aten::is_complex", "", *tensor), "token_weight is complex; expected real numbers");
    same_shape("token_weight", *tensor, target, 0, target.dim(), "one number for each target");
    same_device("token_weight", *tensor, target, "target is");
  }
}

void writable(const char* name, const Tensor& tensor) {
  const auto of_inference = [](const Tensor& one) { return aten::call<bool>("aten::is_inference", "", one); };
  // The stable ABI does not tell whether inference mode is on, but a new tensor does.
  require<std::runtime_error>(
      !of_inference(tensor) || of_inference(aten::scalar(0.0, tensor.scalar_type())), name,
      " was made in inference mode, and outside it no tensor of inference mode is written to: call the operator below "
      "torch.inference_mode(), or pass ", name, ".clone()");
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {
    return;
  }
  std::vector<std::pair<int64_t, int64_t>> dimensions;
  for (size_t i = 0; i < sizes.size(); ++i) {
    dimensions.emplace_back(strides[i], sizes[i]);
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t behind = 0;  // the last element of the dimensions with smaller strides
  for (const auto& [stride, size] : dimensions) {
    if (size > 1) {
      require<std::runtime_error>(
          stride > behind, name, " of shape ", shape(sizes_of(tensor)), " and strides ",
          shape(std::vector<int64_t>(strides.begin(), strides.end())),
          " share memory between their rows, so that no gradient can be written over them: pass a copy");
      behind += (size - 1) * stride;
    }
  }
}

void reduction(const std::string& value) {
  require(value == "none" || value == "mean" || value == "sum", "'", value,
          "' is not a valid value for reduction; valid are 'none', 'mean', 'sum'");
}

void reduction_to_one(const std::string& value) {
  require(value == "mean" || value == "sum", "'", value, "' is not a valid value for reduction; valid are 'mean', 'sum'");
}

void lse_square_scale(double value, const Tensor& logits) {
  require(std::isfinite(value), "lse_square_scale must be finite, got ", value);
  require(value >= 0.0, "lse_square_scale must be at least 0, got ", value, ": below 0 it would reward a large lse");
  fits("lse_square_scale", value, logits);
}

void target_values(const Tensor& target, int64_t num_classes, int64_t ignore_index) {
  const auto* values = target.const_data_ptr<int64_t>();
  const int64_t number = target.numel();
  int64_t bad = 0;
  int64_t first = 0;
  for (int64_t i = 0; i < number; ++i) {
    if ((values[i] < 0 || values[i] >= num_classes) && values[i] != ignore_index) {
      first = bad++ ? first : values[i];
    }
  }
  if (bad == 0) {
    return;
  }
  const std::string mark = std::to_string(first);
  const std::string hint = first < 0 ? "to ignore targets of " + mark + ", pass ignore_index=" + mark
                                     : "a part of a sharded head, as weight.to_local(), has a part of the classes";
  require<std::out_of_range>(false, "target ", first, " is out of bounds: valid are 0 to ", num_classes - 1,
                             " and ignore_index=", ignore_index, " (", bad, " of ", number,
                             " targets are out of bounds); ", hint);
}

}  // namespace xent::checks
