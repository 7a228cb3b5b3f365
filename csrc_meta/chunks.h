// The head and the loss as one by chunks of rows: xent_ops/head/chunks.py, whose reasons hold here.
#pragma once

#include "outputs.h"
#include "reductions.h"

#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <algorithm>

namespace xent::operators {

// Of the sizes of chunks: those of the CPU in sizes.py.
constexpr int64_t ROWS = 512;
constexpr int64_t MULTIPLE = 128;
constexpr int64_t MOST_BYTES = int64_t{1} << 30;  // of a chunk's logits

using Mask = std::vector<bool>;  // which gradients are wanted: of input, linear_weight and linear_bias

// For the life of one: calls of torch record nothing for autograd, which stands above the operators.
class NoGrad {
 public:
  NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled()) { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(enabled_); }
  NoGrad(const NoGrad&) = delete;

 private:
  bool enabled_;
};

struct Head {
  Tensor input;
  Tensor linear_weight;
  Tensor target;
  MaybeTensor linear_bias;
  MaybeTensor weight;
  Options options;
  std::optional<ScalarType> accumulate_dtype;
  std::optional<int64_t> chunk_rows;
  bool skip_ignored = false;
  std::optional<ScalarType> logits_dtype;
  std::optional<std::string> products;

  void read_chunks(Stack& stack) {
    chunk_rows = stack.next<std::optional<int64_t>>();
    skip_ignored = stack.next<bool>();
  }

  void read_chunking(Stack& stack) {
    read_chunks(stack);
    logits_dtype = stack.next<std::optional<ScalarType>>();
    products = stack.next<std::optional<std::string>>();
  }

  void check() const {
    checks::linear(input, linear_weight, target, linear_bias, weight, options, accumulate_dtype, chunk_rows,
                   logits_dtype, products);
  }

  ScalarType dtype() const { return input.scalar_type(); }

  // Of the gradient of the logits.
  std::optional<ScalarType> grad_dtype() const { return logits_dtype ? std::optional(dtype()) : std::nullopt; }

  // In which the chunks' parts of linear_weight's gradient are added up.
  ScalarType sums() const {
    return accumulate_dtype.value_or(dtype() == ScalarType::Half ? ScalarType::Float : dtype());
  }

  Tensor row_values() const { return per_row(input, target); }

  // Calls a row operator, whose options come last.
  template <size_t results, class... Args>
  std::vector<Tensor> rows(const char* name, const Args&... args) const {
    return aten::call_all<results>(name, "", args..., fields(options));
  }
};

// Room for the gradients, (0,) for those that are not wanted; that of the bias holds zeros.
inline std::vector<Tensor> gradients(const Head& head, const Tensor& input, const Mask& mask, ScalarType weight_dtype,
                                     ScalarType bias_dtype) {
  return {mask[0] ? aten::empty_like(input, head.dtype()) : none(input, head.dtype()),
          mask[1] ? aten::empty_like(head.linear_weight, weight_dtype) : none(input, weight_dtype),
          mask[2] ? zero_per_class(head.linear_weight, bias_dtype) : none(input, bias_dtype)};
}

inline Tensor as_rows(const Tensor& tensor) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < tensor.dim(); ++i) {
    rows *= tensor.size(i);
  }
  const std::vector<int64_t> shape{rows, tensor.size(tensor.dim() - 1)};
  return torch::stable::reshape(tensor, shape);
}

struct Chunk {
  int64_t first;
  int64_t rows;

  Tensor of(const Tensor& tensor) const { return aten::narrow(tensor, 0, first, rows); }

  // Copies one number a row to where it belongs.
  void put(const Tensor& all, const Tensor& made) const {
    Tensor place = of(all);
    torch::stable::copy_(place, made);
  }
};

// Which rows are computed: all, or the counted ones alone. As in xent_ops/head/packing.py.
class Rows {
 public:
  explicit Rows(const Head& head) : like_(head.target), target(bridge::dense(head.target, ScalarType::Long)) {
    target = aten::flatten(target);
    if (head.skip_ignored) {
      const Tensor counted = is_counted(target, head.options.ignore_index);
      order_ = aten::flatten(aten::call("aten::nonzero", "", counted));
      target = take(target);
    }
  }

  // Rows (N, ...) to (M, ...).
  Tensor take(const Tensor& rows) const {
    return order_ ? aten::call("aten::index_select", "", rows, int64_t{0}, *order_) : rows;
  }

  MaybeTensor take_values(const MaybeTensor& values) const {
    return values ? MaybeTensor(take(aten::flatten(*values))) : values;
  }

  Tensor new_values(ScalarType dtype) const { return aten::empty_like(target, dtype); }

  // (M, ...) to rows of the shape of `like`, with this number in those that were not computed.
  Tensor give(const Tensor& rows, const Tensor& like, double otherwise) const {
    if (!order_) {
      return aten::call("aten::view_as", "", rows, like);
    }
    const Tensor all = torch::stable::fill_(aten::empty_like(like, rows.scalar_type()), otherwise);
    const Tensor flat = rows.dim() == 1 ? aten::flatten(all) : as_rows(all);
    aten::call("aten::index_copy_", "", flat, int64_t{0}, *order_, rows);
    return all;
  }

  Tensor give_values(const Tensor& values, double otherwise) const { return give(values, like_, otherwise); }

 private:
  Tensor like_;
  MaybeTensor order_;

 public:
  Tensor target;  // (M,)
};

