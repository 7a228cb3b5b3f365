// From losses of rows to a reduced loss: xent_ops/kernels/reductions.py.
//
// One thread sums over the rows in double, so the order does not depend on the number of threads. N additions cost
// little beside the N * V elements that the losses were computed from.

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {

void divisors(const Problem& problem, Numbers target_weight, Numbers token_weight, MutableNumbers divisors) {
  dispatch(problem, [&]<class A>(A) {
    const A *const target_weights = target_weight, *const token_weights = token_weight;
    double weights = 0, number = 0;
    for (std::int64_t row = 0; row < problem.rows; ++row) {
      const Target t(problem, row, 0, problem.classes, problem.classes);
      if (!t.counted) continue;
      const double token = token_weights == nullptr ? 1.0 : double(token_weights[row]);
      number += token;
      if (target_weights != nullptr) {
        weights += token * target_weights[row];
      } else if (t.valid || !problem.weight) {
        weights += token * weight_of<A>(problem, t.column);
      }
    }
    divisors.at<A>(0) = A(weights);
    divisors.at<A>(1) = A(number);
  });
}

void row_factors(const Problem& problem, Numbers divisors, Numbers token_weight, double lse_square_scale,
                 MutableNumbers scale, MutableNumbers square) {
  dispatch(problem, [&]<class A>(A) {
    const A *const divisor = divisors, *const token_weights = token_weight;
    const auto write = [&](MutableNumbers factors, A factor, A inverse) {
      if (factors.data == nullptr) return;
      if (token_weights == nullptr) {
        factors.at<A>(0) = factor * inverse;
        return;
      }
      for (std::int64_t row = 0; row < problem.rows; ++row) {
        const bool counted = problem.target[row] != problem.ignore_index;
        factors.at<A>(row) = counted ? factor * (inverse * token_weights[row]) : A(0);
      }
    };
    write(scale, 1, 1 / divisor[0]);
    write(square, A(lse_square_scale), 1 / divisor[1]);
  });
}

void reduce(const Problem& problem, Numbers losses, Numbers lses, Numbers token_weight, const std::int64_t* argmax,
            Numbers divisors, double lse_square_scale, bool mean, const Reduced& results) {
  dispatch(problem, [&]<class A>(A) {
    const A *const loss = losses, *const lse = lses, *const token_weights = token_weight, *const divisor = divisors;
    double sum = 0, squares = 0;
    std::int64_t hits = 0, number = 0;
    for (std::int64_t row = 0; row < problem.rows; ++row) {
      if (problem.target[row] == problem.ignore_index) continue;
      const double token = token_weights == nullptr ? 1.0 : double(token_weights[row]);
      if (token != 0) {  // a weight of 0 leaves out a NaN
        sum += token * double(loss[row]);
        squares += token * double(lse[row]) * double(lse[row]);
      }
      if (argmax != nullptr) {
        ++number;
        hits += argmax[row] == problem.target[row];
      }
    }
    const double z_loss =
        lse_square_scale == 0 ? 0.0 : lse_square_scale * (mean ? squares / double(divisor[1]) : squares);
    results.value.at<A>(0) = A((mean ? sum / double(divisor[0]) : sum) + z_loss);
    if (results.z_loss.data != nullptr) results.z_loss.at<A>(0) = A(z_loss);
    if (results.accuracy.data != nullptr) results.accuracy.at<A>(0) = A(hits) / A(number);
  });
}

}  // namespace xent::cpu
