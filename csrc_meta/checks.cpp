#include "checks.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace xent::checks {
namespace {

const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    case ScalarType::Long: return "int64";
    case ScalarType::Int: return "int32";
    case ScalarType::Short: return "int16";
    case ScalarType::Char: return "int8";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return torch::headeronly::toString(dtype);
  }
}

const std::initializer_list<ScalarType> FLOATS{ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                               ScalarType::Double};
const std::initializer_list<ScalarType> INDICES{ScalarType::Long, ScalarType::Int, ScalarType::Byte};
const std::initializer_list<ScalarType> DIVISORS{ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                                 ScalarType::Double, ScalarType::Long};

template <class Part>
const Part& written(const Part& part) {
  return part;
}

// As Python writes a float: the fewest digits that give it back, with an exponent below 1e-4 and from 1e16 on.
std::string written(double value) {
  if (std::isnan(value)) {
    return "nan";  // whatever its sign
  }
  const double magnitude = std::abs(value);
  const bool plain = magnitude == 0.0 || (magnitude >= 1e-4 && magnitude < 1e16);
  char digits[32];
  const auto format = plain ? std::chars_format::fixed : std::chars_format::scientific;
  const std::string result(digits, std::to_chars(digits, digits + sizeof(digits), value, format).ptr);
  return plain && result.find('.') == std::string::npos ? result + ".0" : result;
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << written(parts));
  return stream.str();
}

template <class Error = std::invalid_argument, class... Parts>
void require(bool condition, const Parts&... parts) {
  if (!condition) {
    throw Error(text(parts...));
  }
}

void check_dtype(const char* name, const Tensor& tensor, const std::initializer_list<ScalarType>& valid) {
  const ScalarType dtype = tensor.scalar_type();
  std::string names;
  for (ScalarType one : valid) {
    if (one == dtype) {
      return;
    }
    names += (names.empty() ? "" : ", ") + std::string(name_of(one));
  }
  require(false, name, " has dtype torch.", name_of(dtype), "; expected one of ", names);
}

int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  aten::succeed(aoti_torch_get_device_type(tensor.get(), &type), "aoti_torch_get_device_type");
  return type;
}

