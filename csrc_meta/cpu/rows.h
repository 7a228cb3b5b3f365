// Shared by the operators: rows from blocks, threads over rows. Not part of the interface.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "blocks.h"

namespace xent::cpu {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Calls body with a value of the accumulator's type.
template <class Body>
auto dispatch(const Problem& problem, const Body& body) {
  return accumulates_in_double(problem.dtype) ? body(double()) : body(float());
}

struct Nothing {};  // joined, if there is no second visit

// The sums of a block, of several blocks, or of a row, relative to the pivot: the maximum, or 0 if that is -inf.
struct Sums {
  double maximum = -kInfinity;   // of x
  double total = 0;              // sum_j exp(x_j - pivot)
  double moment = 0;             // sum_j exp(x_j - pivot) (x_j - pivot)
  double distance = 0;           // sum_j q_j (pivot - x_j), where q_j are class weights or weighted probabilities
  double mass = 0;               // sum_j q_j
  double top = -kInfinity;       // the largest z_j; NaN if there is one. Two z_j may have the same x_j: softcap rounds
  std::int64_t first = 0;        // the first column that holds it

  double pivot() const { return maximum == -kInfinity ? 0 : maximum; }
};

// Adds `next` to `sums`, the sums of the columns before it. Always from left to right, so the bits do not depend on the
// threads.
inline void fold(Sums& sums, Sums next) {
  const double maximum = std::max(sums.maximum, next.maximum);
  for (Sums* part : {&sums, &next}) {
    const double before = part->pivot();
    part->maximum = maximum;
    const double moved = before - part->pivot();
    if (moved == 0) continue;
    if (part->total != 0) {
      const double decay = std::exp(moved);
      part->moment = decay * (part->moment + moved * part->total);
      part->total *= decay;
    }
    part->distance -= moved * part->mass;
  }
  sums.total += next.total;
  sums.moment += next.moment;
  sums.distance += next.distance;
  sums.mass += next.mass;
  if (next.top > sums.top || (std::isnan(next.top) && !std::isnan(sums.top))) {
    sums.top = next.top;
    sums.first = next.first;
  }
}

inline std::int64_t number_of_blocks(std::int64_t classes) { return (classes + kBlock - 1) / kBlock; }

inline std::int64_t size_of(DType dtype) {
  return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2;
}

// The address of an element of a row; Byte is char or const char.
template <class Byte, class Void>
Byte* element(const RowsOf<Void>& rows, DType dtype, std::int64_t row, std::int64_t column) {
  std::int64_t outer = 0, inner = row;
  if (row >= rows.inner) outer = row / rows.inner, inner = row % rows.inner;
  const std::int64_t offset = outer * rows.outer_stride + inner * rows.stride + column * rows.class_stride;
  return static_cast<Byte*>(rows.data) + offset * size_of(dtype);
}

inline const char* at(const Rows& rows, DType dtype, std::int64_t row, std::int64_t column) {
  return element<const char>(rows, dtype, row, column);
}

inline char* at(const MutableRows& rows, DType dtype, std::int64_t row, std::int64_t column) {
  return element<char>(rows, dtype, row, column);
}

// Writes zeros to the columns [begin, end) of a row.
inline void zero(DType dtype, const MutableRows& grad, std::int64_t row, std::int64_t begin, std::int64_t end) {
  if (begin < end) std::memset(at(grad, dtype, row, begin), 0, (end - begin) * size_of(dtype));
}

template <class A>
double value(PerRow values, std::int64_t row) {
  return values.data == nullptr ? 0.0 : double(static_cast<const A*>(values.data)[row * values.stride]);
}

// What rounding an lse to the accumulator's dtype took (reference.split_lse). 0 if the lse is not finite.
inline double lse_low(double lse, double pivot, double log_total) {
  const double low = log_total - (lse - pivot);
  return std::isfinite(low) ? low : 0;
}

// The gradients of a row's loss and lse, from the gradients of a reduced loss (reference.row_grads). Each is rounded to
// the accumulator's dtype, as a tensor would be.
struct RowGrads {
  double loss, lse;
};

template <class A>
RowGrads row_grads(const Upstream& upstream, std::int64_t row, bool counted, double lse) {
  double grad_loss = value<A>(upstream.loss, row), per_row = grad_loss, grad_lse = value<A>(upstream.lse, row);
  if (const A* divisor = upstream.divisor) {
    grad_loss = A(grad_loss / divisor[0]);
    per_row = A(per_row / divisor[1]);
  }
  if (upstream.lse_square_scale != 0 && counted) {  // without a counted row, per_row is infinite
    grad_lse = A(grad_lse + 2 * upstream.lse_square_scale * per_row * lse);
  }
  return {grad_loss, grad_lse};
}

// Call it before a new gradient is written: forward and backward of 1024 x 32000 float32, every page of the gradient
// new, took 53 ms of processor time with it and 81 without (2 cores, AVX-512, 2026-11).
void prefer_huge_pages(const Problem& problem, const MutableRows& grad);

// Runs body(i) for every i of [0, number), where one costs about `cost` elements.
template <class Body>
void for_each(const Threads& threads, std::int64_t number, std::int64_t cost, Body body) {
  const std::int64_t grain = std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, cost));
  threads.loop(0, number, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) body(i);
  });
}

