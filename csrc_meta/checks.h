// The checks of xent_ops/ops in the same words, for processes without Python. A ValueError or TypeError there
// is a std::invalid_argument here.
#pragma once

#include "distilled.h"
#include "stack.h"

#include <cstdint>
#include <string>
#include <vector>

namespace xent {

namespace checks {

void index_forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, const Options& options);

void soft_forward(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, const Options& options);

// least: the smallest probability of the rows that add up to less than 0, or 0.
void soft_values(double least);

void shard(const Tensor& logits, const Tensor& target, const cpu::Slice& place, const MaybeTensor& weight,
           const Options& options);

// part: the result of one rank, 1-d.
void shard_gathered(const Tensor& gathered, const Tensor& part);

// What a backward gets for a slice of the classes alone.
void slice_of(int64_t class_start, const std::optional<int64_t>& num_classes, const MaybeTensor& weight,
              const MaybeTensor& coefficient);

void with_entropy(const char* owner, const Tensor& matrix, const MaybeTensor& grad_entropy, const MaybeTensor& entropy);

// One floating-point value for each row of the matrix.
void row_values(const char* name, const MaybeTensor& tensor, const Tensor& matrix, const char* owner = "logits");

// Two numbers, of any of the dtypes that a count may have.
void divisor(const MaybeTensor& tensor, const Tensor& logits);

// One floating-point value of shape (), or one for each row of the matrix.
void scalar_or_row_values(const char* owner, const Tensor& matrix, const char* name, const MaybeTensor& tensor);

void scale_grad(const Tensor& grad, const Tensor& factor);

// A gradient of 16 bits of float32 logits.
void narrower(std::optional<ScalarType> grad_dtype, const Tensor& logits);

// Of xent_ops/ops/distillation_checks.py. A class_start: both are a slice of the classes.
void distillation(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
                  std::optional<int64_t> class_start, const Distilled& how);
void distillation_options(const Distilled& how, const Tensor& student, const Tensor& teacher);
void distillation_heads(const Tensor& input, const Tensor& linear_weight, const MaybeTensor& linear_bias,
                        const Tensor& target, const Tensor& teacher_input, const Tensor& teacher_weight,
                        const MaybeTensor& teacher_bias, const Distilled& how,
                        std::optional<ScalarType> accumulate_dtype);
void joined(const MaybeTensor& tensor, std::optional<int64_t> class_start, const Distilled& how, const Tensor& target,
            const Tensor& logits);
void distillation_statistics(const char* name, const Tensor& tensor, const Tensor& target, const Tensor& logits);

// Of xent_ops/ops/linear/checks.py.
struct HeadNames {
  const char* input = "input";
  const char* weight = "linear_weight";
  const char* bias = "linear_bias";
};
void head(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
          std::optional<ScalarType> accumulate_dtype, const HeadNames& names);
void chunk_rows(std::optional<int64_t> number);
void target_of_head(const Tensor& input, const Tensor& target, const std::string& hint = "");
void linear(const Tensor& input, const Tensor& linear_weight, const Tensor& target, const MaybeTensor& linear_bias,
            const MaybeTensor& weight, const Options& options, std::optional<ScalarType> accumulate_dtype,
            std::optional<int64_t> chunk_rows, std::optional<ScalarType> logits_dtype,
            const std::optional<std::string>& products);

void output_mask(const std::vector<bool>& mask);

// What a sum is divided by.
void sum_divisor(const MaybeTensor& tensor, const Tensor& input, const std::string& reduction);
void token_weight(const MaybeTensor& tensor, const Tensor& target);

// Reads the strides, so not for meta tensors.
void writable(const char* name, const Tensor& tensor);

void reduction(const std::string& value);

// For operators with a reduced result.
void reduction_to_one(const std::string& value);

void lse_square_scale(double value, const Tensor& logits);

// The values of int64 targets: std::out_of_range for one outside [0, num_classes) that is not ignore_index.
void target_values(const Tensor& target, int64_t num_classes, int64_t ignore_index);

}  // namespace checks
}  // namespace xent
