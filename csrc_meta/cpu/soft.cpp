// Class probabilities as targets: loss = sum_j q_j (lse - x_j), q_j = w_j ((1-e) p_j + e/V). See reference.py.

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {
namespace {

template <class A>
void forward_as(
    const Problem& problem, const Probabilities<A>& probabilities, A* loss, A* lse, const Threads& threads) {
  const Scan<A> scan{problem, false, false, nullptr, &probabilities};
  const auto finish = [&](std::int64_t row, const Sums& sums) {
    const double log_total = std::log(sums.total);
    loss[row] = A(sums.distance + sums.mass * log_total);
    lse[row] = A(sums.pivot() + log_total);
    return Nothing{};
  };
  const auto nothing = [](std::int64_t, Nothing, std::int64_t, std::int64_t) {};
  visit<Nothing>(problem.rows, problem.classes, threads, true, false, scan, finish, nothing);
}

template <class A>
void backward_as(
    const Problem& problem,
    const Probabilities<A>& probabilities,
    const Upstream& upstream,
    const A* lse,
    MutableRows grad,
    const Threads& threads) {
  prefer_huge_pages(problem, grad);
  const auto mass = [&](std::int64_t row, std::int64_t column, std::int64_t n) {
    Sums sums;
    if (value<A>(upstream.loss, row) != 0) {
      alignas(64) A q[kBlock];
      probabilities.read(row, column, n, q);
      sums.mass = blocks<A>().sum(q, n);
    }
    return sums;
  };
  const auto join = [&](std::int64_t row, const Sums& sums) {
    const double a = value<A>(upstream.loss, row);
    const double total = a * sums.mass + value<A>(upstream.lse, row);
    return coefficients<A>(problem, lse[row], total, 0, a, -1);
  };
  const auto write = [&](std::int64_t row, const Coefficients<A>& joined, std::int64_t column, std::int64_t n) {
    alignas(64) A q[kBlock];
    if (joined.gradient.factor != 0) probabilities.read(row, column, n, q);
    emit(problem, grad, row, joined, column, n, q);
  };
  visit<Coefficients<A>>(problem.rows, problem.classes, threads, true, true, mass, join, write);
}

}  // namespace

void soft_forward(
    const Problem& problem, DType dtype, Rows probabilities, void* loss, void* lse, const Threads& threads) {
  dispatch(problem, [&](auto a) {
    using A = decltype(a);
    forward_as<A>(problem, {problem, dtype, probabilities}, static_cast<A*>(loss), static_cast<A*>(lse), threads);
  });
}

void soft_backward(
    const Problem& problem,
    DType dtype,
    Rows probabilities,
    const Upstream& upstream,
    const void* lse,
    MutableRows grad,
    const Threads& threads) {
  dispatch(problem, [&](auto a) {
    using A = decltype(a);
    backward_as<A>(
        problem, {problem, dtype, probabilities}, upstream, static_cast<const A*>(lse), grad, threads);
  });
}

}  // namespace xent::cpu
