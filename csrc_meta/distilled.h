// The options of a distillation, in the order of its schemas.
#pragma once

#include "stack.h"

#include <cmath>

namespace xent {

struct Distilled {
  int64_t ignore_index;
  std::optional<int64_t> num_classes;
  double beta, temperature, hard_weight;
  std::optional<double> softcap;
  double logit_scale;
  std::optional<double> teacher_softcap;
  double teacher_logit_scale;

  explicit Distilled(Stack& stack)
      : ignore_index(stack.integer()),
        num_classes(stack.next<std::optional<int64_t>>()),
        beta(stack.number()),
        temperature(stack.number()),
        hard_weight(stack.number()),
        softcap(stack.next<std::optional<double>>()),
        logit_scale(stack.number()),
        teacher_softcap(stack.next<std::optional<double>>()),
        teacher_logit_scale(stack.number()) {}

  // As a row operator takes them.
  auto fields() const {
    return std::make_tuple(ignore_index, num_classes, beta, temperature, hard_weight, softcap, logit_scale,
                           teacher_softcap, teacher_logit_scale);
  }

  // What makes x of logits at a temperature of one.
  Options student() const { return {ignore_index, 0.0, softcap, logit_scale}; }
  Options teacher() const { return {ignore_index, 0.0, teacher_softcap, teacher_logit_scale}; }
};

}  // namespace xent
