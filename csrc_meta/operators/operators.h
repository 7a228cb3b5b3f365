// The operators: functions with the arguments of their schemas (xent_ops/ops/schemas.py), in the same order, which
// TORCH_BOX makes kernels of. One function serves the CPU and meta tensors, which have no memory: it checks its
// arguments, allocates the results, and computes unless is_meta.
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
void add_distillation(const Add&);
// xent::cross_entropy, which calls other operators, on any device.
void add_composite(const Add&);

inline void add_kernels(const Add& add) {
  for (const auto file : {add_index, add_soft, add_shard, add_distillation}) {
    file(add);
  }
}

}  // namespace xent::operators
