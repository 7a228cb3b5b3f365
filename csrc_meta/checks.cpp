#include "checks.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

namespace xent::checks {
namespace {

// Does the tensor have the dimensions [first, last) of `like`, and no others? torch compares the sizes, because a meta
// tensor's sizes may be symbolic, which takes a guard. The sums compute nothing.
bool has_shape(const Tensor& tensor, const Tensor& like, int64_t first, int64_t last) {
  if (tensor.dim() != last - first) {
    return false;
  }
  if (is_meta(tensor) || is_meta(like)) {
    std::vector<int64_t> other_dims;
    for (int64_t i = 0; i < like.dim(); ++i) {
      if (i < first || i >= last) {
        other_dims.push_back(i);
      }
    }
    return aten::call<bool>("aten::is_same_size", "", tensor, other_dims.empty() ? like : torch::stable::sum(like, other_dims));
  }
  const auto sizes = tensor.sizes(), expected = like.sizes();
  return std::equal(sizes.begin(), sizes.end(), expected.begin() + first);
}

// All dimensions but the last.
bool has_rows_of(const Tensor& tensor, const Tensor& matrix) {
  return has_shape(tensor, matrix, 0, matrix.dim() - 1);
}

bool is_float(const Tensor& tensor) {
  const ScalarType dtype = tensor.scalar_type();
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half ||
         dtype == ScalarType::Double;
}

// Does autograd record what this thread computes from the tensor? Then an alias of it is no leaf. The stable ABI has no
// requires_grad.
bool is_recorded(const Tensor& tensor) {
  return aoti_torch_grad_mode_is_enabled() &&
         !aten::call<bool>("aten::is_leaf", "", aten::call("aten::alias", "", tensor));
}

void matrix(const char* name, const Tensor& tensor) {
  XENT_CHECK(tensor.dim() >= 1 && is_float(tensor), name, " must be floating-point numbers of shape (..., V)");
  XENT_CHECK(!is_recorded(tensor), "a gradient is wanted for ", name,
             ", and libxent_ops.so has no autograd formulas, so it would be lost. `import xent_ops` in Python registers "
             "them. Without it, call in torch.no_grad() (torch::NoGradGuard), or inside a torch::autograd::Function");
}

void indices(const Tensor& target) {
  const ScalarType dtype = target.scalar_type();
  XENT_CHECK(dtype == ScalarType::Long || dtype == ScalarType::Int || dtype == ScalarType::Byte,
             "target must be class indices of int64, int32 or uint8");
}

void index_target(const Tensor& logits, const Tensor& target) {
  indices(target);
  XENT_CHECK(has_rows_of(target, logits), "target must be one class for each row");
}

void options_of(const Tensor& logits, const MaybeTensor& weight, const RowOptions& options) {
  XENT_CHECK(!weight || has_shape(*weight, logits, logits.dim() - 1, logits.dim()),
             "weight must be one number for each class");
  XENT_CHECK(options.label_smoothing >= 0 && options.label_smoothing <= 1, "label_smoothing must be from 0 to 1");
  XENT_CHECK(options.softcap.value_or(1.0) > 0, "softcap must be above 0");
  XENT_CHECK(std::isfinite(options.logit_scale) && std::abs(options.logit_scale) >= 0x1p-126,
             "logit_scale must be finite, and at least 2**-126 in magnitude");
}

void place_of(const cpu::Slice& place) {
  XENT_CHECK(place.num_classes >= 1 && place.class_start >= 0 && place.class_start <= place.num_classes,
             "class_start and num_classes must be a slice of the classes");
}

}  // namespace

void index(const Tensor& logits, const Tensor& target, const MaybeTensor& weight, const RowOptions& options) {
  matrix("logits", logits);
  index_target(logits, target);
  options_of(logits, weight, options);
}

void soft(const Tensor& logits, const Tensor& probabilities, const MaybeTensor& weight, const RowOptions& options) {
  matrix("logits", logits);
  XENT_CHECK(is_float(probabilities) && has_shape(probabilities, logits, 0, logits.dim()),
             "probabilities, the target, must be floating-point numbers of the shape of the logits");
  options_of(logits, weight, options);
}

void shard(const Tensor& logits, const Tensor& target, const cpu::Slice& place, const MaybeTensor& weight,
           const RowOptions& options) {
  index(logits, target, weight, options);
  place_of(place);
}

void rows(const char* name, const MaybeTensor& tensor, const Tensor& matrix) {
  XENT_CHECK(!tensor || (is_float(*tensor) && has_rows_of(*tensor, matrix)), name, " must be one number for each row");
}

void scalar_or_rows(const char* name, const MaybeTensor& tensor, const Tensor& matrix) {
  if (tensor && tensor->dim() > 0) {
    rows(name, tensor, matrix);
  }
}

void same_rows(const char* name, const MaybeTensor& tensor, const Tensor& target) {
  XENT_CHECK(!tensor || has_shape(*tensor, target, 0, target.dim()), name, " must be one number for each row");
}

void numbers_of_rows(const char* name, const Tensor& tensor, const Tensor& target) {
  XENT_CHECK(is_float(tensor), name, " must be floating-point numbers");
  same_rows(name, tensor, target);
}

void reduced_rows(const Tensor& target, const MaybeTensor& weight, const MaybeTensor& token_weight,
                  const std::string& value) {
  indices(target);
  XENT_CHECK(!weight || weight->dim() == 1, "weight must be one number for each class");
  same_rows("token_weight", token_weight, target);
  reduction(value, false);
}

void scale(const Tensor& grad, const Tensor& factor) {
  matrix("grad", grad);
  scalar_or_rows("factor", factor, grad);
}

void upstream(const Tensor& matrix, const Tensor& grad_loss, const MaybeTensor& grad_lse, const Tensor& lse,
              const MaybeTensor& divisors, const MaybeTensor& grad_entropy, const MaybeTensor& entropy) {
  scalar_or_rows("grad_loss", grad_loss, matrix);
  rows("grad_lse", grad_lse, matrix);
  rows("lse", lse, matrix);
  XENT_CHECK(!divisors || (divisors->dim() == 1 && divisors->size(0) == 2), "divisors must be two numbers");
  rows("grad_entropy", grad_entropy, matrix);
  rows("entropy", entropy, matrix);
  XENT_CHECK(grad_entropy.has_value() == entropy.has_value(), "grad_entropy and entropy go together");
}

void slice(int64_t class_start, MaybeInt num_classes, const MaybeTensor& weight,
           const MaybeTensor& lse_coefficient) {
  XENT_CHECK(num_classes || (class_start == 0 && !lse_coefficient),
             "class_start and lse_coefficient go with num_classes");
  if (num_classes) {
    place_of({class_start, *num_classes});
    XENT_CHECK(weight.has_value() == lse_coefficient.has_value(), "weight and lse_coefficient go together");
  }
}

void divergences(const Tensor& logits, const Tensor& teacher_logits, const Tensor& target, MaybeInt class_start,
                 const DivergenceOptions& options) {
  if (!CHECKED) {
    return;
  }
  index(logits, target, std::nullopt, options.student());
  matrix("teacher_logits", teacher_logits);
  options_of(teacher_logits, std::nullopt, options.teacher());
  const auto without_classes = [](const Tensor& tensor) { return aten::narrow(tensor, tensor.dim() - 1, 0, 0); };
  XENT_CHECK(aten::call<bool>("aten::is_same_size", "", without_classes(teacher_logits), without_classes(logits)),
             "teacher_logits must have the rows of the logits");
  XENT_CHECK(options.beta >= 0 && options.beta <= 1, "beta must be from 0 to 1");
  XENT_CHECK(options.temperature > 0 && std::isfinite(options.temperature), "temperature must be finite and above 0");
  int known = 0;
  for (int field = 0; field < cpu::kFields; ++field) {
    known += options.reads(field);
  }
  XENT_CHECK(known == 1 + std::count(options.fields.begin(), options.fields.end(), ','),
             "fields must be some of kl, reverse_kl, mixture, overlap, log_prob, with commas");
  XENT_CHECK(options.num_classes || !class_start, "class_start goes with num_classes");
  if (is_meta(logits) || is_meta(teacher_logits)) {
    return;
  }
  const int64_t width = logits.size(logits.dim() - 1), teacher_width = teacher_logits.size(logits.dim() - 1);
  const int64_t first = class_start.value_or(0);
  const int64_t classes = options.num_classes.value_or(std::max(width, teacher_width)) - first;
  const int64_t columns = std::min(width, classes);
  XENT_CHECK(first >= 0 && classes >= 0 && columns == std::min(teacher_width, classes) &&
                 (class_start || (columns == classes && columns > 0)),
             "logits and teacher_logits must have the same classes; num_classes is of padded ones");
}

void numbers_of_each_row(const char* name, const MaybeTensor& tensor, const Tensor& target, int number) {
  if (CHECKED && tensor) {
    const Tensor expected = aten::times(target, number);
    XENT_CHECK(is_float(*tensor) && has_shape(*tensor, expected, 0, expected.dim()), name, " must be ", number,
               " numbers for each row");
  }
}

void writable(const char* name, const Tensor& tensor) {
  XENT_CHECK(aten::call<int64_t>("aten::_debug_has_internal_overlap", "", tensor) != 1, name,
             " shares memory between its rows: no gradient can be written over it");
}

void reduction(const std::string& value, bool may_be_none) {
  XENT_CHECK(value == "mean" || value == "sum" || (may_be_none && value == "none"), "reduction cannot be ", value);
}

void target_values(const cpu::Problem& problem, int64_t num_classes) {
  const int64_t *values = problem.target, number = problem.rows, ignore_index = problem.ignore_index;
  const auto bad = [=](int64_t value) { return (value < 0 || value >= num_classes) && value != ignore_index; };
  const int64_t found = std::count_if(values, values + number, bad);
  if (found == 0) {
    return;
  }
  const auto text = [](int64_t value) { return std::to_string(value); };
  const int64_t first = *std::find_if(values, values + number, bad);
  const bool is_mark = found == std::count(values, values + number, first) && (found > 1 || first == 255);
  const std::string hint = first < 0 || is_mark
                               ? "to ignore targets of " + text(first) + ", pass ignore_index=" + text(first)
                               : "a part of a sharded head, as weight.to_local(), has a part of the classes";
  throw std::out_of_range("target " + text(first) + " is out of bounds: valid are 0 to " + text(num_classes - 1) +
                          " and ignore_index=" + text(ignore_index) + " (" + text(found) + " of " + text(number) +
                          " targets are out of bounds); " + hint);
}

void soft_values(double least) {
  if (least < 0.0) {
    std::ostringstream smallest;  // six digits, of small numbers too
    smallest << least;
    throw std::invalid_argument(
        "target of class probabilities has " + smallest.str() +
        " in a row that adds up to less than 0: pass target.exp() of log-probabilities, target.softmax(dim) of logits");
  }
}

}  // namespace xent::checks
