#include "checks_parts.h"

#include <algorithm>

namespace xent::checks {
namespace {

// What kernels compute with: the temperature divides both the cap and the scale.
void divided_options(const char* prefix, const Tensor& tensor, Options options, double temperature) {
  if (options.softcap) {
    options.softcap = *options.softcap / temperature;
  }
  options.logit_scale /= temperature;
  try {
    check_options(std::nullopt, tensor, options);
  } catch (const std::invalid_argument& error) {
    require(false, prefix, error.what(), temperature == 1.0 ? "" : text(" (divided by temperature=", temperature, ")"));
  }
}

// Of all dimensions but the last.
void same_rows(const char* name, const Tensor& tensor, const Tensor& owner, const char* meaning) {
  auto expected = sizes_of(owner), found = sizes_of(tensor);
  if (!expected || !found) {
    const bool as_many = tensor.dim() == owner.dim();
    require(as_many && aten::call<bool>("aten::is_same_size", "", part_of(tensor, 0, tensor.dim() - 1),
                                        part_of(owner, 0, owner.dim() - 1)),
            name, " has other rows than expected: ", meaning);
    return;
  }
  expected->pop_back();
  found->pop_back();
  require(found == expected, name, " has shape ", shape(found), "; expected ", shape(expected), ", ", meaning);
}

int64_t columns_of(int64_t width, int64_t class_start, int64_t num_classes) {
  return std::min(width, num_classes - class_start);
}

// Of tensors whose last dimension is the classes, and what the caller calls what has them.
void slices(const Tensor& logits, const Tensor& teacher_logits, std::optional<int64_t> class_start,
            const std::optional<int64_t>& number, const char* name, const char* teacher_name) {
  require(number || !class_start, "class_start=", class_start.value_or(0),
          " is of a slice: num_classes must say how many classes all have");
  const auto sizes = sizes_of(logits), teacher_sizes = sizes_of(teacher_logits);
  if (!sizes || !teacher_sizes) {
    const int64_t last = logits.dim() - 1;
    require(number || aten::call<bool>("aten::is_same_size", "", part_of(logits, last, last + 1),
                                       part_of(teacher_logits, last, last + 1)),
            name, " and ", teacher_name, " have not as many classes; where one is padded behind the classes that both ",
            "have, say how many those are: num_classes=");
    return;
  }
  const int64_t width = sizes->back(), teacher_width = teacher_sizes->back();
  if (!number) {
    require(width == teacher_width, name, " has ", width, " classes but ", teacher_name, " ", teacher_width,
            "; where one is padded behind the classes that both have, say how many those are: num_classes=");
    return;
  }
  if (!class_start) {
    require(*number <= width, "num_classes=", *number, " is more than the ", width, " of ", name);
    require(*number <= teacher_width, "num_classes=", *number, " is more than the ", teacher_width, " of ",
            teacher_name);
    require(*number >= 1, "num_classes must be at least 1, got ", *number);
    return;
  }
  for (const int64_t size : {width, teacher_width}) {
    shard_range(size, {*class_start, *number});
  }
  const int64_t columns = columns_of(width, *class_start, *number);
  const int64_t others = columns_of(teacher_width, *class_start, *number);
  require(columns == others, name, " has ", columns, " of the ", *number, " classes from class_start=", *class_start,
          " on but ", teacher_name, " ", others, "; the student's head and the teacher's must be split at the same classes");
}

}  // namespace

void distillation_options(const Distilled& how, const Tensor& student, const Tensor& teacher) {
  require(how.beta >= 0.0 && how.beta <= 1.0, "beta must be between 0.0 and 1.0, got ", how.beta);
  require(how.temperature > 0.0 && std::isfinite(how.temperature),
          "temperature must be a finite number above 0, got ", how.temperature);
  require(std::isfinite(how.hard_weight), "hard_weight must be finite, got ", how.hard_weight);
  divided_options("", student, how.student(), how.temperature);
  divided_options("teacher_", teacher, how.teacher(), how.temperature);
}

void distillation(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target,
                  std::optional<int64_t> class_start, const Distilled& how) {
  check_logits(logits, class_start.has_value());
  check_dtype("teacher_logits", teacher_logits, FLOATS);
  if (teacher_logits.dim() != logits.dim()) {
    same_shape("teacher_logits", teacher_logits, logits, 0, logits.dim(), "as the logits");
  }
  same_rows("teacher_logits", teacher_logits, logits, "the rows of the logits, which are before the classes");
  same_device("teacher_logits", teacher_logits, logits);
  check_index_target(logits, target);
  distillation_options(how, logits, teacher_logits);
  slices(logits, teacher_logits, class_start, how.num_classes, "logits", "teacher_logits");
}

void distillation_heads(const Tensor& input, const Tensor& linear_weight, const MaybeTensor& linear_bias,
                        const Tensor& target, const Tensor& teacher_input, const Tensor& teacher_weight,
                        const MaybeTensor& teacher_bias, const Distilled& how,
                        std::optional<ScalarType> accumulate_dtype) {
  head(input, linear_weight, linear_bias, accumulate_dtype, {});
  head(teacher_input, teacher_weight, teacher_bias, std::nullopt, {"teacher_input", "teacher_weight", "teacher_bias"});
  same_device("teacher_input", teacher_input, input, "input is");
  same_rows("teacher_input", teacher_input, input, "the rows of input, before the features");
  target_of_head(input, target);
  distillation_options(how, input, teacher_input);
  const auto classes_last = [](const Tensor& weight) { return aten::call("aten::t", "", weight); };
  slices(classes_last(linear_weight), classes_last(teacher_weight), std::nullopt, how.num_classes, "linear_weight",
         "teacher_weight");
}

void joined(const MaybeTensor& tensor, std::optional<int64_t> class_start, const Distilled& how, const Tensor& target,
            const Tensor& logits) {
  if (tensor) {
    require(class_start && how.beta > 0.0 && how.beta < 1.0,
            "joined statistics are for a slice of the classes, class_start=, at a beta between 0 and 1");
    distillation_statistics("joined", *tensor, target, logits);
  }
}

void distillation_statistics(const char* name, const Tensor& tensor, const Tensor& target, const Tensor& logits) {
  check_dtype(name, tensor, FLOATS);
  const Tensor expected = aten::four_times(target);
  same_shape(name, tensor, expected, 0, expected.dim(), "those that distillation_forward makes of each row");
  same_device(name, tensor, logits);
}

}  // namespace xent::checks
