// Types of the operators' arguments, and those of divergences in the order of their schemas.
#pragma once

#include "aten.h"
#include "cpu/kernels.h"

#include <cstdint>
#include <optional>
#include <string>

namespace xent {

using cpu::RowOptions;
using MaybeDtype = std::optional<ScalarType>;
using MaybeInt = std::optional<int64_t>;
using MaybeNumber = std::optional<double>;

struct DivergenceOptions {
  int64_t ignore_index;
  MaybeInt num_classes;
  double beta, temperature;
  MaybeNumber softcap;
  double logit_scale;
  MaybeNumber teacher_softcap;
  double teacher_logit_scale;
  std::string fields;  // names with commas

  // The activation that turns logits into x, at a temperature of one.
  RowOptions student() const { return {ignore_index, 0.0, softcap, logit_scale}; }
  RowOptions teacher() const { return {ignore_index, 0.0, teacher_softcap, teacher_logit_scale}; }

  bool reads(int field) const {
    static constexpr const char* NAMES[] = {",kl,", ",reverse_kl,", ",mixture,", ",overlap,", ",log_prob,"};
    return ("," + fields + ",").find(NAMES[field]) != std::string::npos;
  }
};

}  // namespace xent