inline int64_t divided_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

inline int64_t rows_of_chunk(const Tensor& input, int64_t classes, std::optional<int64_t> chunk_rows,
                             std::optional<ScalarType> logits_dtype) {
  const int64_t number = std::max<int64_t>(input.size(0), 1);
  // The logits may be wider than the input, in float32 alone.
  const int64_t least = logits_dtype == ScalarType::Float ? 4 : 1;
  const int64_t row_bytes = classes * std::max<int64_t>(input.element_size(), least);
  int64_t rows = chunk_rows.value_or(ROWS);
  while (!chunk_rows && rows > 1 && rows * row_bytes > MOST_BYTES) {
    rows /= 2;
  }
  if (chunk_rows || number <= rows) {
    return std::min(number, rows);
  }
  const int64_t even = divided_up(number, divided_up(number, rows));
  return std::min(rows, divided_up(even, MULTIPLE) * MULTIPLE);
}

inline void zero(const Tensor& rows, int64_t first, int64_t last) {
  Tensor columns = aten::narrow(rows, 1, first, last - first);
  torch::stable::zero_(columns);
}

inline void multiply(const Tensor& out, const Tensor& left, const Tensor& right) {
  aten::call("aten::mm", "out", left, right, out);
}

// Without the dispatcher, whose aten::addmm takes Scalars: the stable ABI has none.
inline void multiply_and_add(const Tensor& out, const Tensor& added, const Tensor& left, const Tensor& right) {
  aten::succeed(aoti_torch_cpu_addmm_out(out.get(), added.get(), left.get(), right.get(), 1.0, 1.0), "aten::addmm");
}

// The product of a chunk of rows with a head, in memory that all chunks share.
class ChunkLogits {
 public:
  ChunkLogits(const Tensor& input, const Tensor& linear_weight, const MaybeTensor& linear_bias, int64_t size,
              std::optional<ScalarType> logits_dtype = std::nullopt)
      : input_(input),
        dtype_(logits_dtype.value_or(input.scalar_type())),
        columns_(aten::call("aten::t", "", aten::to(linear_weight, dtype_))),
        bias_(linear_bias ? MaybeTensor(aten::to(*linear_bias, dtype_)) : std::nullopt) {
    // As in head/sizes.py, with zeros behind the classes. Wider logits are those of wider operands.
    const int64_t classes = linear_weight.size(0), step = 16 / static_cast<int64_t>(input.element_size());
    const std::vector<int64_t> shape{size, divided_up(classes, step) * step};
    const Tensor padded = torch::stable::new_empty(input, shape, dtype_);
    zero(padded, classes, shape[1]);
    memory_ = aten::narrow(padded, 1, 0, classes);
  }

  Tensor of(const Chunk& chunk) const {
    const Tensor logits = aten::narrow(*memory_, 0, 0, chunk.rows);
    const Tensor rows = aten::to(chunk.of(input_), dtype_);
    if (bias_) {
      multiply_and_add(logits, *bias_, rows, columns_);
    } else {
      multiply(logits, rows, columns_);
    }
    return logits;
  }

 private:
  Tensor input_;
  ScalarType dtype_;
  Tensor columns_;
  MaybeTensor bias_;
  MaybeTensor memory_;
};

// Calls body(chunk, its logits, which may be overwritten) for each chunk; without rows for one that is empty.
template <class Body>
void for_each_chunk(const Head& head, const Tensor& input, const Body& body) {
  const int64_t number = input.size(0);
  const int64_t size = rows_of_chunk(input, head.linear_weight.size(0), head.chunk_rows, head.logits_dtype);
  const ChunkLogits logits(input, head.linear_weight, head.linear_bias, size, head.logits_dtype);
  for (int64_t first = 0; first < std::max<int64_t>(number, 1); first += size) {
    const Chunk chunk{first, std::min(size, number - first)};
    body(chunk, logits.of(chunk));
  }
}

// Turns the gradients of chunks of logits into those of input, linear_weight and linear_bias.
class Products {
 public:
  Products(const Head& head, const Tensor& input, const Mask& mask)
      : made(gradients(head, input, mask, head.sums(), bridge::accumulator(input))),
        head_(head.linear_weight),
        input_(input),
        mask_(mask) {}

  void add(const Chunk& chunk, const Tensor& logits) {
    const Tensor gradient = aten::front_of(logits, input_.scalar_type());
    if (gradient.scalar_type() != logits.scalar_type()) {  // as gradient_in of head/products.py
      const Tensor all = aten::call("aten::view", "dtype", logits, gradient.scalar_type());
      zero(all, logits.size(1), std::min(logits.size(1) + 64, all.size(1)));
    }
    if (mask_[0]) {
      multiply(chunk.of(made[0]), gradient, head_);
    }
    if (mask_[1]) {
      const ScalarType sums = made[1].scalar_type();
      const Tensor left = aten::to(aten::call("aten::t", "", gradient), sums);
      const Tensor right = aten::to(chunk.of(input_), sums);
      chunk.first == 0 ? multiply(made[1], left, right) : multiply_and_add(made[1], made[1], left, right);
    }
    if (mask_[2]) {
      made[2] = aten::add(made[2], aten::sum(gradient, {{0}}, made[2].scalar_type()));
    }
  }

  std::vector<Tensor> made;

 private:
  Tensor head_;
  Tensor input_;
  Mask mask_;
};

}  // namespace xent::operators
