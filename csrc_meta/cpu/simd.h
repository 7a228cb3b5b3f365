// Vectors of accumulators, on the vector extensions of GCC and Clang: one source for every instruction set.
//
// Included by blocks_target.inl, inside a namespace, after VECTOR_BYTES is defined. Nothing here may come from
// the standard library's templates: the linker keeps one copy of an inline function for the whole library, and that
// could be the one that was compiled for AVX-512.

#define ALWAYS_INLINE __attribute__((always_inline))

template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class A>
using Vector = typename VectorOf<A>::type;
typedef Vector<float> f32;
typedef Vector<double> f64;
typedef Vector<std::uint32_t> u32;
typedef Vector<std::uint64_t> u64;
typedef std::uint16_t u16 __attribute__((vector_size(VECTOR_BYTES / 2)));

template <class A>
constexpr int kLanes = VECTOR_BYTES / int(sizeof(A));

template <class To, class From>
inline To bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To to;
  __builtin_memcpy(&to, &value, sizeof(to));
  return to;
}

// The first n of a vector, the others 0. n is a constant in all but the last vector of a row.
template <class V, class T>
inline V read(const T* from, int n) {
  V v = {};
  if (n == int(sizeof(V) / sizeof(T))) {
    __builtin_memcpy(&v, from, sizeof(V));
  } else {
    __builtin_memcpy(&v, from, n * sizeof(T));
  }
  return v;
}

