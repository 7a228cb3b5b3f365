// A student and its teacher. The formulas: xent_ops/kernels/reference_divergences.py.

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {
namespace {

template <class A>
constexpr A kLowest = std::numeric_limits<A>::lowest();

Problem divided(Problem problem, double temperature) {
  if (problem.softcap) problem.softcap = *problem.softcap / temperature;
  problem.logit_scale /= temperature;
  return problem;
}

// Adds the totals of the next columns.
template <class A>
void fold(PairTotals& totals, PairTotals next) {
  const double pivot = std::max(totals.pivot, next.pivot);
  const double teacher_pivot = std::max(totals.teacher_pivot, next.teacher_pivot);
  for (PairTotals* part : {&totals, &next}) {
    const double moved = part->pivot - pivot, teacher_moved = part->teacher_pivot - teacher_pivot;
    const double total = part->total, teacher_total = part->teacher_total;
    const double decay = std::exp(moved), teacher_decay = std::exp(teacher_moved);
    part->total *= decay;
    part->teacher_total *= teacher_decay;
    // A class that the other masks makes it infinite, unless the probability of these classes underflows.
    part->kl = A(part->teacher_total) == 0 ? 0 : teacher_decay * (part->kl + teacher_total * (teacher_moved - moved));
    part->reverse_kl = A(part->total) == 0 ? 0 : decay * (part->reverse_kl + total * (moved - teacher_moved));
  }
  totals = {pivot, teacher_pivot, totals.total + next.total, totals.teacher_total + next.teacher_total,
            totals.kl + next.kl, totals.reverse_kl + next.reverse_kl};
}

// The statistics, in their order.
template <class A>
constexpr A Divergence<A>::* kStatistic[] = {
    &Divergence<A>::lse,         &Divergence<A>::teacher_lse, &Divergence<A>::reverse_kl,  &Divergence<A>::student_kl,
    &Divergence<A>::lower_mass,  &Divergence<A>::hard_lse,    &Divergence<A>::overlap_lse, &Divergence<A>::low,
    &Divergence<A>::teacher_low, &Divergence<A>::hard_low,    &Divergence<A>::overlap_low};

template <class A>
class Pair {
 public:
  explicit Pair(const Divergences& divergences)
      : spec(divergences),
        hard(without_padding(divergences.student, divergences.slice)),
        student(divided(hard, divergences.temperature)),
        teacher(divided(without_padding(divergences.teacher, divergences.slice), divergences.temperature)),
        functions(blocks<A>(student.dtype)) {}

  Target target(std::int64_t row) const { return target_of(hard, spec.slice, row); }

  // All that the forward returns of a counted row. joined: from the statistics of all classes, a slice's part.
  Divergence<A> forward(std::int64_t row, const A* teacher_lse, const A* joined, double* values) const {
    Divergence<A> state = joined == nullptr ? with_lses(row, teacher_lse, values) : saved(joined, row);
    const bool mixture = spec.reads[kMixture], overlap = spec.reads[kOverlap];
    DivergenceSums sums;
    if ((mixture || overlap) && (spec.all_classes || joined != nullptr)) {
      each_block(row, [&](std::int64_t, const PairBlock<A>& block) {
        functions.divergences(state, mixture, overlap, block, sums);
      });
    }
    values[kMixture] = spec.beta * sums.teacher_kl + (1 - spec.beta) * sums.student_kl;
    values[kOverlap] = sums.overlap;
    state.reverse_kl = A(values[kReverseKl]);
    state.student_kl = A(sums.student_kl);
    state.lower_mass = A(sums.lower_mass);
    return state;
  }

  // From the statistics of all classes.
  Divergence<A> saved(const A* statistics, std::int64_t row) const {
    Divergence<A> state = constants();
    for (int i = 0; i < kStatistics; ++i) state.*kStatistic<A>[i] = statistics[i * student.rows + row];
    return state;
  }

  void backward(std::int64_t row, Divergence<A>& state, const MutableRows& grad) const {
    const Target t = target(row);
    A& of_log_prob = state.coefficients[kLogProb];
    bool live = false;
    for (const A coefficient : state.coefficients) live |= coefficient != 0;
    if (!live) return zero_from(grad, row, 0);
    if (of_log_prob != 0 && !t.valid) of_log_prob = A(kNaN);
    each_block(row, [&](std::int64_t column, PairBlock<A> block) {
      char* to = at(grad, student.dtype, row, column);
      functions.divergence_gradient(state, block, to);
      const std::int64_t hot = t.column - column;
      if (of_log_prob == 0 || t.column < 0 || hot < 0 || hot >= block.n) return;
      block.x += hot, block.y += hot, block.n = 1;
      Divergence<A> one = state;
      one.hot = 1;
      functions.divergence_gradient(one, block, to + hot * size_of(student.dtype));
    });
    zero_from(grad, row, student.classes);
  }

  void zero_from(const MutableRows& grad, std::int64_t row, std::int64_t column) const {
    zero(student.dtype, grad, row, column, spec.student.classes);
  }

  const Divergences& spec;
  const Problem hard, student, teacher;  // without padding; hard: at a temperature of one

 private:
  // Visits both once: the lse's of a row, and the values that need no lse of all classes.
  Divergence<A> with_lses(std::int64_t row, const A* teacher_lse, double* values) const {
    const bool kl = spec.reads[kKl], reverse_kl = spec.reads[kReverseKl], log_prob = spec.reads[kLogProb];
    const bool other_lse = log_prob && spec.temperature != 1;
    const Scan<A> scan_hard{hard};
    PairTotals totals{kLowest<A>, kLowest<A>};
    Sums hard_sums;
    each_block(row, [&](std::int64_t column, const PairBlock<A>& block) {
      fold<A>(totals, functions.pair_totals(block, kl, reverse_kl));
      if (other_lse) cpu::fold(hard_sums, scan_hard(row, column, block.n));
    });
    if (!other_lse) hard_sums.maximum = totals.pivot, hard_sums.total = totals.total;
    const double log_total = std::log(totals.total), teacher_log_total = std::log(totals.teacher_total);
    const double hard_log_total = std::log(hard_sums.total), ratio = log_total - teacher_log_total;
    Divergence<A> state = constants();
    const auto split = [](A& lse, A& low, double pivot, double log_sum) {
      lse = A(pivot + log_sum);
      low = A(lse_low(lse, pivot, log_sum));
    };
    split(state.lse, state.low, totals.pivot, log_total);
    split(state.teacher_lse, state.teacher_low, totals.teacher_pivot, teacher_log_total);
    split(state.hard_lse, state.hard_low, hard_sums.pivot(), hard_log_total);
    state.overlap_lse = teacher_lse == nullptr ? state.teacher_lse : teacher_lse[row];
    state.overlap_low = teacher_lse == nullptr ? state.teacher_low : teacher_lse[student.rows + row];
    if (kl && student.classes > 0) values[kKl] = totals.kl / totals.teacher_total + ratio;
    if (reverse_kl && student.classes > 0) values[kReverseKl] = totals.reverse_kl / totals.total - ratio;
    if (log_prob && spec.all_classes) {
      const Target t = target(row);
      // Relative to the maximum: x_t - lse would lose digits if both are large.
      values[kLogProb] = t.valid ? activated<A>(hard, row, t.column) - hard_sums.pivot() - hard_log_total : kNaN;
    }
    return state;
  }

  // Returns the pivot.
  static A read(const Problem& problem, const char* from, std::int64_t n, A* x) {
    const Blocks<A>& functions = blocks<A>(problem.dtype);
    A maximum = functions.load(from, n, A(problem.logit_scale), x);
    if (problem.softcap) {
      functions.cap(x, n, A(*problem.softcap));
      functions.cap(&maximum, 1, A(*problem.softcap));
    }
    return std::max(maximum, kLowest<A>);
  }

  template <class Body>
  void each_block(std::int64_t row, Body body) const {
    const std::int64_t size = size_of(student.dtype), teacher_size = size_of(teacher.dtype);
    for (std::int64_t column = 0; column < student.classes; column += kBlock) {
      const std::int64_t n = std::min(kBlock, student.classes - column);
      const char* from = at(student.logits, student.dtype, row, column);
      const char* teacher_from = at(teacher.logits, teacher.dtype, row, column);
      alignas(64) A x[kBlock], y[kBlock];
      const A pivot = read(student, from, n, x), teacher_pivot = read(teacher, teacher_from, n, y);
      body(column, PairBlock<A>{x, y, n, pivot, teacher_pivot, {from + n * size, teacher_from + n * teacher_size},
                                {size, teacher_size}});
    }
  }

  Divergence<A> constants() const {
    Divergence<A> state = {};
    state.share = A(1 - spec.beta);
    state.log_share = A(std::log1p(-spec.beta));
    state.log_teacher_share = A(std::log(spec.beta));
    state.scale = A(student.logit_scale);
    state.softcap = A(student.softcap.value_or(0.0));
    state.temperature = A(spec.temperature);
    return state;
  }

  const Blocks<A>& functions;
};

}  // namespace

void divergences_forward(const Divergences& spec, Numbers teacher_lse, Numbers joined, MutableNumbers values,
                         MutableNumbers statistics, const Threads& threads) {
  dispatch(spec.student, [&]<class A>(A) {
    const Pair<A> pair(spec);
    const std::int64_t rows = pair.student.rows;
    for_each(threads, rows, spec.student.classes, [&](std::int64_t row) {
      Divergence<A> state = {};
      double of_row[kFields] = {};
      if (pair.target(row).counted) state = pair.forward(row, teacher_lse, joined, of_row);
      for (int i = 0; i < kFields; ++i) values.at<A>(i * rows + row) = A(of_row[i]);
      for (int i = 0; i < kStatistics; ++i) statistics.at<A>(i * rows + row) = state.*kStatistic<A>[i];
    });
  });
}

void divergences_backward(const Divergences& spec, Numbers grad_values, Numbers statistics, MutableRows grad,
                          const Threads& threads) {
  prefer_huge_pages(spec.student, grad);
  dispatch(spec.student, [&]<class A>(A) {
    const Pair<A> pair(spec);
    const A* const upstream = grad_values;
    for_each(threads, pair.student.rows, spec.student.classes, [&](std::int64_t row) {
      Divergence<A> state = pair.saved(statistics, row);
      for (int i = 0; i < kFields && pair.target(row).counted; ++i) {
        if (spec.reads[i]) state.coefficients[i] = upstream[i * pair.student.rows + row];
      }
      pair.backward(row, state, grad);
    });
  });
}

void divergences_with_grad(const Divergences& spec, double hard_weight, PerRow grad_scale, MutableNumbers loss,
                           MutableRows grad, const Threads& threads) {
  prefer_huge_pages(spec.student, grad);
  dispatch(spec.student, [&]<class A>(A) {
    const Pair<A> pair(spec);
    for_each(threads, pair.student.rows, spec.student.classes, [&](std::int64_t row) {
      Divergence<A> state = {};
      double of_row[kFields] = {}, total = 0;
      if (pair.target(row).counted) {
        state = pair.forward(row, nullptr, nullptr, of_row);
        for (int i = 0; i < kFields; ++i) {
          if (!spec.reads[i]) continue;
          const double weight = i == kLogProb ? -hard_weight : 1;
          total += weight * of_row[i];
          state.coefficients[i] = A(weight * value<A>(grad_scale, row));
        }
      }
      loss.at<A>(row) = A(total);
      pair.backward(row, state, grad);
    });
  });
}

}  // namespace xent::cpu
