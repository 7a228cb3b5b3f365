#include "tensors.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace xent::tensors {
namespace {

struct Dimension {
  int64_t size;
  int64_t stride;
};

// All dimensions except the last `kept`. Two are merged if one stride describes both.
std::vector<Dimension> joined(const Tensor& tensor, int64_t kept) {
  std::vector<Dimension> result;
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (int64_t i = 0; i + kept < tensor.dim(); ++i) {
    if (sizes[i] == 1) {
      continue;
    }
    if (!result.empty() && result.back().stride == sizes[i] * strides[i]) {
      result.back() = {result.back().size * sizes[i], strides[i]};
    } else {
      result.push_back({sizes[i], strides[i]});
    }
  }
  return result;
}

// Refuses a tensor whose storage was freed (untyped_storage().resize_(0)), as torch's own kernels do.
const Tensor& allocated(const Tensor& tensor) {
  if (tensor.const_data_ptr() == nullptr && tensor.numel() > 0) {
    throw std::runtime_error("a tensor has elements, but its storage has been freed or was never allocated");
  }
  return tensor;
}

// Empty if the kernels cannot take the strides. Without data.
std::optional<cpu::Rows> layout(const Tensor& tensor, bool apart) {
  const int64_t last = tensor.dim() - 1;
  const bool dense = tensor.size(last) <= 1 || tensor.stride(last) == 1;
  if (!dense && !(apart && tensor.size(last) <= cpu::kFewClasses)) {
    return std::nullopt;
  }
  cpu::Rows result;
  result.class_stride = dense ? 1 : tensor.stride(last);
  if (tensor.numel() == 0) {
    return result;
  }
  const auto dimensions = joined(tensor, 1);
  if (dimensions.size() > 2) {
    return std::nullopt;
  }
  if (!dimensions.empty()) {
    result.inner = dimensions.back().size;
    result.stride = dimensions.back().stride;
  }
  if (dimensions.size() == 2) {
    result.outer_stride = dimensions.front().stride;
  }
  return result;
}

}  // namespace

cpu::DType dtype(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return cpu::DType::float32;
    case ScalarType::BFloat16: return cpu::DType::bfloat16;
    case ScalarType::Half: return cpu::DType::float16;
    case ScalarType::Double: return cpu::DType::float64;
    default: throw std::invalid_argument("xent: no kernel for this dtype");
  }
}

cpu::Rows rows(Tensor& tensor, bool apart) {
  auto found = layout(tensor, apart);
  if (!found) {
    tensor = torch::stable::contiguous(tensor);
    found = layout(tensor, apart);
  }
  found->data = allocated(tensor).const_data_ptr();
  return *found;
}

cpu::MutableRows mutable_rows(Tensor& tensor) {
  const cpu::Rows found = rows(tensor);
  return {tensor.mutable_data_ptr(), found.inner, found.outer_stride, found.stride};
}

cpu::PerRow Arguments::per_row(const MaybeTensor& tensor) {
  if (!tensor) {
    return {};
  }
  Tensor& memory = memory_.emplace_back(aten::to(*tensor, accumulator_));
  auto dimensions = joined(memory, 0);
  if (dimensions.size() > 1) {
    memory = torch::stable::contiguous(memory);
    dimensions = joined(memory, 0);
  }
  return {allocated(memory).const_data_ptr(), dimensions.empty() ? 0 : dimensions.back().stride};
}

const void* Arguments::dense(const MaybeTensor& tensor, MaybeDtype dtype) {
  if (!tensor) {
    return nullptr;
  }
  memory_.push_back(torch::stable::contiguous(aten::to(*tensor, dtype.value_or(accumulator_))));
  return allocated(memory_.back()).const_data_ptr();
}

cpu::Problem Arguments::problem(const Tensor& logits, const MaybeTensor& target, const MaybeTensor& weight,
                                const RowOptions& options, Values values) {
  cpu::Problem problem{options};
  problem.dtype = dtype(logits);
  problem.rows = 1;
  for (int64_t i = 0; i + 1 < logits.dim(); ++i) {
    problem.rows *= logits.size(i);
  }
  problem.classes = logits.size(logits.dim() - 1);
  if (values != Values::absent) {
    problem.logits = rows(logits, values == Values::apart);
  }
  set_target(problem, target, weight);
  return problem;
}

cpu::Problem Arguments::rows_only(const Tensor& rows, const Tensor& target, const MaybeTensor& weight,
                                  int64_t ignore_index) {
  cpu::Problem problem{RowOptions{ignore_index}};
  problem.dtype = dtype(rows);
  problem.rows = target.numel();
  problem.classes = weight ? weight->numel() : 0;
  set_target(problem, target, weight);
  return problem;
}

void Arguments::set_target(cpu::Problem& problem, const MaybeTensor& target, const MaybeTensor& weight) {
  problem.target = static_cast<const int64_t*>(dense(target, ScalarType::Long));
  if (weight) {
    problem.weight = dense(weight);
  }
}

namespace {

// Matrix multiplications are slow on subnormal numbers. A gradient divided by the number of rows is full of them if the
// model is sure.
class FlushToZero {
 public:
  FlushToZero() : before_(read()) { write(before_ | FLAG); }
  ~FlushToZero() { write(before_); }
  FlushToZero(const FlushToZero&) = delete;
  FlushToZero& operator=(const FlushToZero&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t FLAG = 1U << 15;
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t value) { _mm_setcsr(static_cast<uint32_t>(value)); }
#elif defined(__aarch64__)
  static constexpr uint64_t FLAG = 1U << 24;
  static uint64_t read() {
    uint64_t value = 0;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(uint64_t value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  static constexpr uint64_t FLAG = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif
  uint64_t before_;
};

}  // namespace

cpu::Threads threads(const Tensor& logits, const std::optional<double>& softcap) {
  const ScalarType dtype = logits.scalar_type();
  const bool flushes = !softcap && (dtype == ScalarType::Float || dtype == ScalarType::BFloat16);
  const auto loop = [flushes](int64_t begin, int64_t end, int64_t grain, const cpu::Threads::Body& body) {
    torch::stable::parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
      std::optional<FlushToZero> flush;
      if (flushes) {
        flush.emplace();
      }
      body(first, last);
    });
  };
  return {torch::stable::get_num_threads(), loop};
}

}  // namespace xent::tensors
