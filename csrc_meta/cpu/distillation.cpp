// A student and its teacher. The formulas: xent_ops/kernels/reference_distillation.py.

#include <cstring>

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
  explicit Distiller(const Distillation& given)
      : how(given),
        hard(without_padding(given.student, given.slice)),
        student(divided(hard, given.temperature)),
        teacher(divided(without_padding(given.teacher, given.slice), given.temperature)),
        middle(middle_of(given.beta)),
        other_lse_(given.hard_weight != 0 && given.temperature != 1) {}

  Target target(std::int64_t row) const { return target_of(hard, how.slice, row); }

  // The lse's of a row, from one visit of both.
  Divergence<A> read_lse(std::int64_t row) const {
    const Scan<A> of_student{student}, of_teacher{teacher}, of_hard{hard};
    Sums sums, teacher_sums, hard_sums;
    each_block([&](std::int64_t column, std::int64_t n) {
      fold(sums, of_student(row, column, n));
      fold(teacher_sums, of_teacher(row, column, n));
      if (other_lse_) fold(hard_sums, of_hard(row, column, n));
    });
    return with_lse(lse_of(sums), lse_of(teacher_sums), lse_of(other_lse_ ? hard_sums : sums));
  }

  // From those of all classes: student, teacher, KL(s || m), hard.
  Divergence<A> given_lse(const A* statistics, std::int64_t row) const {
    const auto at_row = [&](std::int64_t which) { return statistics[which * student.rows + row]; };
    Divergence<A> made = with_lse({at_row(0), 0}, {at_row(1), 0}, {at_row(other_lse_ ? 3 : 0), 0});
    made.of_student = at_row(2);
    return made;
  }

  // Another visit of both, which also writes `factor` times the gradient where `grad` is given.
  DivergenceSums visit_again(
      std::int64_t row, Divergence<A> made, const MutableRows* grad = nullptr, double factor = 0) const {
    const Target place = target(row);
    made.factor = A(factor);
    if (how.hard_weight != 0) made.hard_weight = A(place.valid ? how.hard_weight : kNaN);
    DivergenceSums sums;
    each_block([&](std::int64_t column, std::int64_t n) {
      alignas(64) A x[kBlock], y[kBlock];
      read(student, row, column, n, x);
      read(teacher, row, column, n, y);
      char* to = grad == nullptr ? nullptr : at(*grad, student.dtype, row, column);
      const DivergenceSums part = blocks<A>().divergence(student.dtype, made, x, y, to, n);
      sums.of_student += part.of_student;
      sums.of_teacher += part.of_teacher;
      const std::int64_t hot = place.column - column;
      if (to != nullptr && how.hard_weight != 0 && place.column >= 0 && hot >= 0 && hot < n) {
        Divergence<A> one = made;
        one.hot = 1;
        blocks<A>().divergence(student.dtype, one, x + hot, y + hot, to + hot * size_of(student.dtype), 1);
      }
    });
    if (grad != nullptr) zero(*grad, row, student.classes);
    return sums;
  }

  double divergence(const DivergenceSums& sums) const {
    if (middle == Middle::student) return sums.of_teacher;
    if (middle == Middle::teacher) return sums.of_student;
    return how.beta * sums.of_teacher + (1 - how.beta) * sums.of_student;
  }

  // What the cross entropy on the target adds to the loss. Reads the logits, so before the gradient is over them.
  double hard_loss(std::int64_t row, const Divergence<A>& made) const {
    if (!how.whole || how.hard_weight == 0) return 0;
    const Target place = target(row);
    if (!place.valid) return kNaN;
    // Relative to the maximum: lse - x_t would lose digits where both are large.
    const double of_target = double(made.hard_lse.pivot) - activated<A>(hard, row, place.column);
    return how.hard_weight * (of_target + double(made.hard_lse.log_total));
  }

  // Zeros from a column on.
  void zero(const MutableRows& grad, std::int64_t row, std::int64_t from) const {
    const std::int64_t columns = how.student.classes - from;
    if (columns > 0) std::memset(at(grad, student.dtype, row, from), 0, columns * size_of(student.dtype));
  }

  const Distillation& how;
  const Problem hard, student, teacher;  // without padding; hard: at a temperature of one
  const Middle middle;

 private:
  static Lse<A> lse_of(const Sums& sums) { return {A(sums.pivot()), A(std::log(sums.total))}; }

  static void read(const Problem& problem, std::int64_t row, std::int64_t column, std::int64_t n, A* x) {
    blocks<A>().load(problem.dtype, at(problem.logits, problem.dtype, row, column), n, A(problem.logit_scale), x);
    if (problem.softcap) blocks<A>().cap(x, n, A(*problem.softcap));
  }

  template <class Body>
  void each_block(Body body) const {
    for (std::int64_t column = 0; column < student.classes; column += kBlock) {
      body(column, std::min(kBlock, student.classes - column));
    }
  }

  Divergence<A> with_lse(Lse<A> lse, Lse<A> teacher_lse, Lse<A> hard_lse) const {
    Divergence<A> made = {};
    made.lse = lse;
    made.teacher_lse = teacher_lse;
    made.hard_lse = hard_lse;
    made.middle = middle;
    made.share = A(1 - how.beta);
    made.log_share = A(std::log1p(-how.beta));
    made.log_teacher_share = A(std::log(how.beta));
    made.scale = A(student.logit_scale);
    made.softcap = A(student.softcap.value_or(0.0));
    made.temperature = A(how.temperature);
    return made;
  }

  bool other_lse_;  // of the cross entropy
};