// Sizes of a tensor; empty for a meta tensor. Its sizes may be symbolic, and reading one specialises the traced graph.
std::optional<std::vector<int64_t>> sizes_of(const Tensor& tensor) {
  if (device_type(tensor) == aoti_torch_device_type_meta()) {
    return std::nullopt;
  }
  const auto sizes = tensor.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

// As Python writes a tuple.
std::string shape(const std::optional<std::vector<int64_t>>& sizes) {
  if (!sizes) {
    return "(...)";
  }
  std::string result = "(";
  for (size_t i = 0; i < sizes->size(); ++i) {
    result += (i ? ", " : "") + std::to_string((*sizes)[i]);
  }
  return result + (sizes->size() == 1 ? ",)" : ")");
}

// A meta tensor of dimensions [first, last) of one. It is a sum, which computes nothing.
Tensor part_of(const Tensor& tensor, int64_t first, int64_t last) {
  auto others = aten::dims(0, first);
  const auto behind = aten::dims(last, tensor.dim());
  others.insert(others.end(), behind.begin(), behind.end());
  return others.empty() ? tensor : aten::sum(tensor, others);
}

// Does `tensor` have dimensions [first, last) of the logits, and no others?
template <class... Meaning>
void same_shape(const char* name, const Tensor& tensor, const Tensor& logits, int64_t first, int64_t last,
                const Meaning&... meaning) {
  const auto found = sizes_of(tensor);
  auto expected = sizes_of(logits);
  bool same = tensor.dim() == last - first;
  if (found && expected) {
    expected = std::vector<int64_t>(expected->begin() + first, expected->begin() + last);
    same = found == expected;
  } else if (same) {
    // torch compares symbolic sizes and guards what it found.
    same = aten::call<bool>("aten::is_same_size", "", tensor, part_of(logits, first, last));
    expected.reset();
  }
  if (!same) {  // makes strings, which takes longer than the comparison
    require(false, name, " has shape ", shape(found), "; expected ", shape(expected), ", ", meaning...);
  }
}

const char* are(const std::string& owner) {
  return owner == "logits" ? "logits are" : owner == "grad" ? "grad is" : "input is";
}

std::string device_of(const Tensor& tensor) {
  const int32_t type = device_type(tensor);
  const int32_t index = tensor.get_device_index();
  std::string name = "device type " + std::to_string(type);
  const std::initializer_list<std::pair<int32_t, const char*>> known{
      {aoti_torch_device_type_cpu(), "cpu"}, {aoti_torch_device_type_cuda(), "cuda"},
      {aoti_torch_device_type_meta(), "meta"}, {aoti_torch_device_type_xpu(), "xpu"},
      {aoti_torch_device_type_mps(), "mps"}, {aoti_torch_device_type_privateuse1(), "privateuseone"}};
  for (const auto& [code, text] : known) {
    name = code == type ? text : name;
  }
  return index < 0 ? name : name + ":" + std::to_string(index);
}

void same_device(const char* name, const Tensor& tensor, const Tensor& owner, const char* owner_is = "logits are") {
  const std::string found = device_of(tensor);
  const std::string expected = device_of(owner);
  require<std::runtime_error>(found == expected, name, " is on ", found, " but ", owner_is, " on ", expected,
                              "; both must be on one device");
}

void check_logits(const Tensor& logits, bool may_be_empty = false) {
  require(logits.dim() >= 1, "logits have no dimension; expected shape (..., V) with the classes last");
  check_dtype("logits", logits, FLOATS);
  const auto sizes = sizes_of(logits);
  if (!may_be_empty && !sizes) {
    aten::amax(logits);  // raises where there is no class
  }
  require(may_be_empty || !sizes || sizes->back() > 0, "logits of shape ", shape(sizes),
          " have 0 classes; expected at least 1");
}

// Beyond float32 a kernel would compute with infinity.
void fits(const char* name, double value, const Tensor& logits) {
  constexpr double most = std::numeric_limits<float>::max();
  const ScalarType dtype = logits.scalar_type();
  require(std::abs(value) <= most || dtype == ScalarType::Double, name, " must be at most ", most,
          " in magnitude for logits of dtype torch.", name_of(dtype), ", which are computed in float32, got ", value);
}

void check_options(const MaybeTensor& weight, const Tensor& logits, const Options& options) {
  if (weight) {
    check_dtype("weight", *weight, FLOATS);
    same_shape("weight", *weight, logits, logits.dim() - 1, logits.dim(), "one weight a class");
    same_device("weight", *weight, logits);
  }
  require(options.label_smoothing >= 0.0 && options.label_smoothing <= 1.0,
          "label_smoothing must be between 0.0 and 1.0, got ", options.label_smoothing);
  require(!options.softcap || (*options.softcap >= 0x1p-126 && std::isfinite(*options.softcap)),
          "softcap must be a finite number above 0, or None for no cap, got ", options.softcap.value_or(0.0),
          " (the least is 2**-126, the smallest normal float32)");
  fits("softcap", options.softcap.value_or(0.0), logits);
  require(std::isfinite(options.logit_scale), "logit_scale must be finite, got ", options.logit_scale);
  require(options.logit_scale != 0.0, "logit_scale must not be 0, which makes all classes equally likely, got ",
          options.logit_scale);
  fits("logit_scale", options.logit_scale, logits);
}

void check_index_target(const Tensor& logits, const Tensor& target) {
  check_dtype("target", target, INDICES);
  same_shape("target", target, logits, 0, logits.dim() - 1, "one class index for each row of the logits");
  same_device("target", target, logits);
}

}  // namespace

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
  require(place.num_classes > 0, "num_classes must be at least 1, got ", place.num_classes);
  const auto sizes = sizes_of(logits);
  const bool holds_columns = sizes && sizes->back() > 0;
  require(place.class_start >= 0 && place.class_start <= place.num_classes - holds_columns,
          "class_start=", place.class_start, " with ", sizes ? std::to_string(sizes->back()) : "...",
          " columns lies beyond num_classes=", place.num_classes,
          ": a shard starts at one of the classes (only an empty one may start behind the last)");
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
    check_dtype("divisor", *tensor, DIVISORS);
    // Only 2 is valid, so a symbolic size may be specialised.
    require(tensor->dim() == 1 && tensor->size(0) == 2, "divisor has shape ", shape(sizes_of(*tensor)),
            "; expected (2,), the sum of the weights and the number of counted rows");
    same_device("divisor", *tensor, logits);
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

