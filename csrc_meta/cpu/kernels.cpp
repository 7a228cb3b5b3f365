// Class indices as targets. The formulas: xent_ops/kernels/reference.py.

#include "kernels.h"

#include "group.h"

#include <limits>

namespace xent::cpu {
namespace {

template <class A>
struct ClassIndices {
  const Problem& problem;
  const Slice slice;
  const A* lse_coefficient;           // (N,) of a slice with class weights, else null
  const std::vector<double> weights;  // of each block
  double sum_weights = 0;

  ClassIndices(const Problem& problem, const Threads& threads)
      : ClassIndices(problem, {0, problem.classes}, nullptr, threads) {}

  ClassIndices(const Problem& problem, Slice slice, const A* lse_coefficients, const Threads& threads)
      : problem(problem),
        slice(slice),
        lse_coefficient(lse_coefficients),
        weights(problem.label_smoothing > 0 ? block_weights<A>(problem, threads) : std::vector<double>()) {
    if (!problem.weight) sum_weights = double(problem.classes);
    for (const double weight : weights) sum_weights += weight;
  }

  const std::vector<double>* smoothing() const { return problem.label_smoothing > 0 ? &weights : nullptr; }

  Target target(std::int64_t row) const { return target_of(problem, slice, row); }

  double loss(std::int64_t row, const Sums& sums, double log_total) const {
    const Target t = target(row);
    if (!t.counted) return 0;
    if (!t.valid) return kNaN;
    // Relative to the maximum: lse - x_t would lose digits if both are large.
    double loss = sums.pivot() - activated<A>(problem, row, t.column) + log_total;
    if (problem.weight) loss *= weight_of<A>(problem, t.column);
    if (problem.label_smoothing > 0) {
      const double smooth = sums.distance + sums.mass * log_total;
      loss = (1 - problem.label_smoothing) * loss + problem.label_smoothing / double(problem.classes) * smooth;
    }
    return loss;
  }

