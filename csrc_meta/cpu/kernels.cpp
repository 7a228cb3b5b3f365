// Class indices as targets. The formulas: xent_ops/kernels/reference.py.

#include "kernels.h"

#include "group.h"

namespace xent::cpu {
namespace {

template <class A>
struct ClassIndices {
  const Problem& problem;
  const Slice slice;
  const A* lse_coefficient;           // (N,) of a slice with class weights, else null
  const std::vector<double> weights;  // of each block
  double sum_weights = 0;

  ClassIndices(const Problem& problem, Slice slice, const A* lse_coefficient, const Threads& threads)
      : problem(problem),
        slice(slice),
        lse_coefficient(lse_coefficient),
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

  // Writes what a forward returns of a row. Without `visited`, that of an ignored row that was not read.
  void write(std::int64_t row, const Sums& sums, bool visited, const RowResults& out) const {
    const double log_total = std::log(sums.total);
    out.loss.at<A>(row) = A(loss(row, sums, log_total));
    const A lse = A(visited ? sums.pivot() + log_total : kInfinity);
    out.lse.at<A>(row) = lse;
    if (out.lse_low.data != nullptr) out.lse_low.at<A>(row) = A(lse_low(lse, sums.pivot(), log_total));
    if (out.argmax != nullptr) out.argmax[row] = visited ? sums.first : -1;
    if (out.entropy.data != nullptr) {
      out.entropy.at<A>(row) = A(target(row).counted ? log_total - sums.moment / sums.total : 0);
    }
  }

  // The softmax is exp(x - lse) exp(-lse_low), and the second factor is one of the row.
  Gradient<A> row_gradient(std::int64_t row, double lse, A lse_low, double grad_loss, double grad_lse) const {
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
    const double softmax = (total + grad_lse) * std::exp(-double(lse_low));
    auto result = cpu::row_gradient<A>(problem, lse, softmax, at_target, by_class, a != 0 ? t.column : -1);
    // If shards do not tile, lse_coefficient may be 0 and lse NaN: then the gradient is NaN, not 0.
    result.live |= a != 0 && (lse_coefficient != nullptr || !problem.weight);
    return result;
  }
};

}  // namespace

void forward(const Problem& problem, bool only_counted, const RowResults& out, const Threads& threads) {
  dispatch(problem, [&]<class A>(A) {
    const ClassIndices<A> indices(problem, {0, problem.classes}, nullptr, threads);
    const Scan<A> scan{problem, out.argmax != nullptr, out.entropy.data != nullptr, indices.smoothing()};
    std::vector<std::int64_t> counted;  // before the work is divided, so that threads get equal shares of these rows
    if (only_counted) counted.reserve(problem.rows);
    for (std::int64_t row = 0; only_counted && row < problem.rows; ++row) {
      if (indices.target(row).counted) {
        counted.push_back(row);
      } else {
        indices.write(row, Sums(), false, out);
      }
    }
    const Order order = only_counted ? Order{std::int64_t(counted.size()), counted.data()} : Order{problem.rows};
    visit_rows<A>(problem, order, scan, nullptr, threads, [&](std::int64_t row, const Sums& sums) {
      indices.write(row, sums, true, out);
      return Nothing{};
    });
  });
}

void backward(const Problem& whole, Slice slice, const Upstream& upstream, MutableRows grad, const Threads& threads) {
  prefer_huge_pages(whole, grad);
  const Problem problem = without_padding(whole, slice);
  dispatch(problem, [&]<class A>(A) {
    const ClassIndices<A> indices(problem, slice, upstream.lse_coefficient, threads);
    const A *const saved_lse = upstream.saved_lse, *const saved_entropy = upstream.saved_entropy;
    const A* const saved_lse_low = upstream.saved_lse_low;
    visit_rows<A>(problem, {problem.rows}, nullptr, &grad, threads, [&](std::int64_t row, const Sums&) {
      const A lse = saved_lse[row], lse_low = saved_lse_low != nullptr ? saved_lse_low[row] : 0;
      const bool counted = indices.target(row).counted;
      const RowGrads grads = row_grads<A>(upstream, row, counted, lse);
      auto result = indices.row_gradient(row, lse, lse_low, grads.loss, grads.lse);
      if (upstream.entropy.data != nullptr && counted) {
        result.grad_entropy = A(value<A>(upstream.entropy, row) * std::exp(-double(lse_low)));
        result.entropy = saved_entropy[row] - lse_low;
        result.live |= result.grad_entropy != 0;
      }
      zero(problem.dtype, grad, row, problem.classes, whole.classes);
      return result;
    });
  });
}

void with_grad(const Problem& problem, PerRow grad_scale, PerRow grad_lse_square, const RowResults& out,
               MutableRows grad, const Threads& threads) {
  prefer_huge_pages(problem, grad);
  dispatch(problem, [&]<class A>(A) {
    const ClassIndices<A> indices(problem, {0, problem.classes}, nullptr, threads);
    const Scan<A> scan{problem, out.argmax != nullptr, out.entropy.data != nullptr, indices.smoothing(), nullptr, true};
    visit_rows<A>(problem, {problem.rows}, scan, &grad, threads, [&](std::int64_t row, const Sums& sums) {
      const bool counted = indices.target(row).counted;
      indices.write(row, sums, counted, out);
      const double lse = out.lse.at<A>(row), log_total = std::log(sums.total);
      const A low = counted ? A(lse_low(lse, sums.pivot(), log_total)) : 0;
      const bool squared = grad_lse_square.data != nullptr && counted;
      const double grad_lse = squared ? 2 * value<A>(grad_lse_square, row) * lse : 0;  // 0 * inf is NaN
      return indices.row_gradient(row, lse, low, value<A>(grad_scale, row), A(grad_lse));
    });
  });
}

void scale_grad(const Problem& problem, MutableRows grad, PerRow factor, const Threads& threads) {
  dispatch(problem, [&]<class A>(A) {
    const auto join = [&](std::int64_t row, const Sums&) { return A(value<A>(factor, row)); };
    const auto write = [&](std::int64_t row, A by, std::int64_t column, std::int64_t n) {
      if (by == 0) {
        zero(problem.dtype, grad, row, column, column + n);
      } else if (by != 1) {
        blocks<A>(problem.dtype).scale(at(grad, problem.dtype, row, column), n, by);
      }
    };
    visit({problem.rows}, problem.classes, threads, nullptr, join, write);
  });
}

}  // namespace xent::cpu