void linear(const Tensor& input, const Tensor& linear_weight, const Tensor& target, const MaybeTensor& linear_bias,
            const MaybeTensor& weight, const Options& options, std::optional<ScalarType> accumulate_dtype,
            std::optional<int64_t> chunk_rows, std::optional<ScalarType> logits_dtype,
            const std::optional<std::string>& products) {
  const auto as_input = [&](const char* name, const Tensor& tensor) {
    same_device(name, tensor, input, "input is");
    require(tensor.scalar_type() == input.scalar_type(), name, " has dtype torch.", name_of(tensor.scalar_type()),
            " but input torch.", name_of(input.scalar_type()),
            "; both must be the same, as for nn.Linear (torch.autocast casts both)");
  };
  check_dtype("input", input, FLOATS);
  const int64_t last = input.dim() - 1;
  require(last >= 0, "input has no dimension; expected shape (..., H), the features last");
  const auto head = sizes_of(linear_weight), sizes = sizes_of(input);
  // Has linear_weight the rows that the input should have? (Liger-Kernel's order of arguments.)
  const auto swapped = [&](std::optional<std::vector<int64_t>> rows) {
    if (!rows || !head || !sizes || sizes->size() != 2) {
      return "";
    }
    rows->push_back(sizes->back());
    return rows != head ? "" : ": input and linear_weight seem to be swapped, the order is input, linear_weight, target "
                               "(Liger-Kernel's has the weight first)";
  };
  if (linear_weight.dim() != 2) {
    auto rows = head;
    if (rows && !rows->empty()) {
      rows->pop_back();
    }
    require(false, "linear_weight has shape ", shape(head), "; expected (V, H), as nn.Linear has it", swapped(rows));
  }
  as_input("linear_weight", linear_weight);
  const auto same_features = [&] {
    return aten::call<bool>("aten::is_same_size", "", part_of(linear_weight, 1, 2), part_of(input, last, last + 1));
  };
  if (!(sizes ? head->back() == sizes->back() : same_features())) {
    const bool transposed = sizes && head->front() == sizes->back();
    const auto expected = sizes ? std::optional(std::vector{transposed ? head->back() : head->front(), sizes->back()})
                                : std::nullopt;
    require(false, "linear_weight has shape ", shape(head), "; expected ", shape(expected),
            ", one row of the input's features for each class",
            transposed ? ": it is transposed, pass linear_weight.t()" : "");
  }
  const Tensor logits = aten::call("aten::t", "", linear_weight);  // of its last dimension
  if (!head) {
    aten::amax(logits);  // raises where there is no class
  }
  require(!head || head->front() > 0, "linear_weight of shape ", shape(head), " has 0 classes; expected at least 1");
  if (linear_bias) {
    as_input("linear_bias", *linear_bias);
    same_shape("linear_bias", *linear_bias, linear_weight, 0, 1, "one number a class");
  }
  const ScalarType dtype = input.scalar_type();
  const auto may_be_wider = [&](const char* name, std::optional<ScalarType> given) {
    const ScalarType kept = given.value_or(dtype);
    const bool wider = kept == ScalarType::Float && (dtype == ScalarType::BFloat16 || dtype == ScalarType::Half);
    require(kept == dtype || wider, name, " must be None, the input's torch.", name_of(dtype),
            " or, for 16-bit inputs, torch.float32; got torch.", name_of(kept));
  };
  may_be_wider("accumulate_dtype", accumulate_dtype);
  may_be_wider("logits_dtype", logits_dtype);
  require(!products, "products of 8-bit numbers are made from Python alone");
  require(chunk_rows.value_or(1) >= 1, "chunk_rows must be at least 1, or None for the default, got ",
          chunk_rows.value_or(1));
  check_dtype("target", target, INDICES);
  same_shape("target", target, input, 0, last, "one class index for each row of the input", swapped(sizes_of(target)));
  same_device("target", target, input, "input is");
  check_options(weight, logits, options);
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
  require<std::out_of_range>(bad == 0, "target ", first, " is out of bounds: valid are 0 to ", num_classes - 1,
                             " and ignore_index=", ignore_index, " (", bad, " of ", number,
                             " targets are out of bounds)");
}

}  // namespace xent::checks
