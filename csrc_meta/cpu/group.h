// Rows of few classes, side by side: visit of rows.h for them. Not part of the interface.
#pragma once

#include <type_traits>

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
void set(GroupGradient<A>& group, std::int64_t r, const GradientCoefficients<A>& row, char* to) {
  group.lse[r] = row.gradient.lse;
  group.total[r] = row.gradient.total;
  group.grad_entropy[r] = row.gradient.grad_entropy;
  group.entropy[r] = row.gradient.entropy;
  group.factor[r] = row.gradient.factor;
  group.at_target[r] = A(row.at_target);
  group.column[r] = A(row.column);
  group.live[r] = row.live;
  group.has_entropy |= row.gradient.grad_entropy != 0;
  group.to[r] = to;
}

// Of `number` rows, which row_of names: join(row, sums), and where that returns GradientCoefficients the gradient. scan and
// grad may be null.
template <class A, class RowOf, class Join>
void visit_groups(const Problem& problem, std::int64_t number, RowOf row_of, const Scan<A>* scan,
                  const MutableRows* grad, const Threads& threads, Join join) {
  const std::int64_t lanes = blocks<A>().lanes, classes = problem.classes;
  for_each(threads, (number + lanes - 1) / lanes, lanes * classes, [&](std::int64_t i) {
    Group<A> group;
    group.rows = std::min(lanes, number - i * lanes);
    group.classes = classes;
    group.class_stride = problem.logits.class_stride;
    group.scale = A(problem.logit_scale);
    group.softcap = A(problem.softcap.value_or(0.0));
    for (std::int64_t r = 0; r < group.rows; ++r) {
      group.from[r] = at(problem.logits, problem.dtype, row_of(i * lanes + r), 0);
    }
    GroupSums<A> sums;
    if (scan != nullptr) scan->group(group, sums);
    GroupGradient<A> gradient;
    for (std::int64_t r = 0; r < group.rows; ++r) {
      const std::int64_t row = row_of(i * lanes + r);
      const Sums of_row = scan == nullptr ? Sums() : scan->complete(row, sums_of(sums, r));
      const auto joined = join(row, of_row);
      if constexpr (!std::is_same_v<decltype(joined), const Nothing>) {
        set(gradient, r, joined, at(*grad, problem.dtype, row, 0));
      }
    }
    if (grad != nullptr) {
      gradient.q = weights_from<A>(problem, 0);
      blocks<A>().gradient_of_group(problem.dtype, group, gradient);
    }
  });
}

// As visit. order: the rows, `number` of them; null for all rows of the problem.
template <class A, class Join>
void visit_rows(const Problem& problem, const std::vector<std::int64_t>* order, const Scan<A>* scan,
                const MutableRows* grad, const Threads& threads, Join join) {
  typedef decltype(join(std::int64_t(), Sums())) Joined;
  const std::int64_t number = order == nullptr ? problem.rows : std::int64_t(order->size());
  const auto row_of = [=](std::int64_t i) { return order == nullptr ? i : (*order)[i]; };
  if (problem.classes <= kFewClasses) return visit_groups(problem, number, row_of, scan, grad, threads, join);
  const auto scan_row = [&](std::int64_t i, std::int64_t column, std::int64_t n) {
    return (*scan)(row_of(i), column, n);
  };
  const auto join_row = [&](std::int64_t i, const Sums& sums) { return join(row_of(i), sums); };
  const auto write = [&](std::int64_t i, const Joined& joined, std::int64_t column, std::int64_t n) {
    if constexpr (!std::is_same_v<Joined, Nothing>) {
      emit(problem, *grad, row_of(i), joined, column, n, weights_from<A>(problem, column));
    }
  };
  visit<Joined>(number, problem.classes, threads, scan != nullptr, grad != nullptr, scan_row, join_row, write);
}

}  // namespace xent::cpu
