// A student and its teacher. The formulas: xent_ops/kernels/reference_distillation.py.

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {
namespace {

Problem divided(Problem problem, double temperature) {
  if (problem.softcap) problem.softcap = *problem.softcap / temperature;
  problem.logit_scale /= temperature;
  return problem;
}

Middle middle_of(double beta) {
  return beta == 0 ? Middle::student : beta == 1 ? Middle::teacher : Middle::mixture;
}

template <class A>
class Distiller {
 public:
  explicit Distiller(const Distillation& distillation)
      : spec(distillation),
        hard(without_padding(distillation.student, distillation.slice)),
        student(divided(hard, distillation.temperature)),
        teacher(divided(without_padding(distillation.teacher, distillation.slice), distillation.temperature)),
        middle(middle_of(distillation.beta)),
        other_lse_(distillation.hard_weight != 0 && distillation.temperature != 1) {}

  Target target(std::int64_t row) const { return target_of(hard, spec.slice, row); }

  // Visits both once, for the lse's of a row.
  Divergence<A> read_lse(std::int64_t row) const {
    const Scan<A> scan_student{student}, scan_teacher{teacher}, scan_hard{hard};
    Sums sums, teacher_sums, hard_sums;
    each_block([&](std::int64_t column, std::int64_t n) {
      fold(sums, scan_student(row, column, n));
      fold(teacher_sums, scan_teacher(row, column, n));
      if (other_lse_) fold(hard_sums, scan_hard(row, column, n));
    });
    return with_lse(lse_of(sums), lse_of(teacher_sums), lse_of(other_lse_ ? hard_sums : sums));
  }

  // From the joined statistics of all classes: student, teacher, KL(s || m), hard.
  Divergence<A> joined_lse(const A* statistics, std::int64_t row) const {
    const auto at_row = [&](std::int64_t which) { return statistics[which * student.rows + row]; };
    Divergence<A> state = with_lse({at_row(0), 0}, {at_row(1), 0}, {at_row(other_lse_ ? 3 : 0), 0});
    state.student_kl = at_row(2);
    return state;
  }

  // Visits both again. If `grad` is not null, also writes `factor` times the gradient to it.
  DivergenceSums visit_again(
      std::int64_t row, Divergence<A> state, const MutableRows* grad = nullptr, double factor = 0) const {
    const Target t = target(row);
    state.factor = A(factor);
    if (spec.hard_weight != 0) state.hard_weight = A(t.valid ? spec.hard_weight : kNaN);
    const Blocks<A>& functions = blocks<A>(student.dtype);
    DivergenceSums sums;
    each_block([&](std::int64_t column, std::int64_t n) {
      alignas(64) A x[kBlock], y[kBlock];
      read(student, row, column, n, x);
      read(teacher, row, column, n, y);
      char* to = grad == nullptr ? nullptr : at(*grad, student.dtype, row, column);
      const DivergenceSums part = functions.divergence(state, x, y, to, n);
      sums.student_kl += part.student_kl;
      sums.teacher_kl += part.teacher_kl;
      const std::int64_t hot = t.column - column;
      if (to != nullptr && spec.hard_weight != 0 && t.column >= 0 && hot >= 0 && hot < n) {
        Divergence<A> one = state;
        one.hot = 1;
        functions.divergence(one, x + hot, y + hot, to + hot * size_of(student.dtype), 1);
      }
    });
    if (grad != nullptr) zero_from(*grad, row, student.classes);
    return sums;
  }

  double divergence(const DivergenceSums& sums) const {
    if (middle == Middle::student) return sums.teacher_kl;
    if (middle == Middle::teacher) return sums.student_kl;
    return spec.beta * sums.teacher_kl + (1 - spec.beta) * sums.student_kl;
  }

  // The weighted cross entropy on the target. Reads the logits: call it before the gradient overwrites them.
  double hard_loss(std::int64_t row, const Divergence<A>& state) const {
    if (!spec.all_classes || spec.hard_weight == 0) return 0;
    const Target t = target(row);
    if (!t.valid) return kNaN;
    // Relative to the maximum: lse - x_t would lose digits if both are large.
    const double target_loss = double(state.hard_lse.pivot) - activated<A>(hard, row, t.column);
    return spec.hard_weight * (target_loss + double(state.hard_lse.log_total));
  }

  void zero_from(const MutableRows& grad, std::int64_t row, std::int64_t column) const {
    zero(student.dtype, grad, row, column, spec.student.classes);
  }

  const Distillation& spec;
  const Problem hard, student, teacher;  // without padding; hard: at a temperature of one
  const Middle middle;

 private:
  static Lse<A> lse_of(const Sums& sums) { return {A(sums.pivot()), A(std::log(sums.total))}; }

  static void read(const Problem& problem, std::int64_t row, std::int64_t column, std::int64_t n, A* x) {
    const Blocks<A>& functions = blocks<A>(problem.dtype);
    functions.load(at(problem.logits, problem.dtype, row, column), n, A(problem.logit_scale), x);
    if (problem.softcap) functions.cap(x, n, A(*problem.softcap));
  }

  template <class Body>
  void each_block(Body body) const {
    for (std::int64_t column = 0; column < student.classes; column += kBlock) {
      body(column, std::min(kBlock, student.classes - column));
    }
  }

  Divergence<A> with_lse(Lse<A> lse, Lse<A> teacher_lse, Lse<A> hard_lse) const {
    Divergence<A> state = {};
    state.lse = lse;
    state.teacher_lse = teacher_lse;
    state.hard_lse = hard_lse;
    state.middle = middle;
    state.share = A(1 - spec.beta);
    state.log_share = A(std::log1p(-spec.beta));
    state.log_teacher_share = A(std::log(spec.beta));
    state.scale = A(student.logit_scale);
    state.softcap = A(student.softcap.value_or(0.0));
    state.temperature = A(spec.temperature);
    return state;
  }

  bool other_lse_;  // of the cross entropy
};

template <class A>
A one_number(const Lse<A>& lse) {
  return A(double(lse.pivot) + double(lse.log_total));
}

}  // namespace

void distillation_forward(const Distillation& spec, Numbers joined, MutableNumbers loss, MutableNumbers statistics,
                          const Threads& threads) {
  dispatch(spec.student, [&]<class A>(A) {
    const Distiller<A> rows(spec);
    const std::int64_t number = rows.student.rows;
    for_each(threads, number, spec.student.classes, [&](std::int64_t row) {
      Divergence<A> state = {};
      DivergenceSums sums;
      loss.at<A>(row) = 0;
      if (rows.target(row).counted) {
        state = joined.data == nullptr ? rows.read_lse(row) : rows.joined_lse(joined, row);
        const bool visits = spec.all_classes || joined.data != nullptr || rows.middle != Middle::mixture;
        if (visits) sums = rows.visit_again(row, state);
        loss.at<A>(row) = A(rows.divergence(sums) + rows.hard_loss(row, state));
      }
      const bool has_kl = rows.middle != Middle::student;
      const A values[] = {one_number(state.lse), one_number(state.teacher_lse), has_kl ? A(sums.student_kl) : A(0),
                          one_number(state.hard_lse)};
      for (int i = 0; i < 4; ++i) statistics.at<A>(i * number + row) = values[i];
    });
  });
}

void distillation_backward(const Distillation& spec, PerRow grad_loss, Numbers statistics, MutableRows grad,
                           const Threads& threads) {
  prefer_huge_pages(spec.student, grad);
  dispatch(spec.student, [&]<class A>(A) {
    const Distiller<A> rows(spec);
    for_each(threads, rows.student.rows, spec.student.classes, [&](std::int64_t row) {
      const double factor = rows.target(row).counted ? value<A>(grad_loss, row) : 0;
      if (factor == 0) return rows.zero_from(grad, row, 0);
      rows.visit_again(row, rows.joined_lse(statistics, row), &grad, factor);
    });
  });
}

void distillation_with_grad(const Distillation& spec, PerRow grad_scale, MutableNumbers loss, MutableRows grad,
                            const Threads& threads) {
  prefer_huge_pages(spec.student, grad);
  dispatch(spec.student, [&]<class A>(A) {
    const Distiller<A> rows(spec);
    for_each(threads, rows.student.rows, spec.student.classes, [&](std::int64_t row) {
      loss.at<A>(row) = 0;
      if (!rows.target(row).counted) return rows.zero_from(grad, row, 0);
      const double factor = value<A>(grad_scale, row);
      Divergence<A> state = rows.read_lse(row);
      const double hard_loss = rows.hard_loss(row, state);
      // The gradient of KL(t || s) needs none of the sums, so one visit gives both.
      const bool at_once = rows.middle == Middle::student && factor != 0;
      const DivergenceSums sums = rows.visit_again(row, state, at_once ? &grad : nullptr, factor);
      loss.at<A>(row) = A(rows.divergence(sums) + hard_loss);
      if (at_once) return;
      if (factor == 0) return rows.zero_from(grad, row, 0);
      state.student_kl = A(sums.student_kl);
      rows.visit_again(row, state, &grad, factor);
    });
  });
}

}  // namespace xent::cpu
