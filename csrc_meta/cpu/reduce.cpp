// From losses of rows to a reduced loss: xent_ops/kernels/reductions.py.
//
// One thread sums over the rows in double, so the order does not depend on the number of threads. N additions cost
// little beside the N * V elements that the losses were computed from.

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {

void divisor(const Problem& problem, Numbers target_weight, MutableNumbers divisor, MutableNumbers inverse) {
  dispatch(problem, [&]<class A>(A) {
    const A* target_weights = target_weight;
    double sum_weights = 0;
    std::int64_t number = 0;
    for (std::int64_t row = 0; row < problem.rows; ++row) {
      const Target t(problem, row, 0, problem.classes, problem.classes);
      if (!t.counted) continue;
      ++number;
      if (target_weights != nullptr) {
        sum_weights += target_weights[row];
      } else if (t.valid || !problem.weight) {
        sum_weights += weight_of<A>(problem, t.column);
      }
    }
    divisor.at<A>(0) = A(sum_weights);
    divisor.at<A>(1) = A(number);
    for (int i = 0; inverse.data != nullptr && i < 2; ++i) inverse.at<A>(i) = 1 / divisor.at<A>(i);
  });
}

void reduce(const Problem& problem, Numbers losses, Numbers lses, Numbers divisors, double lse_square_scale, bool mean,
            MutableNumbers value) {
  dispatch(problem, [&]<class A>(A) {
    const A *const loss = losses, *const lse = lses, *const divisor = divisors;
    double sum = 0, squares = 0;
    for (std::int64_t row = 0; row < problem.rows; ++row) {
      sum += loss[row];
      if (problem.target[row] != problem.ignore_index) squares += double(lse[row]) * double(lse[row]);
    }
    double result = mean ? sum / divisor[0] : sum;
    if (lse_square_scale != 0) result += lse_square_scale * (mean ? squares / divisor[1] : squares);
    value.at<A>(0) = A(result);
  });
}

}  // namespace xent::cpu
