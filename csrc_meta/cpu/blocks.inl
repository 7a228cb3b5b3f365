// The loops of blocks.h. Included by blocks_target.inl inside a namespace, after simd.h. T: as logits are stored.

// Calls body(j, n) for whole vectors, with n a constant, then for the remaining elements.
template <class A, class Body>
inline void for_vectors(std::int64_t count, Body body) {
  std::int64_t j = 0;
  for (; j + kLanes<A> <= count; j += kLanes<A>) body(j, kLanes<A>);
  if (j < count) body(j, int(count - j));
}

// In double: nothing is lost between the vectors of a block and the blocks of a row.
template <class V>
inline double add_lanes(V v) {
  double sum = 0;
  for (int lane = 0; lane < int(sizeof(V) / sizeof(v[0])); ++lane) sum += double(v[lane]);
  return sum;
}

// Adds up lanes(begin, end) of the parts of a block, because the rounding error of a lane grows with its number of
// additions. 1024 of them, a block in vectors of 16 bytes, can cost an lse twice the budget of testing.assert_lse.
template <class A, class Lanes>
inline double add_parts(std::int64_t n, Lanes lanes) {
  constexpr std::int64_t part = 256 * kLanes<A>;
  double sum = 0;
  for (std::int64_t j = 0; j < n; j += part) sum += add_lanes(lanes(j, n - j < part ? n : j + part));
  return sum;
}

template <class A>
inline Vector<A> splat(A value) {
  return Vector<A>{} + value;
}

template <class T, class A>
A load_as(const void* elements, std::int64_t n, A scale, A* x) {
  typedef Vector<A> V;
  const T* from = static_cast<const T*>(elements);
  const A infinity = A(__builtin_inf());
  V maxima[4];  // a single one would be a chain of dependent instructions
  for (V& maximum : maxima) maximum = splat(-infinity);
  const std::int64_t whole = n - n % (4 * kLanes<A>);
  for (std::int64_t j = 0; j < whole; j += 4 * kLanes<A>) {
    for (int k = 0; k < 4; ++k) {
      const V z = load(from + j + k * kLanes<A>, kLanes<A>) * scale;
      write(x + j + k * kLanes<A>, z, kLanes<A>);
      maxima[k] = larger(z, maxima[k]);
    }
  }
  for (std::int64_t j = whole; j < n; j += kLanes<A>) {
    const int left = n - j < kLanes<A> ? int(n - j) : kLanes<A>;
    const V z = first_lanes(load(from + j, left) * scale, left, -infinity);
    write(x + j, z, kLanes<A>);
    maxima[0] = larger(z, maxima[0]);
  }
  const V maximum = larger(larger(maxima[0], maxima[1]), larger(maxima[2], maxima[3]));
  A result = maximum[0];
  for (int lane = 1; lane < kLanes<A>; ++lane) result = maximum[lane] > result ? maximum[lane] : result;
  return result;
}

template <class V, class A>
inline V capped(V z, A softcap) {
  return softcap * tanh(z * (1 / softcap));
}

template <class A>
void cap(A* x, std::int64_t n, A softcap) {
  for_vectors<A>(n, [=](std::int64_t j, int left) ALWAYS_INLINE {
    write(x + j, capped(read<Vector<A>>(x + j, left), softcap), left);
  });
}

template <class A>
double exponentials(
    const A* x, std::int64_t n, A pivot, double* moment, const void* next, std::int64_t next_bytes) {
  typedef Vector<A> V;
  const char* line = static_cast<const char*>(next);
  const std::int64_t vectors = (n + kLanes<A> - 1) / kLanes<A>;  // x ends with -inf, which add 0
  const std::int64_t step = vectors > 0 ? (next_bytes + vectors - 1) / vectors : 0;
  double moments = 0;
  const double total = add_parts<A>(n, [&](std::int64_t begin, std::int64_t end) ALWAYS_INLINE {
    V lanes = {};
    V sum = {};
    for (std::int64_t j = begin; j < end; j += kLanes<A>) {
      __builtin_prefetch(line, 0, 2);
      line += step;
      const V distance = read<V>(x + j, kLanes<A>) - pivot;
      const V e = exp(distance);
      lanes += e;
      if (moment != nullptr) sum += e == 0 ? V{} : e * distance;
    }
    if (moment != nullptr) moments += add_lanes(sum);
    return lanes;
  });
  if (moment != nullptr) *moment = moments;
  return total;
}

