// Every CPU kernel on random problems, in buffers of exactly the right size, alone and with the work cut for several
// threads: a sanitizer watches what is read, this program that the bits are the same. Usage: kernels_main PROBLEMS SEED
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/kernels.h"

using namespace xent::cpu;
using Bytes = std::vector<unsigned char>;
using std::int64_t;

std::mt19937_64 generator;

int64_t below(int64_t end) { return int64_t(generator() % std::uint64_t(end)); }

template <class T>
T one_of(std::initializer_list<T> values) {
  return values.begin()[below(int64_t(values.size()))];
}

int64_t size_of(DType dtype) { return dtype == DType::float64 ? 8 : dtype == DType::float32 ? 4 : 2; }

struct Output {
  DType dtype;
  Bytes bytes;
};

bool is_nan(DType dtype, const unsigned char* element) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, element, size_of(dtype));  // little endian
  switch (dtype) {
    case DType::float32: return (bits & 0x7FFFFFFF) > 0x7F800000;
    case DType::bfloat16: return (bits & 0x7FFF) > 0x7F80;
    case DType::float16: return (bits & 0x7FFF) > 0x7C00;
    default: return (bits & ~(std::uint64_t(1) << 63)) > 0x7FF0000000000000;
  }
}

// The same bits; but of the sum of two NaN the compiler may keep either.
bool same(const Output& a, const Output& b) {
  const int64_t size = size_of(a.dtype);
  for (std::size_t i = 0; i < a.bytes.size(); i += size) {
    const unsigned char *one = a.bytes.data() + i, *other = b.bytes.data() + i;
    if (std::memcmp(one, other, size) != 0 && !(is_nan(a.dtype, one) && is_nan(a.dtype, other))) return false;
  }
  return a.bytes.size() == b.bytes.size();
}

// Any bits at all (NaN, infinities, subnormals among them), or numbers of a moderate size.
Bytes elements(DType dtype, int64_t number, bool any_bits) {
  Bytes bytes(number * size_of(dtype));
  for (int64_t i = 0; i < number; ++i) {
    const double value = double(below(2001) - 1000) / 100;
    std::uint64_t bits = generator();
    const float single = float(value);
    if (!any_bits && dtype == DType::float64) std::memcpy(&bits, &value, 8);
    if (!any_bits && dtype != DType::float64) std::memcpy(&bits, &single, 4);
    if (!any_bits && dtype == DType::bfloat16) bits = std::uint32_t(bits) >> 16;
    if (!any_bits && dtype == DType::float16) bits = generator() % 0x4A00;  // 0 to 12
    std::memcpy(bytes.data() + i * size_of(dtype), &bits, size_of(dtype));
  }
  return bytes;
}

// Work cut into `number` ranges: on threads of their own, or here from the last to the first.
Threads cut(int64_t number, bool spawn) {
  return {number, [=](int64_t begin, int64_t end, int64_t grain, const Threads::Body& body) {
            const int64_t ranges = std::min(number, (end - begin + grain - 1) / grain);
            std::vector<std::thread> threads;
            for (int64_t i = ranges - 1; i >= 0; --i) {
              const int64_t first = begin + (end - begin) * i / ranges, last = begin + (end - begin) * (i + 1) / ranges;
              if (spawn) {
                threads.emplace_back([=, &body] { body(first, last); });
              } else {
                body(first, last);
              }
            }
            for (std::thread& thread : threads) thread.join();
          }};
}

// Rows of `classes` elements with one or two strides, in a buffer that ends with the last of them.
struct Matrix {
  Bytes bytes;
  int64_t inner, outer_stride, stride;

  Matrix(DType dtype, int64_t rows, int64_t classes, bool any_bits) {
    inner = one_of<int64_t>({std::max<int64_t>(rows, 1), 1, 2});
    stride = classes + below(3);
    outer_stride = inner * stride + below(3);
    const int64_t last = rows - 1;
    bytes = elements(dtype, rows ? last / inner * outer_stride + last % inner * stride + classes : 0, any_bits);
  }

  Rows read() const { return {bytes.data(), inner, outer_stride, stride}; }
  MutableRows write() { return {bytes.data(), inner, outer_stride, stride}; }
};

