// The first and the second visit of a block. Not part of the interface.
#pragma once

#include "rows.h"

namespace xent::cpu {

template <class A>
double weight_of(const Problem& problem, std::int64_t column) {
  return !problem.weight ? 1.0 : double(static_cast<const A*>(*problem.weight)[column]);
}

// The class weights from a column on.
template <class A>
const A* weights_from(const Problem& problem, std::int64_t column) {
  return !problem.weight ? nullptr : static_cast<const A*>(*problem.weight) + column;
}

// sum_j w_j of each block, for the sums over all classes that label smoothing and shards need; empty without weights.
template <class A>
std::vector<double> block_weights(const Problem& problem, const Threads& threads) {
  if (!problem.weight) return {};
  const A* weight = static_cast<const A*>(*problem.weight);
  std::vector<double> sums(number_of_blocks(problem.classes));
  for_each(threads, sums.size(), kBlock, [&](std::int64_t block) {
    const std::int64_t column = block * kBlock;
    sums[block] = blocks<A>(problem.dtype).sum(weight + column, std::min(kBlock, problem.classes - column));
  });
  return sums;
}

// Class probabilities: q_j = w_j ((1-e) p_j + e/V).
template <class A>
struct Probabilities {
  const Problem& problem;
  DType dtype;
  Rows rows;

  void read(std::int64_t row, std::int64_t column, std::int64_t n, A* q) const {
    const char* from = at(rows, dtype, row, column);
    if (accumulates_in_double(dtype) == accumulates_in_double(problem.dtype)) {
      blocks<A>(dtype).load(from, n, 1, q);
    } else if (dtype == DType::float64) {
      for (std::int64_t j = 0; j < n; ++j) q[j] = A(reinterpret_cast<const double*>(from)[j]);
    } else {
      alignas(64) float narrow[kBlock];
      blocks<float>(dtype).load(from, n, 1, narrow);
      for (std::int64_t j = 0; j < n; ++j) q[j] = narrow[j];
    }
    if (problem.label_smoothing > 0) {
      const A keep = A(1 - problem.label_smoothing), spread = A(problem.label_smoothing / double(problem.classes));
      for (std::int64_t j = 0; j < n; ++j) q[j] = q[j] * keep + spread;
    }
    if (problem.weight) {
      const A* weight = static_cast<const A*>(*problem.weight) + column;
      for (std::int64_t j = 0; j < n; ++j) q[j] *= weight[j];
    }
  }
};

// The first j for which is_wanted(x_j), or n. Sixty-four at a time, in a loop that compilers vectorise.
template <class A, class Predicate>
std::int64_t find(const A* x, std::int64_t n, Predicate is_wanted) {
  std::int64_t j = 0;
  for (; j + 64 <= n; j += 64) {
    int found = 0;
    for (int k = 0; k < 64; ++k) found |= is_wanted(x[j + k]);
    if (found) break;
  }
  while (j < n && !is_wanted(x[j])) ++j;
  return j;
}

// x of one element of a row.
template <class A>
double activated(const Problem& problem, std::int64_t row, std::int64_t column) {
  alignas(64) A x[64 / sizeof(A)];
  const char* from = at(problem.logits, problem.dtype, row, column);
  if (size_of(problem.dtype) == sizeof(A)) {  // a vector for one number takes as long as a row of few classes
    x[0] = *reinterpret_cast<const A*>(from) * A(problem.logit_scale);
  } else {
    blocks<A>(problem.dtype).load(from, 1, A(problem.logit_scale), x);
  }
  if (problem.softcap) blocks<A>(problem.dtype).cap(x, 1, A(*problem.softcap));
  return x[0];
}

// The parts of a row's Sums to compute.
template <class A>
struct Scan {
  const Problem& problem;
  bool argmax = false;
  bool entropy = false;
  const std::vector<double>* weights = nullptr;        // block_weights: also sum distances, by class weight
  const Probabilities<A>* probabilities = nullptr;     // also sum distances, by weighted probability
  bool only_counted = false;                           // ignored rows are not read