template <class A>
A one_number(const Lse<A>& lse) {
  return A(double(lse.pivot) + double(lse.log_total));
}

template <class A>
void forward_as(const Distillation& how, const A* joined, A* loss, A* statistics, const Threads& threads) {
  const Distiller<A> rows(how);
  const std::int64_t number = rows.student.rows;
  for_each(threads, number, how.student.classes, [&](std::int64_t row) {
    Divergence<A> made = {};
    DivergenceSums sums;
    loss[row] = 0;
    if (rows.target(row).counted) {
      made = joined == nullptr ? rows.read_lse(row) : rows.given_lse(joined, row);
      if (how.whole || joined != nullptr || rows.middle != Middle::mixture) sums = rows.visit_again(row, made);
      loss[row] = A(rows.divergence(sums) + rows.hard_loss(row, made));
    }
    const bool wanted = rows.middle != Middle::student;
    const A values[] = {one_number(made.lse), one_number(made.teacher_lse), wanted ? A(sums.of_student) : A(0),
                        one_number(made.hard_lse)};
    for (int i = 0; i < 4; ++i) statistics[i * number + row] = values[i];
  });
}

template <class A>
void backward_as(
    const Distillation& how, PerRow grad_loss, const A* statistics, MutableRows grad, const Threads& threads) {
  prefer_huge_pages(how.student, grad);
  const Distiller<A> rows(how);
  for_each(threads, rows.student.rows, how.student.classes, [&](std::int64_t row) {
    const double factor = rows.target(row).counted ? value<A>(grad_loss, row) : 0;
    if (factor == 0) {
      rows.zero(grad, row, 0);
    } else {
      rows.visit_again(row, rows.given_lse(statistics, row), &grad, factor);
    }
  });
}

template <class A>
void with_grad_as(const Distillation& how, PerRow grad_scale, A* loss, MutableRows grad, const Threads& threads) {
  prefer_huge_pages(how.student, grad);
  const Distiller<A> rows(how);
  for_each(threads, rows.student.rows, how.student.classes, [&](std::int64_t row) {
    loss[row] = 0;
    const double factor = rows.target(row).counted ? value<A>(grad_scale, row) : 0;
    if (rows.target(row).counted) {
      Divergence<A> made = rows.read_lse(row);
      const double of_target = rows.hard_loss(row, made);
      // KL(t || s) has a gradient that wants none of the sums, so one visit gives both.
      const bool at_once = rows.middle == Middle::student && factor != 0;
      const DivergenceSums sums = rows.visit_again(row, made, at_once ? &grad : nullptr, factor);
      loss[row] = A(rows.divergence(sums) + of_target);
      if (at_once) return;
      made.of_student = A(sums.of_student);
      if (factor != 0) rows.visit_again(row, made, &grad, factor);
    }
    if (factor == 0) rows.zero(grad, row, 0);
  });
}

}  // namespace

void distillation_forward(const Distillation& how, Numbers joined, MutableNumbers loss, MutableNumbers statistics,
                          const Threads& threads) {
  return dispatch(how.student, [&](auto a) { return forward_as<decltype(a)>(how, joined, loss, statistics, threads); });
}

void distillation_backward(const Distillation& how, PerRow grad_loss, Numbers statistics, MutableRows grad,
                           const Threads& threads) {
  return dispatch(how.student,
                  [&](auto a) { return backward_as<decltype(a)>(how, grad_loss, statistics, grad, threads); });
}

void distillation_with_grad(const Distillation& how, PerRow grad_scale, MutableNumbers loss, MutableRows grad,
                            const Threads& threads) {
  return dispatch(how.student, [&](auto a) { return with_grad_as<decltype(a)>(how, grad_scale, loss, grad, threads); });
}

}  // namespace xent::cpu
