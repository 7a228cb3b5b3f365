// Converts tensors for the kernels of cpu/. Rows are used in place if the kernels can take them, else copied once.
#pragma once

#include "operators/options.h"

namespace xent::tensors {

inline ScalarType accumulator(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

cpu::DType dtype(const Tensor& tensor);

// (..., V) as rows for the kernels. A copy replaces the tensor if they cannot take its strides: the classes are dense,
// unless they are few and may be `apart`, and the rows have one or two strides.
cpu::Rows rows(Tensor& tensor, bool apart = false);
cpu::MutableRows mutable_rows(Tensor& tensor);

// The logits that a kernel reads. apart: few classes may have any stride.
enum class Values { absent, dense, apart };

// Converts arguments for a kernel, and keeps the memory of those that were copied. An absent one is null.
class Arguments {
 public:
  explicit Arguments(const Tensor& logits) : accumulator_(accumulator(logits)) { memory_.reserve(12); }

  cpu::Rows rows(const Tensor& tensor, bool apart = false) {
    return tensors::rows(memory_.emplace_back(tensor), apart);
  }

  // One number a row, in the accumulator's dtype.
  cpu::PerRow per_row(const MaybeTensor& tensor);

  // Contiguous; in the accumulator's dtype, unless another one is named.
  const void* dense(const MaybeTensor& tensor, MaybeDtype dtype = std::nullopt);

  // No target: class probabilities, or a kernel that reads no target.
  cpu::Problem problem(const Tensor& logits, const MaybeTensor& target, const MaybeTensor& weight,
                       const RowOptions& options, Values values = Values::dense);

  // For kernels that reduce rows and read no logits. The classes are those of the weight.
  cpu::Problem rows_only(const Tensor& rows, const Tensor& target, const MaybeTensor& weight, int64_t ignore_index);

 private:
  void set_target(cpu::Problem& problem, const MaybeTensor& target, const MaybeTensor& weight);

  ScalarType accumulator_;
  std::vector<Tensor> memory_;
};

// torch's intra-op threads, as set by torch.set_num_threads, at::set_num_threads or OMP_NUM_THREADS.
// Float32 arithmetic of float32 and bfloat16 logits flushes subnormal numbers to 0. With a softcap it does not, because
// the softcap's reciprocal may be subnormal.
cpu::Threads threads(const Tensor& logits, const std::optional<double>& softcap);

}  // namespace xent::tensors
