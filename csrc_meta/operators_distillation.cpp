// A student's logits beside its teacher's.
#include "operators.h"

#include "distilled.h"
#include "outputs.h"

namespace xent::operators {
namespace {

struct Both {
  explicit Both(Stack& stack) : logits(stack.tensor()), teacher_logits(stack.tensor()), target(stack.tensor()) {}

  void check(std::optional<int64_t> class_start, const Distilled& how) const {
    checks::distillation(logits, teacher_logits, target, class_start, how);
  }

  Tensor logits;
  Tensor teacher_logits;
  Tensor target;
};

// As the kernels take them. Keeps the memory of what was converted.
class Problem : public cpu::Distillation {
 public:
  Problem(const Both& both, const Tensor& values, std::optional<int64_t> class_start, const Distilled& how)
      : student_(values, both.target, std::nullopt, how.student()),
        teacher_(in_same_precision(both), std::nullopt, std::nullopt, how.teacher()) {
    student = student_;
    teacher = teacher_;
    slice = {class_start.value_or(0), how.num_classes.value_or(student.classes)};
    whole = !class_start;
    beta = how.beta;
    temperature = how.temperature;
    hard_weight = how.hard_weight;
    if (hard_weight != 0.0) {
      student_.check_targets(slice.num_classes);
    }
  }

 private:
  // The kernels read any dtype of 32 bits or fewer beside another, and float64 beside itself.
  static Tensor in_same_precision(const Both& both) {
    const ScalarType dtype = bridge::accumulator(both.logits);
    const bool same = bridge::accumulator(both.teacher_logits) == dtype;
    return same ? both.teacher_logits : aten::to(both.teacher_logits, dtype);
  }

  bridge::Problem student_;
  bridge::Problem teacher_;
};

struct Backward {
  static constexpr std::optional<ScalarType> grad_dtype{};

  explicit Backward(Stack& stack)
      : grad_loss(stack.tensor()),
        both(stack),
        logits(both.logits),
        statistics(stack.tensor()),
        class_start(stack.next<std::optional<int64_t>>()),
        how(stack) {
    both.check(class_start, how);
    checks::scalar_or_row_values("logits", logits, "grad_loss", grad_loss);
    checks::distillation_statistics("statistics", statistics, both.target, logits);
  }

  std::vector<Tensor> outputs() const { return {}; }

  void write(const std::vector<Tensor>&, const Tensor& values, cpu::MutableRows grad) const {
    const ScalarType dtype = bridge::accumulator(logits);
    const Tensor of_rows = bridge::dense(statistics, dtype);
    cpu::distillation_backward(Problem(both, values, class_start, how), bridge::PerRow(grad_loss, dtype).values,
                               of_rows.const_data_ptr(), grad, bridge::threads(logits, how.softcap ? how.softcap : how.teacher_softcap));
  }

  Tensor grad_loss;
  Both both;
  Tensor logits;
  Tensor statistics;
  std::optional<int64_t> class_start;
  Distilled how;
};

struct WithGrad {
  static constexpr std::optional<ScalarType> grad_dtype{};

  explicit WithGrad(Stack& stack) : both(stack), logits(both.logits), grad_scale(stack.tensor()), how(stack) {
    both.check(std::nullopt, how);
    checks::scalar_or_row_values("logits", logits, "grad_scale", grad_scale);
  }

  std::vector<Tensor> outputs() const { return {per_row(logits, both.target)}; }

  void write(const std::vector<Tensor>& outputs, const Tensor& values, cpu::MutableRows grad) const {
    const bridge::PerRow scale(grad_scale, bridge::accumulator(logits));
    cpu::distillation_with_grad(Problem(both, values, std::nullopt, how), scale.values, outputs[0].mutable_data_ptr(),
                                grad, bridge::threads(logits, how.softcap ? how.softcap : how.teacher_softcap));
  }

  Both both;
  Tensor logits;
  Tensor grad_scale;
  Distilled how;
};

}  // namespace

void distillation_forward(Stack& stack) {
  const Both both(stack);
  const MaybeTensor joined = stack.maybe_tensor();
  const auto class_start = stack.next<std::optional<int64_t>>();
  const Distilled how(stack);
  both.check(class_start, how);
  checks::joined(joined, class_start, how, both.target, both.logits);
  const Tensor loss = per_row(both.logits, both.target), statistics = per_row(both.logits, aten::four_times(both.target));
  if (!stack.meta) {
    const MaybeTensor of_all = bridge::dense(joined, bridge::accumulator(both.logits));
    cpu::distillation_forward(Problem(both, both.logits, class_start, how), bridge::data(of_all),
                              loss.mutable_data_ptr(), statistics.mutable_data_ptr(), bridge::threads(both.logits, how.softcap ? how.softcap : how.teacher_softcap));
  }
  stack.returns({loss, statistics});
}

XENT_WITH_TWIN(distillation_backward, Backward)
XENT_WITH_TWIN(distillation_with_grad, WithGrad)

}  // namespace xent::operators
