// The torch functions that the operators use. They use the stable ABI only, so one build serves torch 2.11 and newer.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

// Since torch 2.13; null before.
extern "C" [[gnu::weak]] const char* torch_exception_get_what_without_backtrace();

namespace xent {

using torch::headeronly::MemoryFormat;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

inline bool is_meta(const Tensor& tensor) {
  int32_t type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  return type == aoti_torch_device_type_meta();
}

namespace aten {

// Rethrows torch's error, with its text if there is one.
inline void succeed(AOTITorchError status, const char* what) {
  if (status != TORCH_SUCCESS) {
    const char* cause =
        torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : nullptr;
    throw std::runtime_error(cause ? cause : std::string(what) + " failed");
  }
}

// Calls an operator through the dispatcher, so that tracers see it, and returns its `results` tensors. An argument has
// the type in the operator's schema: optionals are std::optional; the stable ABI has no Scalar.
template <size_t results, class... Args>
std::vector<Tensor> call_all(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, std::max(sizeof...(Args), results)> stack{torch::stable::detail::from(args)...};
  succeed(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION), name);
  std::vector<Tensor> tensors;
  for (size_t i = 0; i < results; ++i) {
    tensors.push_back(torch::stable::detail::to<Tensor>(stack[i]));  // takes ownership: any result left would leak
  }
  return tensors;
}

// The same for one result of any type.
template <class Result = Tensor, class... Args>
Result call(const char* name, const char* overload, const Args&... args) {
  std::array<StableIValue, std::max<size_t>(sizeof...(Args), 1)> stack{torch::stable::detail::from(args)...};
  succeed(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION), name);
  return torch::stable::detail::to<Result>(stack[0]);
}

// Contiguous and uninitialised, in the shape of `like`. The shape may be symbolic.
inline Tensor empty_like(const Tensor& like, ScalarType dtype) {
  return call("aten::empty_like", "", like, std::optional<ScalarType>(dtype),
              std::optional<torch::headeronly::Layout>(), std::optional<torch::stable::Device>(),
              std::optional<bool>(), std::optional<MemoryFormat>(MemoryFormat::Contiguous));
}

inline Tensor to(const Tensor& tensor, ScalarType dtype) {
  return call("aten::to", "dtype", tensor, dtype, false, false, std::optional<MemoryFormat>());
}

inline Tensor cat(const std::vector<Tensor>& tensors) {
  return call("aten::cat", "", tensors, int64_t{0});
}

// (number, ...): the tensor `number` times, as a new first dimension.
inline Tensor times(const Tensor& tensor, int number) {
  return cat(std::vector<Tensor>(number, torch::stable::unsqueeze(tensor, 0)));
}

inline Tensor narrow(Tensor tensor, int64_t dim, int64_t start, int64_t length) {
  return torch::stable::narrow(tensor, dim, start, length);
}

// A gradient in this dtype that was written over the logits. A narrower one lies in the front of each row.
inline Tensor front_of(const Tensor& logits, ScalarType dtype) {
  if (dtype == logits.scalar_type()) {
    return logits;
  }
  const int64_t last = logits.dim() - 1;
  return narrow(call("aten::view", "dtype", logits, dtype), last, 0, logits.size(last));
}

// A 0-d tensor on the CPU: it combines with tensors of any device. Its dtype counts only among 0-d tensors.
inline Tensor scalar(double value, ScalarType dtype) {
  return torch::stable::full({}, value, dtype);
}

// The same for any int64: a double holds either half of it exactly.
inline Tensor scalar(int64_t value) {
  const int64_t low = value & 0xFFFFFFFF;
  return call("aten::bitwise_or", "Tensor", scalar(double(value - low), ScalarType::Long),
              scalar(double(low), ScalarType::Long));
}

}  // namespace aten
}  // namespace xent
