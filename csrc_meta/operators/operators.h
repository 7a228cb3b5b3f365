// The operators: functions with the arguments of their schemas (xent_ops/ops/schemas.py), in the same order. TORCH_BOX
// makes kernels of them. One function serves CPU and meta tensors. It checks its arguments and allocates the results.
// Meta tensors have no memory, so for them (is_meta) it computes nothing.
#pragma once

#include <torch/csrc/stable/library.h>

#include <functional>

namespace xent::operators {

using Kernel = void (*)(StableIValue*, uint64_t arguments, uint64_t results);
using Add = std::function<void(const char* name, Kernel)>;

// Each is one file.
void add_index(const Add&);
void add_soft(const Add&);
void add_shard(const Add&);
void add_divergences(const Add&);
// xent::cross_entropy. It calls other operators, so it serves any device.
void add_composite(const Add&);

inline void add_kernels(const Add& add) {
  for (const auto file : {add_index, add_soft, add_shard, add_divergences}) {
    file(add);
  }
}

}  // namespace xent::operators
