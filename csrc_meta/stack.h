// An operator's arguments and results as the stable ABI hands them over, read in the order of the schema.
#pragma once

#include "aten.h"
#include "cpu/kernels.h"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace xent {

using cpu::Options;

class Stack {
 public:
  Stack(StableIValue* values, uint64_t arguments, uint64_t results, bool meta)
      : meta(meta), values_(values), arguments_(arguments), results_(results) {}

  const bool meta;  // tensors have no data: results are allocated and nothing is computed

  template <class T>
  T next() {
    if (read_ == arguments_) {
      throw std::runtime_error("xent: the schema has fewer arguments than the kernel reads");
    }
    return torch::stable::detail::to<T>(values_[read_++]);
  }

  Tensor tensor() { return next<Tensor>(); }
  MaybeTensor maybe_tensor() { return next<MaybeTensor>(); }
  int64_t integer() { return next<int64_t>(); }
  double number() { return next<double>(); }

  Options soft_options() {
    Options options;
    read(soft_fields(options));
    return options;
  }

  Options options() {
    Options options;
    read(fields(options));
    return options;
  }

  cpu::Slice shard() {
    const int64_t class_start = integer();
    return {class_start, integer()};
  }

  void returns(const std::vector<Tensor>& results) {
    if (read_ != arguments_ || results.size() != results_) {
      throw std::runtime_error("xent: the kernel does not fit the schema");
    }
    for (size_t i = 0; i < results.size(); ++i) {
      values_[i] = torch::stable::detail::from(results[i]);
    }
  }

 private:
  template <class... Field>
  void read(std::tuple<Field&...> fields) {
    std::apply([this](Field&... field) { ((field = next<Field>()), ...); }, fields);
  }

  StableIValue* values_;
  uint64_t arguments_;
  uint64_t results_;
  uint64_t read_ = 0;
};

// An operator as a kernel of the dispatcher.
template <void (*operation)(Stack&), bool meta>
void boxed(StableIValue* values, uint64_t arguments, uint64_t results) {
  Stack stack(values, arguments, results, meta);
  operation(stack);
}

}  // namespace xent
