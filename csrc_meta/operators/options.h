// Types of the operators' arguments, and the options of a distillation in the order of its schemas.
#pragma once

#include "aten.h"
#include "cpu/kernels.h"

#include <cstdint>
#include <optional>

namespace xent {

using cpu::RowOptions;
using MaybeDtype = std::optional<ScalarType>;
using MaybeInt = std::optional<int64_t>;
using MaybeNumber = std::optional<double>;

struct DistillationOptions {
  int64_t ignore_index;
  MaybeInt num_classes;
  double beta, temperature, hard_weight;
  MaybeNumber softcap;
  double logit_scale;
  MaybeNumber teacher_softcap;
  double teacher_logit_scale;

  // The activation that turns logits into x, at a temperature of one.
  RowOptions student() const { return {ignore_index, 0.0, softcap, logit_scale}; }
  RowOptions teacher() const { return {ignore_index, 0.0, teacher_softcap, teacher_logit_scale}; }
};

}  // namespace xent
