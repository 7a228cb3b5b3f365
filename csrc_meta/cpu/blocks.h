// Compiled once for each instruction set: loops over a block of a row, small enough for the first cache level.
// Everything around them (rows, threads, joins) is ordinary C++. A is the accumulator: float or double.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels.h"

namespace xent::cpu {

// 4096: 16 KiB of float32. A row is a left fold over its blocks, in any number of threads: this size affects the bits.
constexpr std::int64_t kBlock = 4096;

// grad_j = (total p_j - grad_entropy p_j (log p_j + entropy) - factor q_j - [j == column] at_target) scale dx_j/dz_j,
// where p_j = exp(x_j - lse) and x_j = softcap tanh(z_j / softcap), z_j = scale logits_j.
template <class A>
struct Gradient {
  A scale, softcap;  // softcap 0: x = z
  A lse, total;
  A grad_entropy, entropy;  // grad_entropy 0: none
  A factor, at_target;
  std::int64_t column;  // below 0: none
  bool live;            // else all are zeros, whatever the logits hold
};

// With s_j = exp(x_j - lse), t_j = exp(y_j - teacher_lse), m = (1 - beta) s + beta t, t'_j = exp(y_j - overlap_lse) and
// p_j = exp(temperature x_j - hard_lse): grad_j = dx_j/dz_j times the sum of coefficients of s_j - t_j, s_j (log s_j -
// log t_j - reverse_kl), (1 - beta) s_j (log s_j - log m_j - student_kl), s_j ([log s_j <= log t'_j] - lower_mass) and
// temperature (hot - p_j). A coefficient of 0 takes its term out, whatever it is.
template <class A>
struct Divergence {
  A lse, teacher_lse, hard_lse, overlap_lse;
  A low, teacher_low, hard_low, overlap_low;  // what the rounding of these took: log s_j = (x_j - lse) - low
  A reverse_kl, student_kl, lower_mass;   // KL(s || t), KL(s || m), the sum of the s_j with log s_j <= log t'_j
  A coefficients[kFields];                // one a Field
  A share, log_share, log_teacher_share;  // 1 - beta, log(1 - beta), log(beta)
  A scale, softcap, temperature, hot;     // scale, softcap: as in Gradient
};

// A block of both, x and y from `load`. A pivot is the maximum, or the lowest finite number.
template <class A>
struct PairBlock {
  const A *x, *y;
  std::int64_t n;
  A pivot, teacher_pivot;
  const char* next[2];   // the logits behind the block, to prefetch
  std::int64_t size[2];  // bytes of a logit
};

// The sums of e_j = exp(x_j - pivot), f_j = exp(y_j - teacher_pivot), f_j (log f_j - log e_j), e_j (log e_j - log f_j).
struct PairTotals {
  double pivot, teacher_pivot, total = 0, teacher_total = 0, kl = 0, reverse_kl = 0;
};

struct DivergenceSums {
  double student_kl = 0, teacher_kl = 0;  // KL(s || m), KL(t || m)
  double overlap = 0, lower_mass = 0;     // sum_j min(s_j, t'_j)
};

constexpr int kMostLanes = 16;

// Rows side by side, at most Blocks::lanes of them.
template <class A>
struct Group {
  std::int64_t rows, classes;  // kFewClasses at most
  const void* from[kMostLanes];
  std::int64_t class_stride;
  A scale, softcap;  // as in Gradient
};

// Of each row, as rows.h defines them for a whole one.
template <class A>
struct GroupSums {
  A maximum[kMostLanes], total[kMostLanes], moment[kMostLanes], distance[kMostLanes];
  A top[kMostLanes], first[kMostLanes];  // no NaN takes part
};

// As in Gradient.
template <class A>
struct GroupGradient {
  A lse[kMostLanes] = {}, total[kMostLanes] = {}, grad_entropy[kMostLanes] = {}, entropy[kMostLanes] = {};
  A factor[kMostLanes] = {}, at_target[kMostLanes] = {}, column[kMostLanes] = {}, live[kMostLanes] = {};
  const A* q;  // null: ones
  bool has_entropy = false;
  void* to[kMostLanes];
};

// For logits of one dtype, whose accumulator is A.
template <class A>
struct Blocks {
  // x_j = scale * from_j for n <= kBlock elements. Returns the maximum, without NaNs (-inf if there is no number).
  // Fills x up to a whole vector with -inf: x has room for kBlock elements.
  A (*load)(const void* from, std::int64_t n, A scale, A* x);
  // x_j = softcap tanh(x_j / softcap), in place.
  void (*cap)(A* x, std::int64_t n, A softcap);
  // Returns sum_j e_j, e_j = exp(x_j - pivot), of an x from `load`. If moment is not null, it becomes
  // sum_j e_j (x_j - pivot), where an e_j of 0 adds 0. Prefetches `next_bytes` at `next` into the cache.
  double (*exponentials)(
      const A* x, std::int64_t n, A pivot, double* moment, const void* next, std::int64_t next_bytes);
  // sum_j q_j (pivot - x_j); q null: all ones.
  double (*distance)(const A* x, std::int64_t n, A pivot, const A* q);
  double (*sum)(const A* q, std::int64_t n);
  // From the column `begin` of a row on. q null: all ones. `to` may be the same memory as `from`.
  void (*gradient)(const Gradient<A>&, std::int64_t begin, const A* q, const void* from, void* to, std::int64_t n);
  // x_j *= factor, in place, for elements in their stored dtype.
  void (*scale)(void* x, std::int64_t n, A factor);
  PairTotals (*pair_totals)(const PairBlock<A>&, bool kl, bool reverse_kl);
  // Adds a block's part to the sums: of a mixture, of an overlap, or of both.
  void (*divergences)(const Divergence<A>&, bool mixture, bool overlap, const PairBlock<A>&, DivergenceSums&);
  void (*divergence_gradient)(const Divergence<A>&, const PairBlock<A>&, void* to);
  int lanes;
  // Distances are summed by q if `distances`; q null: all ones.
  void (*sums_of_group)(const Group<A>&, bool distances, const A* q, GroupSums<A>&);
  void (*gradient_of_group)(const Group<A>&, const GroupGradient<A>&);
};

// The loops for an instruction set.
struct InstructionSet {
  const char* name;
  Blocks<float> in_float[3];  // of DType float32, bfloat16 and float16
  Blocks<double> in_double;
};

// Each is one file.
namespace generic {
extern const InstructionSet loops;
}
namespace avx2 {
extern const InstructionSet loops;
}
namespace avx512 {
extern const InstructionSet loops;
}

// The best one of this processor: see `instruction_set`.
const InstructionSet& best_loops();

template <class A>
const Blocks<A>& blocks(DType logits) {
  if constexpr (std::is_same_v<A, double>) {
    return best_loops().in_double;
  } else {
    return best_loops().in_float[int(logits)];
  }
}

}  // namespace xent::cpu
