#include "tensors.h"

#include "checks.h"

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

std::optional<Layout> layout(const Tensor& tensor, bool apart) {
  const int64_t last = tensor.dim() - 1;
  const bool dense = tensor.size(last) <= 1 || tensor.stride(last) == 1;
  if (!dense && !(apart && tensor.size(last) <= cpu::kFewClasses)) {
    return std::nullopt;
  }
  const auto dimensions = joined(tensor, 1);
  Layout result;
  result.class_stride = dense ? 1 : tensor.stride(last);
  if (tensor.numel() == 0) {
    return result;
  }
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

Read read(const Tensor& tensor, bool apart) {
  auto found = layout(tensor, apart);
  const Tensor memory = found ? tensor : torch::stable::contiguous(tensor);
  const Layout place = found ? *found : *layout(memory);
  return {memory, {allocated(memory).const_data_ptr(), place.inner, place.outer_stride, place.stride, place.class_stride}};
}

Write::Write(const Tensor& tensor) : tensor_(tensor), memory_(tensor) {
  auto found = layout(tensor);
  if (!found) {
    memory_ = torch::stable::contiguous(tensor);
    found = layout(memory_);
  }
  allocated(memory_);
  rows = {memory_.mutable_data_ptr(), found->inner, found->outer_stride, found->stride};
}

void Write::finish() const {
  Tensor written = tensor_;
  torch::stable::copy_(written, memory_);  // onto itself if not copied: tells autograd that it was written
}

PerRow::PerRow(const MaybeTensor& tensor, ScalarType dtype) {
  if (!tensor) {
    return;
  }
  memory = aten::to(*tensor, dtype);
  auto dimensions = joined(*memory, 0);
  if (dimensions.size() > 1) {
    memory = torch::stable::contiguous(*memory);
    dimensions = joined(*memory, 0);
  }
  values = {allocated(*memory).const_data_ptr(), dimensions.empty() ? 0 : dimensions.back().stride};
}

Tensor dense(const Tensor& tensor, ScalarType dtype) {
  return allocated(torch::stable::contiguous(aten::to(tensor, dtype)));
}

Problem::Problem(const Tensor& logits, const MaybeTensor& target, const MaybeTensor& weight, const RowOptions& options,
                 Values values)
    : cpu::Problem{options} {
  dtype = tensors::dtype(logits);
  rows = 1;
  for (int64_t i = 0; i + 1 < logits.dim(); ++i) {
    rows *= logits.size(i);
  }
  classes = logits.size(logits.dim() - 1);
  if (values != Values::absent) {
    logits_ = tensors::read(logits, values == Values::apart);
    this->logits = logits_->rows;
  }
  if (target) {
    target_ = dense(*target, ScalarType::Long);
    this->target = target_->const_data_ptr<int64_t>();
  }
  if (weight) {
    weight_ = dense(*weight, accumulator(logits));
    this->weight = weight_->const_data_ptr();
  }
}

void Problem::check_targets(int64_t num_classes) const { checks::target_values(*target_, num_classes, ignore_index); }

Upstream::Upstream(const Tensor& logits, const Tensor& grad_loss, const MaybeTensor& grad_lse,
                   const MaybeTensor& grad_entropy, const MaybeTensor& divisor, double lse_square_scale)
    : loss_(grad_loss, accumulator(logits)),
      lse_(grad_lse, accumulator(logits)),
      entropy_(grad_entropy, accumulator(logits)),
      divisor_(dense(divisor, accumulator(logits))) {
  loss = loss_.values;
  lse = lse_.values;
  entropy = entropy_.values;
  this->divisor = data(divisor_);
  this->lse_square_scale = lse_square_scale;
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
  cpu::Threads result;
  uint32_t number = 1;
  aten::succeed(torch_get_num_threads(&number), "torch_get_num_threads");
  result.number = number;
  const ScalarType dtype = logits.scalar_type();
  const bool flushes = !softcap && (dtype == ScalarType::Float || dtype == ScalarType::BFloat16);
  result.loop = [flushes](int64_t begin, int64_t end, int64_t grain, const cpu::Threads::Body& body) {
    const cpu::Threads::Body flushing = [&body](int64_t first, int64_t last) {
      const FlushToZero flush;
      body(first, last);
    };
    const auto run = [](int64_t first, int64_t last, void* context) {
      (*static_cast<const cpu::Threads::Body*>(context))(first, last);
    };
    aten::succeed(torch_parallel_for(begin, end, grain, run,
                                     const_cast<cpu::Threads::Body*>(flushes ? &flushing : &body)),
                  "torch_parallel_for");
  };
  return result;
}

}  // namespace xent::tensors
