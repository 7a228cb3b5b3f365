// Rows of few classes, side by side: visit of rows.h for them. Not part of the interface.
#pragma once

#include "scan.h"

namespace xent::cpu {

// The Sums of row r of a group, without mass.
template <class A>
Sums sums_of(const GroupSums<A>& group, std::int64_t r) {
  Sums sums;
  sums.maximum = group.maximum[r];
  sums.total = group.total[r];
  sums.moment = group.moment[r];
  sums.distance = group.distance[r];
  sums.top = group.top[r];
  sums.first = std::int64_t(group.first[r]);
  return sums;
}

template <class A>
void set(GroupGradient<A>& group, std::int64_t r, const Gradient<A>& row, char* to) {
  group.lse[r] = row.lse;
  group.total[r] = row.total;
  group.grad_entropy[r] = row.grad_entropy;
  group.entropy[r] = row.entropy;
  group.factor[r] = row.factor;
  group.at_target[r] = row.at_target;
  group.column[r] = A(row.column);
  group.live[r] = row.live;
  group.has_entropy |= row.grad_entropy != 0;
  group.to[r] = to;
}

// As visit: scan may be nullptr. Writes the gradient if join returns one.
template <class A, class Scan, class Join>
void visit_groups(const Problem& problem, Order order, const Scan& scan, const MutableRows* grad,
                  const Threads& threads, const Join& join) {
  constexpr bool scans = !std::is_null_pointer_v<Scan>;
  const Blocks<A>& functions = blocks<A>(problem.dtype);
  const std::int64_t lanes = functions.lanes, classes = problem.classes;
  for_each(threads, (order.number + lanes - 1) / lanes, lanes * classes, [&](std::int64_t i) {
    Group<A> group;
    group.rows = std::min(lanes, order.number - i * lanes);
    group.classes = classes;
    group.class_stride = problem.logits.class_stride;
    group.scale = A(problem.logit_scale);
    group.softcap = A(problem.softcap.value_or(0.0));
    for (std::int64_t r = 0; r < group.rows; ++r) {
      group.from[r] = at(problem.logits, problem.dtype, order[i * lanes + r], 0);
    }
    GroupSums<A> sums;
    if constexpr (scans) scan.group(group, sums);
    GroupGradient<A> gradient;
    for (std::int64_t r = 0; r < group.rows; ++r) {
      const std::int64_t row = order[i * lanes + r];
      Sums sums_of_row;
      if constexpr (scans) sums_of_row = scan.complete(row, sums_of(sums, r));
      const auto joined = join(row, sums_of_row);
      if constexpr (!std::is_same_v<decltype(joined), const Nothing>) {
        set(gradient, r, joined, at(*grad, problem.dtype, row, 0));
      }
    }
    if (grad != nullptr) {
      gradient.q = weights_from<A>(problem, 0);
      functions.gradient_of_group(group, gradient);
    }
  });
}

// As visit, for class indices. grad is null if join returns Nothing. A gradient of dense rows of three vectors or more
// is computed row by row, because a group packs them: 5376 x 64 float32, one thread, AVX-512: 0.38 ms, not 0.54.
template <class A, class Scan, class Join>
void visit_rows(const Problem& problem, Order order, const Scan& scan, const MutableRows* grad, const Threads& threads,
                const Join& join) {
  const bool by_row = std::is_null_pointer_v<Scan> && problem.logits.class_stride == 1 &&
                      problem.classes >= 3 * blocks<A>(problem.dtype).lanes;
  if (problem.classes <= kFewClasses && !by_row) {
    return visit_groups<A>(problem, order, scan, grad, threads, join);
  }
  if constexpr (std::is_same_v<decltype(join(std::int64_t(), Sums())), Nothing>) {
    visit(order, problem.classes, threads, scan, join, nullptr);
  } else {
    visit(order, problem.classes, threads, scan, join,
          [&](std::int64_t row, const auto& joined, std::int64_t column, std::int64_t n) {
            emit(problem, *grad, row, joined, column, n, weights_from<A>(problem, column));
          });
  }
}

}  // namespace xent::cpu
