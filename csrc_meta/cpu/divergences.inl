// The loops over a student's and its teacher's block. Included by blocks.inl.

// log(exp(a) + exp(b)); NaN where both are -inf.
template <class V>
inline V log_of_sum(V a, V b) {
  return larger(a, b) + log_one_plus(exp(-absolute(a - b)));
}

template <class A>
inline void prefetch_next(const PairBlock<A>& block, std::int64_t j) {
  for (int i = 0; i < 2; ++i) __builtin_prefetch(block.next[i] + j * block.size[i], 0, 2);
}

template <class A>
PairTotals pair_totals(const PairBlock<A>& arguments, bool kl, bool reverse_kl) {
  typedef Vector<A> V;
  PairTotals totals{arguments.pivot, arguments.teacher_pivot};
  totals.total = add_parts<A>(arguments.n, [&, block = arguments](std::int64_t begin, std::int64_t end) ALWAYS_INLINE {
    V total = {}, teacher_total = {}, kls = {}, reverse_kls = {};
    for (std::int64_t j = begin; j < end; j += kLanes<A>) {  // x and y end with -inf, which add 0
      prefetch_next(block, j);
      const V log_e = read<V>(block.x + j, kLanes<A>) - block.pivot, e = exp(log_e);
      const V log_f = read<V>(block.y + j, kLanes<A>) - block.teacher_pivot, f = exp(log_f);
      total += e;
      teacher_total += f;
      if (kl) kls += f == 0 ? V{} : f * (log_f - log_e);
      if (reverse_kl) reverse_kls += e == 0 ? V{} : e * (log_e - log_f);
    }
    totals.teacher_total += add_lanes(teacher_total);
    totals.kl += add_lanes(kls);
    totals.reverse_kl += add_lanes(reverse_kls);
    return total;
  });
  return totals;
}

template <class A>
inline Vector<A> log_mixture(const Divergence<A>& divergence, Vector<A> log_s, Vector<A> log_t) {
  return log_of_sum(log_s + divergence.log_share, log_t + divergence.log_teacher_share);
}

template <class A>
void divergences(const Divergence<A>& arguments, bool mixture, bool overlap, const PairBlock<A>& block,
                 DivergenceSums& sums) {
  typedef Vector<A> V;
  const A *x = block.x, *y = block.y;
  sums.overlap += add_parts<A>(block.n, [&, divergence = arguments](std::int64_t begin, std::int64_t end) ALWAYS_INLINE {
    V student_kl = {}, teacher_kl = {}, common = {}, lower_mass = {};
    for_vectors<A>(end - begin, [&](std::int64_t offset, int left) ALWAYS_INLINE {
      const V log_s = (read<V>(x + begin + offset, left) - divergence.lse) - divergence.low;
      const V y_j = read<V>(y + begin + offset, left);
      if (mixture) {
        const V log_t = (y_j - divergence.teacher_lse) - divergence.teacher_low;
        const V log_m = log_mixture(divergence, log_s, log_t);
        const V s = exp(log_s), t = exp(log_t);
        student_kl += first_lanes(s == 0 ? V{} : s * (log_s - log_m), left, A(0));
        teacher_kl += first_lanes(t == 0 ? V{} : t * (log_t - log_m), left, A(0));
      }
      if (overlap) {
        const V log_t = (y_j - divergence.overlap_lse) - divergence.overlap_low;
        const V lower = exp((log_s > log_t) | (log_t != log_t) ? log_t : log_s);  // min(s, t'), or NaN
        common += first_lanes(lower, left, A(0));
        lower_mass += first_lanes(log_s <= log_t ? lower : V{}, left, A(0));
      }
    });
    sums.student_kl += add_lanes(student_kl);
    sums.teacher_kl += add_lanes(teacher_kl);
    sums.lower_mass += add_lanes(lower_mass);
    return common;
  });
}

template <class T, class A>
void divergence_gradient_as(const Divergence<A>& arguments, const PairBlock<A>& pair, void* grad) {
  typedef Vector<A> V;
  T* to = static_cast<T*>(grad);
  const A infinity = A(__builtin_inf());
  const A per_cap = arguments.softcap != 0 ? 1 / arguments.softcap : 0;
  const auto tilted = [=](V s, V ratio, A kl) ALWAYS_INLINE {  // s (ratio - kl)
    return s == 0 ? V{} : s * (ratio == infinity ? splat(infinity) : ratio - kl);  // not inf - inf
  };
  for_vectors<A>(pair.n, [=, divergence = arguments, block = pair](std::int64_t j, int left) ALWAYS_INLINE {
    prefetch_next(block, j);
    const A* c = divergence.coefficients;
    const V z = read<V>(block.x + j, left), y_j = read<V>(block.y + j, left);
    const V log_s = (z - divergence.lse) - divergence.low, s = exp(log_s);
    const V log_t = (y_j - divergence.teacher_lse) - divergence.teacher_low;
    V d = {};
    if (c[kKl] != 0) d += c[kKl] * (s - exp(log_t));
    if (c[kReverseKl] != 0) d += c[kReverseKl] * tilted(s, log_s - log_t, divergence.reverse_kl);
    if (c[kMixture] != 0) {
      const V ratio = log_s - log_mixture(divergence, log_s, log_t);
      d += c[kMixture] * divergence.share * tilted(s, ratio, divergence.student_kl);
    }
    if (c[kOverlap] != 0) {
      const V below = log_s <= (y_j - divergence.overlap_lse) - divergence.overlap_low ? splat(A(1)) : V{};
      d += c[kOverlap] * s * (below - divergence.lower_mass);
    }
    if (c[kLogProb] != 0) {
      const V hard = (z * divergence.temperature - divergence.hard_lse) - divergence.hard_low;
      const V p = divergence.temperature == 1 ? s : exp(hard);
      d += c[kLogProb] * divergence.temperature * (divergence.hot - p);
    }
    if (divergence.softcap != 0) d *= 1 - (z * per_cap) * (z * per_cap);
    store(to + j, d * divergence.scale, left);
  });
}