// The rows to visit: all, or those that are listed.
struct Order {
  std::int64_t number;
  const std::int64_t* rows = nullptr;

  std::int64_t operator[](std::int64_t i) const { return rows == nullptr ? i : rows[i]; }
};

// Visits every row: `scan(row, column, n)` returns the Sums of each block, `join(row, sums)` the coefficients for the
// second visit, and `emit(row, joined, column, n)` is called for each block again. Without a first or a second visit,
// scan or emit is nullptr. If there are enough rows, a thread takes a whole row, and the second visit finds it in the
// cache. If there are few, threads share a row.
template <class Scan, class Join, class Emit>
void visit(Order order, std::int64_t classes, const Threads& threads, const Scan& scan, const Join& join,
           const Emit& emit) {
  typedef decltype(join(std::int64_t(), Sums())) Joined;
  constexpr bool scans = !std::is_null_pointer_v<Scan>, emits = !std::is_null_pointer_v<Emit>;
  const std::int64_t blocks = number_of_blocks(classes);
  const auto size = [=](std::int64_t block) { return std::min(kBlock, classes - block * kBlock); };
  const auto scan_block = [&](std::int64_t row, std::int64_t block) {
    if constexpr (scans) return scan(row, block * kBlock, size(block));
    return Sums();
  };
  const auto emit_block = [&](std::int64_t row, const Joined& joined, std::int64_t block) {
    if constexpr (emits) emit(row, joined, block * kBlock, size(block));
  };
  if (blocks <= 1 || order.number >= 4 * threads.number) {
    for_each(threads, order.number, classes, [&](std::int64_t i) {
      const std::int64_t row = order[i];
      Sums sums;
      for (std::int64_t block = 0; scans && block < blocks; ++block) fold(sums, scan_block(row, block));
      const Joined joined = join(row, sums);
      for (std::int64_t block = 0; emits && block < blocks; ++block) emit_block(row, joined, block);
    });
    return;
  }
  std::vector<Sums> parts(scans ? order.number * blocks : 0);
  std::vector<Joined> joined(order.number);
  for_each(threads, std::int64_t(parts.size()), kBlock, [&](std::int64_t i) {
    parts[i] = scan_block(order[i / blocks], i % blocks);
  });
  for (std::int64_t i = 0; i < order.number; ++i) {
    Sums sums;
    for (std::int64_t block = 0; scans && block < blocks; ++block) fold(sums, parts[i * blocks + block]);
    joined[i] = join(order[i], sums);
  }
  for_each(threads, emits ? order.number * blocks : 0, kBlock, [&](std::int64_t i) {
    emit_block(order[i / blocks], joined[i / blocks], i % blocks);
  });
}

}  // namespace xent::cpu
