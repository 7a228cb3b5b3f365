// What the checks of checks.h are made of.
#pragma once

#include "checks.h"

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

inline const char* name_of(ScalarType dtype) {
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

inline const std::initializer_list<ScalarType> FLOATS{ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                               ScalarType::Double};
inline const std::initializer_list<ScalarType> INDICES{ScalarType::Long, ScalarType::Int, ScalarType::Byte};
inline const std::initializer_list<ScalarType> DIVISORS{ScalarType::Float, ScalarType::BFloat16, ScalarType::Half,
                                                 ScalarType::Double, ScalarType::Long};

template <class Part>
const Part& written(const Part& part) {
  return part;
}

// As Python writes a float: the fewest digits that give it back, with an exponent below 1e-4 and from 1e16 on.
inline std::string written(double value) {
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

inline void check_dtype(const char* name, const Tensor& tensor, const std::initializer_list<ScalarType>& valid) {
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

inline int32_t device_type(const Tensor& tensor) {
  int32_t type = 0;
  aten::succeed(aoti_torch_get_device_type(tensor.get(), &type), "aoti_torch_get_device_type");
  return type;
}

// Sizes of a tensor; empty for a meta tensor. Its sizes may be symbolic, and reading one specialises the traced graph.
inline std::optional<std::vector<int64_t>> sizes_of(const Tensor& tensor) {
  if (device_type(tensor) == aoti_torch_device_type_meta()) {
    return std::nullopt;
  }
  const auto sizes = tensor.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

// As Python writes a tuple.
inline std::string shape(const std::optional<std::vector<int64_t>>& sizes) {
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
inline Tensor part_of(const Tensor& tensor, int64_t first, int64_t last) {
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

inline const char* are(const std::string& owner) {
  return owner == "logits" ? "logits are" : owner == "grad" ? "grad is" : "input is";
}

inline std::string device_of(const Tensor& tensor) {
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

inline void same_device(
    const char* name, const Tensor& tensor, const Tensor& owner, const char* owner_is = "logits are") {
  const std::string found = device_of(tensor);
  const std::string expected = device_of(owner);
  require<std::runtime_error>(found == expected, name, " is on ", found, " but ", owner_is, " on ", expected,
                              "; both must be on one device");
}

inline void check_logits(const Tensor& logits, bool may_be_empty = false) {
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
inline void fits(const char* name, double value, const Tensor& logits) {
  constexpr double most = std::numeric_limits<float>::max();
  const ScalarType dtype = logits.scalar_type();
  require(std::abs(value) <= most || dtype == ScalarType::Double, name, " must be at most ", most,
          " in magnitude for logits of dtype torch.", name_of(dtype), ", which are computed in float32, got ", value);
}

inline void check_options(const MaybeTensor& weight, const Tensor& logits, const Options& options) {
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

// columns: of a tensor whose sizes are known.
inline void shard_range(std::optional<int64_t> columns, const cpu::Slice& place) {
  require(place.num_classes > 0, "num_classes must be at least 1, got ", place.num_classes);
  require(place.class_start >= 0 && place.class_start <= place.num_classes - (columns.value_or(0) > 0),
          "class_start=", place.class_start, " with ", columns ? std::to_string(*columns) : "...",
          " columns lies beyond num_classes=", place.num_classes,
          ": a shard starts at one of the classes (only an empty one may start behind the last)");
}

inline void check_index_target(const Tensor& logits, const Tensor& target) {
  check_dtype("target", target, INDICES);
  same_shape("target", target, logits, 0, logits.dim() - 1, "one class index for each row of the logits");
  same_device("target", target, logits);
}

}  // namespace xent::checks
