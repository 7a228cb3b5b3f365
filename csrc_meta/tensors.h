// Converts tensors for the kernels of cpu/. Rows are used in place if the kernels can take them, else copied once.
#pragma once

#include "operators/options.h"

namespace xent::tensors {

inline ScalarType accumulator(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

cpu::DType dtype(const Tensor& tensor);

// (..., V) as N rows of V dense elements, with one or two strides between rows.
struct Layout {
  int64_t inner = 1;
  int64_t outer_stride = 0;
  int64_t stride = 0;
  int64_t class_stride = 1;
};

// Empty if the classes are not dense (unless few may be apart), or the rows have more than two strides.
std::optional<Layout> layout(const Tensor& tensor, bool apart = false);

// Rows of a tensor, and the tensor that keeps their memory.
struct Read {
  Tensor tensor;
  cpu::Rows rows;
};
Read read(const Tensor& tensor, bool apart = false);

// The memory of a gradient (checks::writable): the tensor itself, or a copy that `finish` copies back.
class Write {
 public:
  explicit Write(const Tensor& tensor);
  cpu::MutableRows rows;
  const Tensor& memory() const { return memory_; }
  void finish() const;

 private:
  Tensor tensor_;
  Tensor memory_;
};

// One number a row, in the accumulator's dtype; null where absent.
struct PerRow {
  PerRow(const MaybeTensor& tensor, ScalarType dtype);
  MaybeTensor memory;
  cpu::PerRow values;
};

// Contiguous, in this dtype, and in memory.
Tensor dense(const Tensor& tensor, ScalarType dtype);

inline MaybeTensor dense(const MaybeTensor& tensor, ScalarType dtype) {
  return tensor ? MaybeTensor(dense(*tensor, dtype)) : std::nullopt;
}

inline const void* data(const MaybeTensor& tensor) {
  return tensor ? tensor->const_data_ptr() : nullptr;
}

// The logits that a kernel reads. apart: few classes may have any stride.
enum class Values { absent, dense, apart };

// Arguments in the form that the kernels take. Keeps the memory of converted ones.
class Problem : public cpu::Problem {
 public:
  // No target: class probabilities, or a kernel that reads no target.
  Problem(const Tensor& logits, const MaybeTensor& target, const MaybeTensor& weight, const RowOptions& options,
          Values values = Values::dense);

  void check_targets(int64_t num_classes) const;

 private:
  std::optional<Read> logits_;
  MaybeTensor target_;
  MaybeTensor weight_;
};

// The upstream gradients of each row, in the accumulator's dtype.
class Upstream : public cpu::Upstream {
 public:
  Upstream(const Tensor& logits, const Tensor& grad_loss, const MaybeTensor& grad_lse,
           const MaybeTensor& grad_entropy = std::nullopt, const MaybeTensor& divisor = std::nullopt,
           double lse_square_scale = 0.0);

 private:
  PerRow loss_;
  PerRow lse_;
  PerRow entropy_;
  MaybeTensor divisor_;
};

// torch's intra-op threads, as set by torch.set_num_threads, at::set_num_threads or OMP_NUM_THREADS.
// Float32 arithmetic of float32 and bfloat16 logits flushes subnormal numbers to 0. With a softcap it does not, because
// the softcap's reciprocal may be subnormal.
cpu::Threads threads(const Tensor& logits, const std::optional<double>& softcap);

}  // namespace xent::tensors