template <class A>
double distance(const A* x, std::int64_t n, A pivot, const A* q) {
  typedef Vector<A> V;
  return add_parts<A>(n, [&](std::int64_t begin, std::int64_t end) ALWAYS_INLINE {
    V lanes = {};
    for_vectors<A>(end - begin, [&](std::int64_t j, int left) ALWAYS_INLINE {
      V term = pivot - read<V>(x + begin + j, left);
      if (q != nullptr) term *= read<V>(q + begin + j, left);
      lanes += first_lanes(term, left, A(0));
    });
    return lanes;
  });
}

template <class A>
double sum(const A* q, std::int64_t n) {
  return add_parts<A>(n, [&](std::int64_t begin, std::int64_t end) ALWAYS_INLINE {
    Vector<A> lanes = {};
    for_vectors<A>(end - begin, [&](std::int64_t j, int left) ALWAYS_INLINE {
      lanes += read<Vector<A>>(q + begin + j, left);
    });
    return lanes;
  });
}

// Bytes. The processor's own prefetching ends with each page: one thread, 1024 x 32000, out of memory, AVX-512,
// 2026-11: 14 ms instead of 22 in bfloat16, 20 instead of 25 in float32. (exponentials: 9.5 for 17, 12.5 for 22.)
constexpr int kAhead = 2048;

template <class T, class A>
void gradient_as(const Gradient<A>& gradient, std::int64_t begin, const A* q, const void* logits, void* grad,
                 std::int64_t n) {
  typedef Vector<A> V;
  constexpr int lanes = kLanes<A>;
  const Gradient<A> g = gradient;
  const T* from = static_cast<const T*>(logits);
  T* to = static_cast<T*>(grad);
  const A per_cap = g.softcap != 0 ? 1 / g.softcap : 0, constant = q == nullptr ? g.factor : 0;
  const bool subtracts = q != nullptr && g.factor != 0;
  const std::int64_t column = g.column - begin;
  const auto derivative = [&](V z, V constants, std::int64_t j, int left) ALWAYS_INLINE {
    V x = z * g.scale;
    if (g.softcap != 0) x = capped(x, g.softcap);
    const V log_p = x - g.lse;
    const V p = exp(log_p);
    V d = p * g.total - constants;
    if (g.grad_entropy != 0) d -= p == 0 ? V{} : g.grad_entropy * p * (log_p + g.entropy);
    if (subtracts) d -= g.factor * read<V>(q + j, left);
    if (g.softcap != 0) d *= 1 - (x * per_cap) * (x * per_cap);
    return d * g.scale;
  };
  const auto constants_from = [&](std::int64_t j) ALWAYS_INLINE {
    return lane_numbers<A>() == A(column - j) ? splat(constant + g.at_target) : splat(constant);
  };
  if (n < lanes) return store(to, derivative(load(from, int(n)), constants_from(0), 0, int(n)), int(n));
  // The last vector and the target's overlap others. They are loaded first, because `to` may be `from`.
  const std::int64_t last = n - lanes, near = column < 0 ? 0 : column < last ? column : last;
  const V z_last = load(from + last, lanes), z_near = load(from + near, lanes);
  for (std::int64_t j = 0; j <= last; j += lanes) {
    __builtin_prefetch(reinterpret_cast<const char*>(from + j) + kAhead, 0, 2);
    __builtin_prefetch(reinterpret_cast<const char*>(to + j) + kAhead, 1);
    store(to + j, derivative(load(from + j, lanes), splat(constant), j, lanes), lanes);
  }
  if (n % lanes != 0) store(to + last, derivative(z_last, splat(constant), last, lanes), lanes);
  if (column >= 0 && column < n) store(to + near, derivative(z_near, constants_from(near), near, lanes), lanes);
}

template <class T, class A>
void scale_as(void* elements, std::int64_t n, A factor) {
  T* x = static_cast<T*>(elements);
  for_vectors<A>(n, [=](std::int64_t j, int left) ALWAYS_INLINE { store(x + j, load(x + j, left) * factor, left); });
}

// One class of all rows of a group after the other, lanes apart: where rows lie side by side in memory, what is there.
template <class T>
struct Columns {
  const T* from;
  std::int64_t stride;
};

