// A vocabulary split over ranks. Formulas and layout: xent_ops/kernels/reference_shard.py.

#include "kernels.h"
#include "scan.h"

namespace xent::cpu {
namespace {

constexpr std::int64_t kHeader = 5;
constexpr std::int64_t kDigit = std::int64_t(1) << 24;

// The header of a rank. An integer is two digits. Garbage becomes -1, so that the check of the tiling fails.
struct Header {
  std::int64_t start, size;
  double sum_weights;
};

template <class A>
std::int64_t integer(const A* digits) {
  const double value = double(digits[0]) * double(kDigit) + double(digits[1]);
  return value >= 0 && value < 0x1p62 ? std::int64_t(value) : -1;
}

// Do the shards tile [0, num_classes)? Each must start at 0 or at the end of another one, and no two at the same class.
bool tiles(const std::vector<Header>& headers, std::int64_t num_classes) {
  double together = 0;  // cannot overflow
  for (const Header& header : headers) {
    if (header.start < 0 || header.size < 0) return false;
    together += double(header.size);
    if (header.size == 0) continue;
    int same = 0, before = 0;
    for (const Header& other : headers) {
      if (other.size <= 0) continue;
      same += other.start == header.start;
      before += other.start + other.size == header.start;
    }
    if (same != 1 || (header.start != 0 && before == 0)) return false;
  }
  return together == double(num_classes);
}

}  // namespace

std::int64_t shard_width(const Problem& problem) {
  return (!problem.weight ? 3 : 4) * problem.rows + kHeader;
}

void shard_forward(const Problem& whole, Slice shard, MutableNumbers outputs, const Threads& threads) {
  const Problem problem = without_padding(whole, shard);
  dispatch(problem, [&]<class A>(A) {
    A* const out = outputs;
    const std::int64_t rows = problem.rows;
    const std::vector<double> weights = block_weights<A>(problem, threads);
    const bool smoothing = problem.label_smoothing > 0;
    const auto finish = [&](std::int64_t row, const Sums& sums) {
      const Target t = target_of(problem, shard, row);
      double part = 0;
      if (t.column >= 0) {
        part = (sums.pivot() - activated<A>(problem, row, t.column)) * weight_of<A>(problem, t.column);
      }
      if (smoothing) {
        part = (1 - problem.label_smoothing) * part;
        part += problem.label_smoothing / double(shard.num_classes) * sums.distance;
      }
      out[row] = A(sums.maximum);
      out[rows + row] = A(sums.total);
      out[2 * rows + row] = A(part);
      if (problem.weight) out[3 * rows + row] = t.column < 0 ? A(0) : A(weight_of<A>(problem, t.column));
      return Nothing{};
    };
    const Scan<A> scan{problem, false, false, smoothing ? &weights : nullptr};
    visit({rows}, problem.classes, threads, scan, finish, nullptr);

    A* header = out + shard_width(problem) - kHeader;
    header[0] = A(shard.class_start / kDigit);
    header[1] = A(shard.class_start % kDigit);
    header[2] = A(problem.classes / kDigit);
    header[3] = A(problem.classes % kDigit);
    double sum_weights = !problem.weight ? double(problem.classes) : 0;
    for (const double weight : weights) sum_weights += weight;
    header[4] = A(sum_weights);
  });
}

void shard_join(const Problem& problem, Slice shard, Numbers parts, std::int64_t ranks, MutableNumbers loss,
                MutableNumbers lse, MutableNumbers target_weight, MutableNumbers lse_coefficient,
                MutableNumbers low, const Threads& threads) {
  dispatch(problem, [&]<class A>(A) {
    const A* const gathered = parts;
    const std::int64_t rows = problem.rows, width = shard_width(problem);
    std::vector<Header> headers;
    for (std::int64_t rank = 0; rank < ranks; ++rank) {
      const A* header = gathered + (rank + 1) * width - kHeader;
      headers.push_back({integer(header), integer(header + 2), double(header[4])});
    }
    const bool tiled = tiles(headers, shard.num_classes);
    const double smoothing = problem.label_smoothing;

    for_each(threads, rows, 8 * ranks, [&](std::int64_t row) {
      const Target t(problem, row, 0, shard.num_classes, shard.num_classes);
      Sums top;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        top.maximum = std::max(top.maximum, double(gathered[rank * width + row]));
      }
      double total = 0, part = 0, sum_weights = 0, sum_shares = 0;
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const A* numbers = gathered + rank * width + row;
        const Header& header = headers[rank];
        Sums own;
        own.maximum = numbers[0];
        double weight = t.column >= header.start && t.column - header.start < header.size ? 1 : 0;
        if (problem.weight) weight = numbers[3 * rows];
        double share = weight;
        if (smoothing > 0) {
          share = (1 - smoothing) * weight + smoothing / double(shard.num_classes) * header.sum_weights;
        }
        total += numbers[rows] * std::exp(own.maximum - top.pivot());
        part += numbers[2 * rows] + share * (top.pivot() - own.pivot());
        sum_weights += weight;
        sum_shares += share;
      }
      const double log_total = std::log(total);
      loss.at<A>(row) = A(!t.counted ? 0 : t.valid && tiled ? part + sum_shares * log_total : kNaN);
      lse.at<A>(row) = A(tiled ? top.pivot() + log_total : kNaN);
      low.at<A>(row) = A(lse_low(lse.at<A>(row), top.pivot(), log_total));
      target_weight.at<A>(row) = A(t.counted ? sum_weights : 0);
      lse_coefficient.at<A>(row) = A(t.counted ? sum_shares : 0);
    });
  });
}

}  // namespace xent::cpu
