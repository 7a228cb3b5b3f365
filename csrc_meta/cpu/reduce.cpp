// From losses of rows to a reduced loss: xent_ops/kernels/reductions.py.
//
// One thread sums over the rows in double, so the order does not depend on the number of threads. N additions cost
// little beside the N * V elements that the losses were computed from.

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {
namespace {

template <class A>
void divisor_as(const Problem& problem, const A* target_weight, A* divisor, A* inverse) {
  double sum_weights = 0;
  std::int64_t number = 0;
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    const Target t(problem, row, 0, problem.classes, problem.classes);
    if (!t.counted) continue;
    ++number;
    if (target_weight != nullptr) {
      sum_weights += target_weight[row];
    } else if (t.valid || !problem.weight) {
      sum_weights += weight_of<A>(problem, t.column);
    }
  }
  divisor[0] = A(sum_weights);
  divisor[1] = A(number);
  for (int i = 0; inverse != nullptr && i < 2; ++i) inverse[i] = 1 / divisor[i];
}

template <class A>
void reduce_as(
    const Problem& problem,
    const A* loss,
    const A* lse,
    const A* divisor,
    double lse_square_scale,
    bool mean,
    A* value) {
  double sum = 0, squares = 0;
  for (std::int64_t row = 0; row < problem.rows; ++row) {
    sum += loss[row];
    if (problem.target[row] != problem.ignore_index) squares += double(lse[row]) * double(lse[row]);
  }
  double result = mean ? sum / divisor[0] : sum;
  if (lse_square_scale != 0) result += lse_square_scale * (mean ? squares / divisor[1] : squares);
  *value = A(result);
}

}  // namespace

void divisor(const Problem& problem, Numbers target_weight, MutableNumbers divisor, MutableNumbers inverse) {
  return dispatch(problem, [&](auto a) { return divisor_as<decltype(a)>(problem, target_weight, divisor, inverse); });
}

void reduce(const Problem& problem, Numbers loss, Numbers lse, Numbers divisor, double lse_square_scale, bool mean,
            MutableNumbers value) {
  return dispatch(problem, [&](auto a) {
    return reduce_as<decltype(a)>(problem, loss, lse, divisor, lse_square_scale, mean, value);
  });
}

}  // namespace xent::cpu