  GradientCoefficients<A> row_coefficients(std::int64_t row, double lse, double grad_loss, double grad_lse) const {
    const Target t = target(row);
    const double a = !t.counted ? 0 : t.valid ? grad_loss : kNaN;
    double at_target = 0, by_class = 0, total = 0;
    if (a != 0) {  // 0 times an infinite weight is NaN
      at_target = a * (1 - problem.label_smoothing);
      if (t.column >= 0) at_target *= weight_of<A>(problem, t.column);
      if (problem.label_smoothing > 0) by_class = a * (problem.label_smoothing / double(slice.num_classes));
      total = a;
      if (lse_coefficient != nullptr) {
        total *= double(lse_coefficient[row]);
      } else if (problem.weight) {
        total = at_target + by_class * sum_weights;
      }
    }
    // One object, which is not copied: a copy of scalars that were just stored stalls.
    auto result = gradient_coefficients<A>(problem, lse, total + grad_lse, at_target, by_class, a != 0 ? t.column : -1);
    // If shards do not tile, lse_coefficient may be 0 and lse NaN: then the gradient is NaN, not 0.
    result.live |= a != 0 && (lse_coefficient != nullptr || !problem.weight);
    return result;
  }
};

template <class A>
void forward_as(
    const Problem& problem, A* loss, A* lse, std::int64_t* argmax, A* entropy, const Threads& threads) {
  const ClassIndices<A> indices(problem, threads);
  const Scan<A> scan{problem, argmax != nullptr, entropy != nullptr, indices.smoothing(), nullptr};
  const auto finish = [&](std::int64_t row, const Sums& sums) {
    const double log_total = std::log(sums.total);
    loss[row] = A(indices.loss(row, sums, log_total));
    lse[row] = A(sums.pivot() + log_total);
    if (argmax != nullptr) argmax[row] = sums.first;
    if (entropy != nullptr) entropy[row] = A(log_total - sums.moment / sums.total);
    return Nothing{};
  };
  visit_rows<A>(problem, nullptr, &scan, nullptr, threads, finish);
}

template <class A>
void forward_counted_as(const Problem& problem, A* loss, A* lse, const Threads& threads) {
  const ClassIndices<A> indices(problem, threads);
  const Scan<A> scan{problem, false, false, indices.smoothing(), nullptr};
  // Before the work is divided, so that threads get equal shares of the counted rows.
  std::vector<std::int64_t> counted;
  counted.reserve(problem.rows);
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    loss[row] = 0;
    lse[row] = std::numeric_limits<A>::infinity();
    if (indices.target(row).counted) counted.push_back(row);
  }
  const auto finish = [&](std::int64_t row, const Sums& sums) {
    const double log_total = std::log(sums.total);
    loss[row] = A(indices.loss(row, sums, log_total));
    lse[row] = A(sums.pivot() + log_total);
    return Nothing{};
  };
  visit_rows<A>(problem, &counted, &scan, nullptr, threads, finish);
}

template <class A>
void backward_as(
    const Problem& whole,
    Slice slice,
    const Upstream& upstream,
    const A* lse,
    const A* entropy,
    const A* lse_coefficient,
    MutableRows grad,
    const Threads& threads) {
  prefer_huge_pages(whole, grad);
  const Problem problem = without_padding(whole, slice);
  const ClassIndices<A> indices(problem, slice, lse_coefficient, threads);
  const Scan<A>* no_scan = nullptr;
  const auto join = [&](std::int64_t row, const Sums&) {
    const RowGrads grads = row_grads<A>(upstream, row, indices.target(row).counted, lse[row]);
    auto result = indices.row_coefficients(row, lse[row], grads.loss, grads.lse);
    if (upstream.entropy.data != nullptr) {
      result.gradient.grad_entropy = A(value<A>(upstream.entropy, row));
      result.gradient.entropy = entropy[row];
      result.live |= result.gradient.grad_entropy != 0;
    }
    if (problem.classes < whole.classes) {
      const std::int64_t padding = whole.classes - problem.classes;
      std::memset(at(grad, problem.dtype, row, problem.classes), 0, padding * size_of(problem.dtype));
    }
    return result;
  };
  visit_rows<A>(problem, nullptr, no_scan, &grad, threads, join);
}

template <class A>
void with_grad_as(
    const Problem& problem,
    PerRow grad_scale,
    PerRow grad_lse_square,
    A* loss,
    A* lse,
    std::int64_t* argmax,
    A* entropy,
    MutableRows grad,
    const Threads& threads) {
  prefer_huge_pages(problem, grad);
  const ClassIndices<A> indices(problem, threads);
  const Scan<A> scan{problem, argmax != nullptr, entropy != nullptr, indices.smoothing(), nullptr, true};
  const auto join = [&](std::int64_t row, const Sums& sums) {
    const bool counted = indices.target(row).counted;
    const double log_total = std::log(sums.total);
    loss[row] = A(indices.loss(row, sums, log_total));
    lse[row] = counted ? A(sums.pivot() + log_total) : std::numeric_limits<A>::infinity();
    if (argmax != nullptr) argmax[row] = counted ? sums.first : -1;
    if (entropy != nullptr) entropy[row] = counted ? A(log_total - sums.moment / sums.total) : 0;
    const bool squared = grad_lse_square.data != nullptr && counted;
    const double grad_lse = squared ? 2 * value<A>(grad_lse_square, row) * double(lse[row]) : 0;  // 0 * inf is NaN
    return indices.row_coefficients(row, lse[row], value<A>(grad_scale, row), A(grad_lse));
  };
  visit_rows<A>(problem, nullptr, &scan, &grad, threads, join);
}

template <class A>
void scale_grad_as(const Problem& problem, MutableRows grad, PerRow factor, const Threads& threads) {
  const auto no_scan = [](std::int64_t, std::int64_t, std::int64_t) { return Sums(); };
  const auto join = [&](std::int64_t row, const Sums&) { return A(value<A>(factor, row)); };
  const auto write = [&](std::int64_t row, A by, std::int64_t column, std::int64_t n) {
    char* to = at(grad, problem.dtype, row, column);
    if (by == 0) {
      std::memset(to, 0, n * size_of(problem.dtype));
    } else if (by != 1) {
      blocks<A>().scale(problem.dtype, to, n, by);
    }
  };
  visit<A>(problem.rows, problem.classes, threads, false, true, no_scan, join, write);
}

}  // namespace

void forward(const Problem& problem, MutableNumbers loss, MutableNumbers lse, std::int64_t* argmax,
             MutableNumbers entropy, const Threads& threads) {
  return dispatch(problem,
                  [&](auto a) { return forward_as<decltype(a)>(problem, loss, lse, argmax, entropy, threads); });
}

void forward_counted(const Problem& problem, MutableNumbers loss, MutableNumbers lse, const Threads& threads) {
  return dispatch(problem, [&](auto a) { return forward_counted_as<decltype(a)>(problem, loss, lse, threads); });
}

void backward(const Problem& problem, Slice slice, const Upstream& upstream, Numbers lse, Numbers entropy,
              Numbers lse_coefficient, MutableRows grad, const Threads& threads) {
  return dispatch(problem, [&](auto a) {
    return backward_as<decltype(a)>(problem, slice, upstream, lse, entropy, lse_coefficient, grad, threads);
  });
}

void with_grad(const Problem& problem, PerRow grad_scale, PerRow grad_lse_square, MutableNumbers loss,
               MutableNumbers lse, std::int64_t* argmax, MutableNumbers entropy, MutableRows grad,
               const Threads& threads) {
  return dispatch(problem, [&](auto a) {
    return with_grad_as<decltype(a)>(problem, grad_scale, grad_lse_square, loss, lse, argmax, entropy, grad, threads);
  });
}

void scale_grad(const Problem& problem, MutableRows grad, PerRow factor, const Threads& threads) {
  return dispatch(problem, [&](auto a) { return scale_grad_as<decltype(a)>(problem, grad, factor, threads); });
}

}  // namespace xent::cpu