  Sums operator()(std::int64_t row, std::int64_t column, std::int64_t n) const {
    Sums sums;
    if (only_counted && problem.target[row] == problem.ignore_index) return sums;
    const Blocks<A>& functions = blocks<A>(problem.dtype);
    const A softcap = A(problem.softcap.value_or(0.0));
    alignas(64) A x[kBlock];
    const char* from = at(problem.logits, problem.dtype, row, column);
    A maximum = functions.load(from, n, A(problem.logit_scale), x);
    sums.top = maximum;
    if (argmax) sums.first = column + find(x, n, [=](A z) { return z == maximum; });
    if (softcap != 0) {
      functions.cap(x, n, softcap);
      functions.cap(&maximum, 1, softcap);
    }
    sums.maximum = maximum;
    const A pivot = A(sums.pivot());
    const std::int64_t bytes = n * size_of(problem.dtype);
    sums.total = functions.exponentials(x, n, pivot, entropy ? &sums.moment : nullptr, from + bytes, bytes);
    if (argmax && std::isnan(sums.total)) {  // a NaN among them, or +inf
      const std::int64_t j = find(x, n, [](A value) { return value != value; });
      if (j < n) {
        sums.top = kNaN;
        sums.first = column + j;
      }
    }
    if (probabilities != nullptr) {
      alignas(64) A q[kBlock];
      probabilities->read(row, column, n, q);
      sums.mass = functions.sum(q, n);
      sums.distance = functions.distance(x, n, pivot, q);
    } else if (weights != nullptr) {
      sums.mass = !problem.weight ? double(n) : (*weights)[column / kBlock];
      sums.distance = functions.distance(x, n, pivot, weights_from<A>(problem, column));
    }
    return sums;
  }

  // Rows of few classes: no class probabilities.
  void group(const Group<A>& rows, GroupSums<A>& sums) const {
    const A* q = weights == nullptr ? nullptr : weights_from<A>(problem, 0);
    blocks<A>(problem.dtype).sums_of_group(rows, weights != nullptr, q, sums);
  }

  // What a group does not tell of a row.
  Sums complete(std::int64_t row, Sums sums) const {
    if (weights != nullptr) sums.mass = !problem.weight ? double(problem.classes) : (*weights)[0];
    if (argmax && std::isnan(sums.total)) {  // a NaN among them, or +inf
      for (std::int64_t j = 0; j < problem.classes; ++j) {
        if (!std::isnan(activated<A>(problem, row, j))) continue;
        sums.top = kNaN;
        sums.first = j;
        break;
      }
    }
    return sums;
  }
};

// A row's target and its column among the classes [start, start + columns), of `classes` in all.
struct Target {
  bool counted;         // its target is not ignore_index
  bool valid;           // its target is a class
  std::int64_t column;  // -1: not among these columns

  Target(const Problem& problem, std::int64_t row, std::int64_t start, std::int64_t columns, std::int64_t classes) {
    const std::int64_t target = problem.target[row];
    counted = target != problem.ignore_index;
    valid = target >= 0 && target < classes;
    column = valid && target >= start && target - start < columns ? target - start : -1;
  }
};

inline Target target_of(const Problem& problem, const Slice& slice, std::int64_t row) {
  return Target(problem, row, slice.class_start, problem.classes, slice.num_classes);
}

// The slice without the padding behind the last class.
inline Problem without_padding(Problem problem, const Slice& slice) {
  problem.classes = std::max<std::int64_t>(0, std::min(problem.classes, slice.num_classes - slice.class_start));
  return problem;
}

// The coefficients for the second visit: grad_x_j = softmax softmax_j - at_target [j == column] - by_class q_j, as in
// reference.cross_entropy_backward.
template <class A>
Gradient<A> row_gradient(
    const Problem& problem, double lse, double softmax, double at_target, double by_class, std::int64_t column) {
  Gradient<A> g = {};
  g.scale = A(problem.logit_scale);
  g.softcap = A(problem.softcap.value_or(0.0));
  g.lse = A(lse);
  g.total = A(softmax);
  g.factor = A(by_class);
  g.at_target = A(at_target);
  g.column = column;
  g.live = softmax != 0 || at_target != 0 || by_class != 0;
  return g;
}

// The gradient of a block, which may overwrite the logits. q: the factors of its classes; null means ones.
template <class A>
void emit(const Problem& problem, const MutableRows& grad, std::int64_t row, const Gradient<A>& gradient,
          std::int64_t column, std::int64_t n, const A* q) {
  if (!gradient.live) return zero(problem.dtype, grad, row, column, column + n);
  blocks<A>(problem.dtype).gradient(gradient, column, q, at(problem.logits, problem.dtype, row, column),
                                    at(grad, problem.dtype, row, column), n);
}

}  // namespace xent::cpu