struct Everything {
  DType dtype = one_of({DType::float32, DType::bfloat16, DType::float16, DType::float64});
  DType accumulator = dtype == DType::float64 ? DType::float64 : DType::float32;
  int64_t rows = below(8), classes = one_of<int64_t>({below(70) + 1, below(70) + 1, 4096, 4097, 8200 + below(20)});
  bool any_bits = below(3) == 0;
  Matrix logits{dtype, rows, classes, any_bits};
  DType target_dtype = one_of({DType::float32, DType::bfloat16, DType::float16, DType::float64});
  Matrix probabilities{target_dtype, rows, classes, any_bits};
  int64_t teacher_classes = classes + below(4);
  Matrix teacher{dtype, rows, teacher_classes, any_bits};
  Bytes statistics = elements(accumulator, kStatistics * rows, any_bits);
  Bytes upstream = elements(accumulator, kFields * rows, any_bits);
  Divergences divergences;
  std::vector<int64_t> target;
  Bytes weight = per_class(), grad = per_row(), saved = per_row();
  Bytes teacher_lse;  // and lse_low
  Problem problem;
  Slice shard{below(5), 0};
  int64_t ranks = below(4);
  Bytes gathered;

  Bytes per_class() const { return elements(accumulator, classes, any_bits); }
  Bytes per_row() const { return elements(accumulator, rows, any_bits); }

