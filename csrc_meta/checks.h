// What no kernel survives: shapes and dtypes by which it would read or write elsewhere, arguments that contradict one
// another. Only libxent_ops.so asks; before the extension Python has made its own checks, of more and in more words.
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
// Or one for all.
void scalar_or_rows(const char* name, const MaybeTensor& tensor, const Tensor& matrix);

void scale(const Tensor& grad, const Tensor& factor);

// Of a backward: what goes together, and the two divisors.
void upstream(const Tensor& matrix, const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& lse,
              const MaybeTensor& divisors, const MaybeTensor& grad_entropy, const MaybeTensor& entropy);
void slice(int64_t class_start, MaybeInt num_classes, const MaybeTensor& weight,
           const MaybeTensor& lse_coefficient);

// A class_start: both are a slice of the classes.
void distillation(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
                  MaybeInt class_start, const DistillationOptions& options);
void statistics(const char* name, const MaybeTensor& tensor, const Tensor& target);

// Two elements at one address.
void writable(const char* name, const Tensor& tensor);
void reduction(const std::string& value, bool may_be_none);

// Not only of the library. An int64 target outside [0, num_classes) that is not ignore_index: std::out_of_range.
void target_values(const Tensor& target, int64_t num_classes, int64_t ignore_index);
// least: the smallest probability of the rows that add up to less than 0, or 0.
void soft_values(double least);

}  // namespace checks
}  // namespace xent
