// Class probabilities as targets: loss = sum_j q_j (lse - x_j), q_j = w_j ((1-e) p_j + e/V). See reference.py.

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {
namespace {

// The smallest probability of the rows whose sum is below 0, or 0. Slow; for the error message.
template <class A>
double least_of_negative_rows(const Problem& problem, const Probabilities<A>& probabilities) {
  Problem plain = problem;
  plain.label_smoothing = 0;
  plain.weight.reset();
  const Probabilities<A> unweighted{plain, probabilities.dtype, probabilities.rows};
  double result = 0;
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    double sum = 0, least = 0;
    for (std::int64_t column = 0; column < problem.classes; column += kBlock) {
      const std::int64_t n = std::min(kBlock, problem.classes - column);
      alignas(64) A p[kBlock];
      unweighted.read(row, column, n, p);
      for (std::int64_t j = 0; j < n; ++j) {
        sum += p[j];
        least = std::min(least, double(p[j]));
      }
    }
    if (sum < 0) result = std::min(result, least);
  }
  return result;
}

}  // namespace

double soft_forward(const Problem& problem, DType dtype, Rows targets, bool check, MutableNumbers loss,
                    MutableNumbers lse, const Threads& threads) {
  return dispatch(problem, [&]<class A>(A) {
    const Probabilities<A> probabilities{problem, dtype, targets};
    // The sum that smoothing alone gives a row. The factor 0.999 allows for rounding in a row of zeros.
    const double classes = double(problem.classes);
    double least_mass = 0.999 * problem.label_smoothing / classes;
    if (least_mass != 0) {
      const std::vector<double> weights = block_weights<A>(problem, threads);
      least_mass *= problem.weight ? std::accumulate(weights.begin(), weights.end(), 0.0) : classes;
    }
    std::atomic<bool> suspicious = false;
    const auto finish = [&](std::int64_t row, const Sums& sums) {
      const double log_total = std::log(sums.total);
      if (sums.mass < least_mass) suspicious = true;
      loss.at<A>(row) = A(sums.distance + sums.mass * log_total);
      lse.at<A>(row) = A(sums.pivot() + log_total);
      return Nothing{};
    };
    const Scan<A> scan{problem, false, false, nullptr, &probabilities};
    visit({problem.rows}, problem.classes, threads, scan, finish, nullptr);
    return check && suspicious ? least_of_negative_rows(problem, probabilities) : 0.0;
  });
}

void soft_backward(const Problem& problem, DType dtype, Rows targets, const Upstream& upstream, MutableRows grad,
                   const Threads& threads) {
  prefer_huge_pages(problem, grad);
  dispatch(problem, [&]<class A>(A) {
    const Probabilities<A> probabilities{problem, dtype, targets};
    const A* const lse = upstream.saved_lse;
    const auto mass = [&](std::int64_t row, std::int64_t column, std::int64_t n) {
      Sums sums;
      if (value<A>(upstream.loss, row) != 0) {
        alignas(64) A q[kBlock];
        probabilities.read(row, column, n, q);
        sums.mass = blocks<A>(problem.dtype).sum(q, n);
      }
      return sums;
    };
    const auto join = [&](std::int64_t row, const Sums& sums) {
      const double a = value<A>(upstream.loss, row);
      const double total = a * sums.mass + value<A>(upstream.lse, row);
      return row_gradient<A>(problem, lse[row], total, 0, a, -1);
    };
    const auto write = [&](std::int64_t row, const auto& joined, std::int64_t column, std::int64_t n) {
      alignas(64) A q[kBlock];
      if (joined.factor != 0) probabilities.read(row, column, n, q);
      emit(problem, grad, row, joined, column, n, q);
    };
    visit({problem.rows}, problem.classes, threads, mass, join, write);
  });
}

}  // namespace xent::cpu
