// Checks that keep a kernel from reading or writing out of bounds: shapes, dtypes, and arguments that contradict each
// other. Only libxent_ops.so uses them. Before a call of the extension, Python has checked more, with longer messages.
#pragma once

#include "operators/options.h"

#include <cstdint>
#include <string>
#include <vector>

namespace xent {

extern const bool CHECKED;  // of library.cpp and python.cpp

#define XENT_CHECK(condition, ...) STD_TORCH_CHECK(!CHECKED || (condition), __VA_ARGS__)

namespace checks {

void index(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, const RowOptions& options);
void soft(const Tensor& logits, const Tensor& probabilities, const MaybeTensor& weight, const RowOptions& options);
void shard(const Tensor& logits, const Tensor& target, const cpu::Slice& place, const MaybeTensor& weight,
           const RowOptions& options);

// One number for each row of the matrix.
void rows(const char* name, const MaybeTensor& tensor, const Tensor& matrix);
// Or one number for all rows.
void scalar_or_rows(const char* name, const MaybeTensor& tensor, const Tensor& matrix);

// Rows without a matrix: one number for each target.
void same_rows(const char* name, const MaybeTensor& tensor, const Tensor& target);
void numbers_of_rows(const char* name, const Tensor& tensor, const Tensor& target);  // floating point
void reduced_rows(const Tensor& target, const MaybeTensor& weight, const MaybeTensor& token_weight,
                  const std::string& reduction);

void scale(const Tensor& grad, const Tensor& factor);

// Arguments of a backward that go together, and the two divisors.
void upstream(const Tensor& matrix, const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& lse,
              const MaybeTensor& divisors, const MaybeTensor& grad_entropy, const MaybeTensor& entropy);
void slice(int64_t class_start, MaybeInt num_classes, const MaybeTensor& weight,
           const MaybeTensor& lse_coefficient);

// With a class_start, both are a slice of the classes.
void divergences(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
                 MaybeInt class_start, const DivergenceOptions& options);
void numbers_of_each_row(const char* name, const MaybeTensor& tensor, const Tensor& target, int number);  // (number, ...)

// Refuses two elements at one address.
void writable(const char* name, const Tensor& tensor);
void reduction(const std::string& value, bool may_be_none);

// Used by both libraries. Throws std::out_of_range for a target outside [0, num_classes) that is not ignore_index.
void target_values(const cpu::Problem& problem, int64_t num_classes);
// least: the smallest probability of the rows whose sum is below 0, or 0.
void soft_values(double least);

}  // namespace checks
}  // namespace xent