constexpr std::uint32_t kLanes32[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr std::uint64_t kLanes64[] = {0, 1, 2, 3, 4, 5, 6, 7};

// 0, 1, 2, ...
template <class A>
inline Vector<A> lane_numbers() {
  Vector<A> numbers;
  for (int lane = 0; lane < kLanes<A>; ++lane) numbers[lane] = A(lane);
  return numbers;
}

// v with `otherwise` behind its first n lanes. By a mask: writing lane by lane goes through memory, and doubles the
// time of a row of few classes.
inline f32 first_lanes(f32 v, int n, float otherwise) {
  return read<u32>(kLanes32, kLanes<float>) < u32{} + std::uint32_t(n) ? v : f32{} + otherwise;
}
inline f64 first_lanes(f64 v, int n, double otherwise) {
  return read<u64>(kLanes64, kLanes<double>) < u64{} + std::uint64_t(n) ? v : f64{} + otherwise;
}

template <class V, class T>
inline void write(T* to, V v, int n) {
  if (n == int(sizeof(V) / sizeof(T))) {
    __builtin_memcpy(to, &v, sizeof(V));
  } else {
    __builtin_memcpy(to, &v, n * sizeof(T));
  }
}

// Intrinsics of x86 where GCC 12 emits several instructions for one (twenty for a narrowing). The portable
// half conversions come from M. Dukhan's FP16 library: integer arithmetic moves the exponents, and adding a number of
// the right exponent rounds the subnormals.
#if VECTOR_BYTES == 64
inline u32 widen(u16 v) { return bits<u32>(_mm512_cvtepu16_epi32(bits<__m256i>(v))); }
inline u16 narrow(u32 v) { return bits<u16>(_mm512_cvtepi32_epi16(bits<__m512i>(v))); }
inline f32 from_half(u16 v) { return _mm512_cvtph_ps(bits<__m256i>(v)); }
inline u16 to_half(f32 v) { return bits<u16>(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
// The second operand if one is NaN.
inline f32 larger(f32 a, f32 b) { return _mm512_max_ps(a, b); }
inline f64 larger(f64 a, f64 b) { return _mm512_max_pd(a, b); }
inline f32 smaller(f32 a, f32 b) { return _mm512_min_ps(a, b); }
inline f64 smaller(f64 a, f64 b) { return _mm512_min_pd(a, b); }
#elif VECTOR_BYTES == 32
inline u32 widen(u16 v) { return bits<u32>(_mm256_cvtepu16_epi32(bits<__m128i>(v))); }
inline u16 narrow(u32 v) {
  const __m256i pairs = _mm256_packus_epi32(bits<__m256i>(v), bits<__m256i>(v));
  return bits<u16>(_mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
}
inline f32 from_half(u16 v) { return _mm256_cvtph_ps(bits<__m128i>(v)); }
inline u16 to_half(f32 v) { return bits<u16>(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }
inline f32 larger(f32 a, f32 b) { return _mm256_max_ps(a, b); }
inline f64 larger(f64 a, f64 b) { return _mm256_max_pd(a, b); }
inline f32 smaller(f32 a, f32 b) { return _mm256_min_ps(a, b); }
inline f64 smaller(f64 a, f64 b) { return _mm256_min_pd(a, b); }
#else
inline u32 widen(u16 v) { return __builtin_convertvector(v, u32); }
inline u16 narrow(u32 v) { return __builtin_convertvector(v, u16); }
inline f32 from_half(u16 v) {
  const u32 word = widen(v) << 16;
  const u32 twice = word + word;
  const f32 normal = bits<f32>((twice >> 4) + (0xE0u << 23)) * 0x1p-112f;
  const f32 subnormal = bits<f32>((twice >> 17) | (126u << 23)) - 0.5f;
  return bits<f32>((word & 0x80000000u) | bits<u32>(twice < (1u << 27) ? subnormal : normal));
}
inline u16 to_half(f32 v) {
  const u32 word = bits<u32>(v);
  const u32 twice = word + word;
  const u32 exponent = twice & 0xFF000000u;
  const u32 smallest = u32{} + 0x71000000u;
  const f32 base = (bits<f32>(word & 0x7FFFFFFFu) * 0x1p+112f) * 0x1p-110f;
  const u32 sum = bits<u32>(bits<f32>(((exponent < smallest ? smallest : exponent) >> 1) + 0x07800000u) + base);
  const u32 number = ((sum >> 13) & 0x7C00u) + (sum & 0xFFFu);
  return narrow(((word >> 16) & 0x8000u) | (twice > 0xFF000000u ? u32{} + 0x7E00u : number));
}
template <class V>
inline V larger(V a, V b) {
  return a > b ? a : b;
}
template <class V>
inline V smaller(V a, V b) {
  return a < b ? a : b;
}
#endif

// The types that logits may be stored as. `load` gives accumulators, `store` rounds to nearest, ties to even.
struct Bfloat16 {
  std::uint16_t bits;
};
struct Float16 {
  std::uint16_t bits;
};

inline f32 load(const float* from, int n) { return read<f32>(from, n); }
inline f64 load(const double* from, int n) { return read<f64>(from, n); }
inline f32 load(const Bfloat16* from, int n) { return bits<f32>(widen(read<u16>(from, n)) << 16); }
inline f32 load(const Float16* from, int n) { return from_half(read<u16>(from, n)); }

inline void store(float* to, f32 v, int n) { write(to, v, n); }
inline void store(double* to, f64 v, int n) { write(to, v, n); }
inline void store(Float16* to, f32 v, int n) { write(to, to_half(v), n); }
inline void store(Bfloat16* to, f32 v, int n) {
  const u32 word = bits<u32>(v);
  const u32 rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  write(to, narrow(v != v ? u32{} + 0x7FC0u : rounded), n);
}

// exp within 1 ulp (Cephes expf.c, exp.c): 2^n e^r with |r| <= ln(2) / 2. 0 below 2^-126.5, half of the first binade of
// subnormal numbers, and inf from 2^127.5 on (2^-1022.5, 2^1023.5); NaN of NaN: the product keeps it whatever the
// integers are.
inline f32 exp(f32 x) {
  x = smaller(f32{} + 89.0f, larger(f32{} - 88.0f, x));  // n from -127, where 2^n becomes 0, to 128: inf
  const f32 shifted = x * 1.44269504088896341f + 0x1.8p23f;  // rounds to an integer, in the last bits
  const f32 n = shifted - 0x1.8p23f;
  const f32 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  f32 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r;
  return (p + 1.0f) * bits<f32>((bits<u32>(shifted) + 127u) << 23);
}

inline f64 exp(f64 x) {
  x = smaller(f64{} + 710.0, larger(f64{} - 709.0, x));  // n from -1023 to 1024
  const f64 shifted = x * 1.44269504088896341 + 0x1.8p52;
  const f64 n = shifted - 0x1.8p52;
  const f64 r = (x - n * 6.93145751953125e-1) - n * 1.42860682030941723212e-6;
  const f64 square = r * r;
  const f64 odd = r * ((1.26177193074810590878e-4 * square + 3.02994407707441961300e-2) * square + 1.0);
  const f64 even = ((3.00198505138664455042e-6 * square + 2.52448340349684104192e-3) * square +
                    2.27265548208155028766e-1) * square + 2.0;
  return (2.0 * odd / (even - odd) + 1.0) * bits<f64>((bits<u64>(shifted) + 1023u) << 52);
}

// log(1 + u) = 2 artanh(u / (2 + u)) for 0 <= u <= 1, by its series in z = u / (2 + u) <= 1/3. The terms left out are
// less than z^(2 terms) / (2 terms + 1) of the result.
template <class A, int terms>
inline Vector<A> log_one_plus_of(Vector<A> u) {
  const Vector<A> z = u / (u + 2), square = z * z;
  Vector<A> sum = {};
  for (int k = terms - 1; k >= 0; --k) sum = sum * square + A(1) / A(2 * k + 1);
  return 2 * z * sum;
}

inline f32 log_one_plus(f32 u) { return log_one_plus_of<float, 8>(u); }
inline f64 log_one_plus(f64 u) { return log_one_plus_of<double, 17>(u); }

template <class V>
inline V absolute(V x) {
  return x < 0 ? -x : x;
}

// tanh to the last bits (Cephes tanhf.c, tanh.c): 1 - 2 / (exp(2|u|) + 1) loses digits to cancellation near 0.
template <class V>
inline V tanh_of(V u, V small) {
  const V magnitude = absolute(u);
  const V large = 1 - 2 / (exp(magnitude + magnitude) + 1);
  return magnitude < V{} + 0.625f ? small : (u < 0 ? -large : large);
}

inline f32 tanh(f32 u) {
  const f32 square = u * u;
  f32 p = square * -5.70498872745e-3f + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  return tanh_of(u, u + u * square * p);
}

inline f64 tanh(f64 u) {
  const f64 square = u * u;
  const f64 p = (square * -9.64399179425052238628e-1 - 9.92877231001918586564e1) * square - 1.61468768441708447952e3;
  const f64 q = ((square + 1.12811678491632931402e2) * square + 2.23548839060100448583e3) * square +
                4.84406305325125486048e3;
  return tanh_of(u, u + u * square * (p / q));
}