// Not inlined: a forward of 5376 x 64 bfloat16 took 0.77 ms instead of 0.46 where GCC 12 inlined it (2026-11).
template <class T, class A>
__attribute__((noinline)) Columns<T> columns_of(const Group<A>& group, T* packed) {
  const T* first = static_cast<const T*>(group.from[0]);
  bool side_by_side = group.rows == kLanes<A>;
  for (int row = 1; row < kLanes<A> && side_by_side; ++row) side_by_side = group.from[row] == first + row;
  if (side_by_side) return {first, group.class_stride};
  for (int row = 0; row < kLanes<A>; ++row) {  // the last row again in the lanes that are left
    const T* from = static_cast<const T*>(group.from[row < group.rows ? row : group.rows - 1]);
    for (std::int64_t j = 0; j < group.classes; ++j) packed[j * kLanes<A> + row] = from[j * group.class_stride];
  }
  return {packed, kLanes<A>};
}

template <class T, class A>
void sums_of_group_as(const Group<A>& group, bool distances, const A* q, GroupSums<A>& sums) {
  typedef Vector<A> V;
  constexpr int lanes = kLanes<A>;
  const A infinity = A(__builtin_inf());
  alignas(64) T packed[kFewClasses * lanes];
  alignas(64) A x[kFewClasses * lanes];
  const Columns<T> columns = columns_of(group, packed);
  V top = splat(-infinity), first = {};
  for (std::int64_t j = 0; j < group.classes; ++j) {
    const V z = load(columns.from + j * columns.stride, lanes) * group.scale;
    write(x + j * lanes, z, lanes);
    first = z > top ? splat(A(j)) : first;
    top = larger(z, top);
  }
  V maximum = top;
  if (group.softcap != 0) {
    maximum = capped(maximum, group.softcap);
    cap(x, group.classes * lanes, group.softcap);
  }
  const V pivot = maximum == -infinity ? V{} : maximum;
  V total = {}, moment = {}, distance = {};
  for (std::int64_t j = 0; j < group.classes; ++j) {
    const V below = read<V>(x + j * lanes, lanes) - pivot;
    const V e = exp(below);
    total += e;
    moment += e == 0 ? V{} : e * below;
    if (distances) distance -= q != nullptr ? q[j] * below : below;
  }
  write(sums.maximum, maximum, lanes);
  write(sums.total, total, lanes);
  write(sums.moment, moment, lanes);
  write(sums.distance, distance, lanes);
  write(sums.top, top, lanes);
  write(sums.first, first, lanes);
}

template <class T, class A>
void gradient_of_group_as(const Group<A>& group, const GroupGradient<A>& g) {
  typedef Vector<A> V;
  constexpr int lanes = kLanes<A>;
  alignas(64) T packed[kFewClasses * lanes];
  const Columns<T> columns = columns_of(group, packed);
  const V lse = read<V>(g.lse, lanes), total = read<V>(g.total, lanes), factor = read<V>(g.factor, lanes);
  const V at_target = read<V>(g.at_target, lanes), column = read<V>(g.column, lanes), live = read<V>(g.live, lanes);
  const V grad_entropy = read<V>(g.grad_entropy, lanes), entropy = read<V>(g.entropy, lanes);
  const A per_cap = group.softcap != 0 ? 1 / group.softcap : 0;
  for (std::int64_t j = 0; j < group.classes; ++j) {
    V x = load(columns.from + j * columns.stride, lanes) * group.scale;
    if (group.softcap != 0) x = capped(x, group.softcap);
    const V log_p = x - lse;
    const V p = exp(log_p);
    V constant = g.q == nullptr ? factor : V{};
    constant = column == A(j) ? constant + at_target : constant;
    V d = p * total - constant;
    if (g.has_entropy) d -= ((p == 0) | (grad_entropy == 0)) ? V{} : grad_entropy * p * (log_p + entropy);
    if (g.q != nullptr) {
      const V less = d - factor * g.q[j];  // one rounding, as in gradient_as
      d = factor == 0 ? d : less;
    }
    if (group.softcap != 0) d *= 1 - (x * per_cap) * (x * per_cap);
    store(packed + j * lanes, live == 0 ? V{} : d * group.scale, lanes);
  }
  for (std::int64_t row = 0; row < group.rows; ++row) {
    T* to = static_cast<T*>(g.to[row]);
    for (std::int64_t j = 0; j < group.classes; ++j) to[j] = packed[j * lanes + row];
  }
}

#include "divergences.inl"

template <class T, class A>
constexpr Blocks<A> kBlocks = {load_as<T, A>,  cap<A>,         exponentials<A>, distance<A>, sum<A>, gradient_as<T, A>,
                               scale_as<T, A>, pair_totals<A>, divergences<A>,  divergence_gradient_as<T, A>,
                               kLanes<A>,      sums_of_group_as<T, A>,          gradient_of_group_as<T, A>};
