// The CPU kernels of every operator of the namespace xent: raw pointers in, raw pointers out, no torch.
//
// xent_ops/kernels/reference.py and reference_shard.py have the formulas and the corner cases. Everything is
// computed in the accumulator's dtype (float32; float64 for float64 logits) or better, in an order that depends on the
// sizes alone: the same bits for any number of threads. Nothing of the logits' size is allocated.
//
// The caller has checked shapes and dtypes. Values may be anything: a target that is no class and not ignore_index
// gives NaN in its row, and nothing outside the row is read.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

namespace xent::cpu {

enum class DType : std::int32_t { float32, bfloat16, float16, float64 };

constexpr bool accumulates_in_double(DType logits) { return logits == DType::float64; }

// Rows of no more classes are computed side by side: a vector holds one class of several rows. The gradient of dense
// rows of three vectors or more goes along the classes if the forward was another visit (group.h).
constexpr std::int64_t kFewClasses = 64;

// (N, classes): row i begins at element (i / inner) * outer_stride + (i % inner) * stride.
template <class Void>
struct RowsOf {
  Void* data = nullptr;
  std::int64_t inner = 1;  // at least 1
  std::int64_t outer_stride = 0;
  std::int64_t stride = 0;
  std::int64_t class_stride = 1;  // another one only of logits that forward and backward read, with kFewClasses at most
};
using Rows = RowsOf<const void>;
using MutableRows = RowsOf<void>;

// One number for each row in the accumulator's dtype, `stride` elements apart (0 for an expanded scalar). null: absent.
struct PerRow {
  const void* data = nullptr;
  std::int64_t stride = 0;
};

// Numbers in the accumulator's dtype: a kernel takes them as floats or as doubles. null: absent.
template <class Void>
struct NumbersOf {
  Void* data;
  NumbersOf(Void* numbers = nullptr) : data(numbers) {}
  template <class A>
  operator A*() const {
    return static_cast<A*>(data);
  }
  template <class A>
  A& at(std::int64_t row) const {
    return static_cast<A*>(data)[row];
  }
};
using Numbers = NumbersOf<const void>;
using MutableNumbers = NumbersOf<void>;

// How to run a loop on several threads. `loop(begin, end, grain, body)` calls body on disjoint ranges that cover
// [begin, end), at least `grain` long if possible, in any order, and returns after the last, as at::parallel_for does.
struct Threads {
  using Body = std::function<void(std::int64_t, std::int64_t)>;
  std::int64_t number = 1;  // threads of `loop`; decides how the work is cut, never the result
  std::function<void(std::int64_t begin, std::int64_t end, std::int64_t grain, const Body& body)> loop;
};

// The options of a row's loss. Class probabilities have no ignore_index.
struct RowOptions {
  std::int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  std::optional<double> softcap;
  double logit_scale = 1.0;
};

// The arguments of every operator.
struct Problem : RowOptions {
  DType dtype = DType::float32;  // of the logits, and of their gradient
  std::int64_t rows = 0;         // N
  std::int64_t classes = 0;      // V; for a shard the number of its columns, padding included
  Rows logits;
  const std::int64_t* target = nullptr;  // (N,), dense; null for class probabilities
  // (V,), dense, in the accumulator's dtype (any pointer if there are no classes). Absent: every class counts 1.
  std::optional<const void*> weight;
};

// Upstream gradients, and what the forward saved. A row whose upstream gradients are all zero is not read, and its
// gradient is zeros. All but loss and saved_lse are optional.
struct Upstream {
  PerRow loss, lse, entropy;
  Numbers saved_lse;        // of all classes
  Numbers saved_entropy;    // with `entropy`
  Numbers lse_coefficient;  // (N,) from shard_join, of a slice with class weights
  // For a reduced loss: the divisor, (2,), and the factor of its z-loss.
  Numbers divisor;
  double lse_square_scale = 0.0;
  Numbers saved_lse_low;  // what the rounding of saved_lse took, or null for 0
};

// What a forward writes. argmax: the first index on ties, or the first NaN. It, entropy and lse_low are optional
// (null).
struct RowResults {
  MutableNumbers loss, lse;
  std::int64_t* argmax = nullptr;
  MutableNumbers entropy, lse_low;
};

// A rank's part of a vocabulary split over ranks. All classes are the slice {0, classes}.
struct Slice {
  std::int64_t class_start = 0;  // the class of the first column
  std::int64_t num_classes = 0;  // of all ranks together
};

// Below, outputs and saved values with one number a row are (N,), dense, in the accumulator's dtype.
// A gradient may be written over the logits it is taken from (same data, same strides).

// only_counted: the logits of ignored rows are not read. Such a row has an infinite lse and argmax -1.
void forward(const Problem&, bool only_counted, const RowResults&, const Threads&);

// Columns behind the last class get zeros.
void backward(const Problem&, Slice, const Upstream&, MutableRows grad_logits, const Threads&);

// probabilities: (N, V) of any dtype and strides. With `check`, returns the smallest probability of the rows whose sum
// is below 0 (log-probabilities have such rows), and 0 if there is no such row.
double soft_forward(const Problem&, DType, Rows probabilities, bool check, MutableNumbers loss, MutableNumbers lse,
                    const Threads&);

// Uses only loss, lse and saved_lse of upstream.
void soft_backward(const Problem&, DType, Rows probabilities, const Upstream&, MutableRows grad_logits, const Threads&);

// The divergences between a student and its teacher, in the order of values and of their upstream gradients.
enum Field { kKl, kReverseKl, kMixture, kOverlap, kLogProb };
constexpr int kFields = 5, kStatistics = 11;

// The logits of both, for the same rows: xent_ops/kernels/reference_divergences.py.
struct Divergences {
  Problem student;  // all columns; its options are for a temperature of one
  Problem teacher;
  Slice slice;
  bool all_classes = true;  // else a slice: see the reference for what it returns without and with `joined`
  double beta = 0.5;        // of the mixture
  double temperature = 1.0;
  bool reads[kFields] = {};  // the others are 0, and their upstream gradients are not read
};

// values: (kFields, N). statistics, joined: (kStatistics, N). joined: the statistics of all classes, for a slice's part
// of mixture and overlap; or null. teacher_lse: (2, N), of the teacher's probabilities in the overlap, and
// its lse_low; null: its own.
void divergences_forward(const Divergences&, Numbers teacher_lse, Numbers joined, MutableNumbers values,
                         MutableNumbers statistics, const Threads&);

// Columns behind the last class get zeros.
void divergences_backward(const Divergences&, Numbers grad_values, Numbers statistics, MutableRows grad_logits,
                          const Threads&);

// The loss of all classes that is the one divergence of `reads`, plus hard_weight times the cross entropy if it reads
// the log-probability, and the gradient of grad_scale * loss.
void divergences_with_grad(const Divergences&, double hard_weight, PerRow grad_scale, MutableNumbers loss,
                           MutableRows grad_logits, const Threads&);

// For the next three: only dtype, rows, classes, target, weight and ignore_index of the problem. token_weight is (N,) or
// null: every counted row counts 1.

// (2,): the sum of the counted targets' class weights and the number of counted rows, each times token_weight. If
// `target_weight`, (N,), is not null, it replaces the class weights.
void divisors(const Problem&, Numbers target_weight, Numbers token_weight, MutableNumbers divisors);

// scale: 1 / divisors[0]; square: lse_square_scale / divisors[1]; one number each, or (N,) with token_weight: times the
// row's weight, 0 in ignored rows. square is optional (null).
void row_factors(const Problem&, Numbers divisors, Numbers token_weight, double lse_square_scale, MutableNumbers scale,
                 MutableNumbers square);

struct Reduced {
  MutableNumbers value, z_loss, accuracy;  // the last two are optional (null)
};

// The sum of the losses (0 in ignored rows) plus that of lse_square_scale * lse^2 over the counted rows, each times
// token_weight. A mean divides the two sums by divisors[0] and divisors[1]. accuracy: the share of the counted rows
// whose argmax is the target; argmax goes with it.
void reduce(const Problem&, Numbers loss, Numbers lse, Numbers token_weight, const std::int64_t* argmax,
            Numbers divisors, double lse_square_scale, bool mean, const Reduced&);

// A forward of the counted rows only, and the gradient of sum(grad_scale * loss + grad_lse_square * lse^2) over them.
// The bits are those of forward and backward; the second visit reads a row from the cache. grad_lse_square is optional.
void with_grad(const Problem&, PerRow grad_scale, PerRow grad_lse_square, const RowResults&, MutableRows grad_logits,
               const Threads&);

// Multiplies each row of grad by its factor, in place. A factor of 0 gives zeros, even if the row holds NaN. A factor
// of 1 is not applied. Uses dtype, rows and classes of the problem.
void scale_grad(const Problem&, MutableRows grad, PerRow factor, const Threads&);

// The number of values that `shard_forward` writes.
std::int64_t shard_width(const Problem&);

// out: (1, shard_width), as kernels/reference_shard.py lays it out.
void shard_forward(const Problem&, Slice, MutableNumbers out, const Threads&);

// gathered: (ranks, shard_width), dense. The logits and the values of the weight are not read.
void shard_join(const Problem&, Slice, Numbers gathered, std::int64_t ranks, MutableNumbers loss, MutableNumbers lse,
                MutableNumbers target_weight, MutableNumbers lse_coefficient, MutableNumbers lse_low, const Threads&);

// "avx512", "avx2" or "default": the instructions that the kernels use on this processor. Like torch, they obey
// ATEN_CPU_CAPABILITY=default|avx2|avx512, read at the first call, if the processor supports it.
const char* instruction_set();

}  // namespace xent::cpu