  Everything() {
    using limits = std::numeric_limits<int64_t>;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t inside = below(classes);
      target.push_back(one_of<int64_t>({inside, inside, inside, -100, classes, -1, limits::min(), limits::max()}));
    }
    target.shrink_to_fit();
    problem.dtype = dtype;
    problem.rows = rows;
    problem.classes = classes;
    problem.logits = logits.read();
    problem.target = target.data();
    if (below(2)) problem.weight = weight.data();
    problem.label_smoothing = one_of({0.0, 0.1, 1.0});
    if (one_of({0.0, 1.0}) > 0) problem.softcap = 5.0;
    problem.logit_scale = one_of({1.0, -0.5, 0.0});
    shard.num_classes = shard.class_start + one_of<int64_t>({0, 1, classes, classes + 9});
    divergences.student = divergences.teacher = problem;
    divergences.teacher.classes = teacher_classes;
    divergences.teacher.logits = teacher.read();
    divergences.slice = {0, std::max<int64_t>(classes - below(3), 1)};
    divergences.beta = 0.4;
    divergences.temperature = one_of({1.0, 2.0});
    for (bool& reads : divergences.reads) reads = below(2);
    gathered = elements(accumulator, ranks * shard_width(problem), below(2) != 0);
    teacher_lse = elements(accumulator, 2 * rows, below(2) != 0);
  }

  // All that the kernels write.
  std::vector<Output> run(const Threads& threads) const {
    std::vector<Output> out;
    const auto add = [&](DType type, Bytes bytes) {
      out.push_back({type, std::move(bytes)});
      return out.back().bytes.data();
    };
    const auto values = [&](int64_t number) { return add(accumulator, Bytes(number * size_of(accumulator), 0xAB)); };
    const Slice all{0, classes};
    const PerRow each{grad.data(), 1}, same{rows ? grad.data() : nullptr, 0}, none;
    const auto gradient = [&](auto call) {
      Matrix to = logits;  // other strides than the logits' where it is not they
      to.stride = classes + (to.inner > 1), to.outer_stride = to.inner * to.stride;
      to.bytes.assign(rows * to.outer_stride * size_of(dtype), 0xCD);
      call(to);
      add(dtype, to.bytes);
    };
    out.reserve(96);
    std::vector<int64_t> argmax(rows);
    forward(problem, false, {values(rows), values(rows), argmax.data(), values(rows), values(rows)}, threads);
    for (const bool only_counted : {false, true}) forward(problem, only_counted, {values(rows), values(rows)}, threads);
    for (const int64_t column : argmax) {
      if (column < 0 || column >= classes) std::abort();
    }
    add(DType::float64, Bytes(reinterpret_cast<unsigned char*>(argmax.data()),
                              reinterpret_cast<unsigned char*>(argmax.data() + rows)));
    gradient([&](Matrix& to) {
      backward(problem, all, {each, same, each, saved.data(), saved.data()}, to.write(), threads);
    });
    unsigned char* const two = values(2);
    divisors(problem, nullptr, nullptr, two);
    divisors(problem, saved.data(), saved.data(), values(2));
    row_factors(problem, two, nullptr, 0.1, values(1), values(1));
    row_factors(problem, two, saved.data(), 0.1, values(rows), values(rows));
    for (const bool mean : {false, true}) {
      reduce(problem, grad.data(), saved.data(), nullptr, nullptr, two, 0.1, mean, {values(1)});
      reduce(problem, grad.data(), saved.data(), saved.data(), argmax.data(), two, 0.1, mean,
             {values(1), values(1), values(1)});
    }
    gradient([&](Matrix& to) {
      backward(problem, all, {same, none, none, saved.data(), {}, {}, two, 0.1, saved.data()}, to.write(), threads);
    });
    Matrix over = logits;
    Problem in_place = problem;
    in_place.logits = over.read();
    backward(in_place, all, {same, none, each, saved.data(), saved.data()}, over.write(), threads);
    add(dtype, over.bytes);
    scale_grad(problem, over.write(), each, threads);
    add(dtype, over.bytes);
    over.bytes = logits.bytes;
    with_grad(in_place, same, each, {values(rows), values(rows), argmax.data(), values(rows)}, over.write(), threads);
    add(dtype, over.bytes);
    for (const int64_t column : argmax) {
      if (column < -1 || column >= classes) std::abort();
    }
    over.bytes = logits.bytes;
    with_grad(in_place, same, none, {values(rows), values(rows)}, over.write(), threads);
    add(dtype, over.bytes);
    soft_forward(problem, target_dtype, probabilities.read(), below(2) != 0, values(rows), values(rows), threads);
    gradient([&](Matrix& to) {
      soft_backward(problem, target_dtype, probabilities.read(), {each, none, none, saved.data()}, to.write(), threads);
    });
    shard_forward(problem, shard, values(shard_width(problem)), threads);
    shard_join(problem, shard, gathered.data(), ranks, values(rows), values(rows), values(rows), values(rows),
               values(rows), threads);
    for (const PerRow& of_entropy : {none, each}) {
      gradient([&](Matrix& to) {
        backward(problem, shard, {each, each, of_entropy, saved.data(), saved.data(), saved.data(), two, 0.1},
                 to.write(), threads);
      });
    }
    const auto pair = [&](Divergences how, Numbers teacher_lse, Numbers joined) {
      divergences_forward(how, teacher_lse, joined, values(kFields * rows), values(kStatistics * rows), threads);
      gradient([&](Matrix& to) {
        divergences_backward(how, upstream.data(), statistics.data(), to.write(), threads);
      });
      over.bytes = logits.bytes;
      how.student.logits = over.read();
      divergences_with_grad(how, 0.5, same, values(rows), over.write(), threads);
      add(dtype, over.bytes);
    };
    pair(divergences, nullptr, nullptr);
    pair(divergences, teacher_lse.data(), nullptr);
    Divergences of_slice = divergences;
    of_slice.all_classes = false;
    of_slice.slice = {2, 2 + divergences.slice.num_classes};
    pair(of_slice, nullptr, nullptr);
    pair(of_slice, nullptr, statistics.data());
    return out;
  }
};

int main(int count, char** arguments) {
  if (count != 3) return 2;
  generator.seed(std::stoull(arguments[2]));
  for (int64_t i = 0, problems = std::stoll(arguments[1]); i < problems; ++i) {
    const Everything everything;
    const std::vector<Output> alone = everything.run(cut(1, false));
    for (const Threads& threads : {cut(2, true), cut(5, false), cut(64, false)}) {
      const std::vector<Output> cut_up = everything.run(threads);
      for (std::size_t output = 0; output < alone.size(); ++output) {
        if (!same(alone[output], cut_up[output])) {
          std::printf("problem %lld: output %zu has other bits on %lld threads\n", (long long)i, output,
                      (long long)threads.number);
          return 1;
        }
      }
    }
  }
  std::printf("%s: no difference\n", instruction_set());
}
