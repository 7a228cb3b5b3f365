"""What follows from the names in a schema: who has the rows, who gives a size, which rules are asked, in which order."""

import collections

import pytest
import torch
from expecttest import assert_expected_inline
from helpers.option_values import REFUSED
from helpers.overwriting import assert_refused, assert_written_in_inference_mode
from helpers.refusals import refusals
from helpers.samples import Problem, companions, contract_of, variants

from xent_ops.kernels import cpu
from xent_ops.ops.contract import Contract
from xent_ops.ops.library import OPERATORS
from xent_ops.ops.schemas import SCHEMAS


def described(contract):
    sizes = [f"{size}={contract.arguments[index]}" for size, (index, _) in contract.givers.items()]
    rules = [contract.arguments[index] for index, _, _ in contract.rules]
    return f"{contract.primary}; {' '.join(sizes)}; {' '.join(rules) or 'no rule'}"


def test_what_each_operator_has():
    """The order of the table of names is meaning. Twins have the contract of their operator."""
    lines = [f"{name}: {described(one.contract)}" for name, one in OPERATORS.items() if f"{name[:-1]}" not in OPERATORS]
    assert_expected_inline(
        "\n".join(lines),
        """\
cross_entropy_forward: logits; V=logits; batch_invariant label_smoothing softcap logit_scale with_entropy
cross_entropy_reduced: logits; V=logits; label_smoothing softcap logit_scale lse_square_scale reduction
cross_entropy_backward: logits; V=logits; grad_dtype label_smoothing softcap logit_scale class_start num_classes lse_coefficient class_start num_classes grad_entropy entropy entropy lse_square_scale
cross_entropy_with_grad: logits; V=logits; grad_dtype label_smoothing softcap logit_scale with_entropy
scale_grad_: grad; columns=grad; no rule
divergences_forward: logits; V=logits T=teacher_logits; target joined target
divergences_backward: logits; V=logits T=teacher_logits; grad_dtype target target
divergences_with_grad: logits; V=logits T=teacher_logits; grad_dtype target target target
linear_cross_entropy_forward: input; H=input V=linear_weight K=ids; ids accumulate_dtype logits_dtype products chunk_rows batch_invariant label_smoothing softcap logit_scale with_entropy mask_ids
linear_cross_entropy_backward: input; H=input V=linear_weight K=ids; ids accumulate_dtype logits_dtype products chunk_rows batch_invariant label_smoothing softcap logit_scale class_start num_classes lse_coefficient class_start num_classes grad_entropy entropy entropy grad_ids at_ids ids mask_ids output_mask lse_square_scale
linear_cross_entropy_with_grad: input; H=input V=linear_weight; accumulate_dtype logits_dtype products chunk_rows batch_invariant label_smoothing softcap logit_scale with_entropy output_mask token_weight lse_square_scale reduction divisor
linear_scale_grad: grad; columns=grad; no rule
linear_logits: input; H=input columns=linear_weight; logits_dtype input
linear_grad_input: logits; columns=linear_weight H=linear_weight; logits
linear_cross_entropy_chunk_add_: input; H=input; grad_linear_weight grad_linear_weight
attach_gradients: input; H=input columns=linear_weight; value
row_divisors: target; V=weight; dtype token_weight lse_square_scale reduction divisor
row_summary: loss; V=weight; token_weight lse_square_scale reduction
linear_divergences_with_grad: input; H=input V=linear_weight G=teacher_input T=teacher_weight; accumulate_dtype logits_dtype chunk_rows target target target output_mask token_weight reduction divisor
linear_divergences_forward: input; H=input V=linear_weight G=teacher_input T=teacher_weight; accumulate_dtype logits_dtype chunk_rows target target
linear_divergences_backward: input; H=input V=linear_weight G=teacher_input T=teacher_weight; accumulate_dtype logits_dtype chunk_rows target target output_mask
linear_cross_entropy_shard: input; H=input V=linear_weight K=ids; ids logits_dtype products chunk_rows batch_invariant label_smoothing softcap logit_scale class_start with_entropy
linear_cross_entropy_shard_join: input; H=input V=linear_weight K=ids ranks=gathered; ids accumulate_dtype logits_dtype products chunk_rows batch_invariant label_smoothing softcap logit_scale class_start with_entropy gathered_input input
cross_entropy_shard: logits; V=logits; batch_invariant label_smoothing softcap logit_scale class_start
cross_entropy_shard_join: logits; V=logits ranks=gathered; label_smoothing softcap logit_scale class_start
cross_entropy_shard_reduced: logits; V=logits ranks=gathered; label_smoothing softcap logit_scale class_start lse_square_scale reduction
soft_cross_entropy_forward: logits; V=logits; label_smoothing softcap logit_scale
soft_cross_entropy_backward: logits; V=logits; label_smoothing softcap logit_scale
row_targets: ids; K=ids; ids
ids_forward: logits; V=logits K=ids; ids label_smoothing softcap logit_scale class_start num_classes
mask_ids_: logits; V=logits K=ids; ids label_smoothing softcap logit_scale class_start num_classes
ids_grad_: grad_logits; columns=grad_logits K=ids; ids label_smoothing softcap logit_scale class_start num_classes grad_entropy entropy entropy grad_ids
token_logits: logits; V=logits K=ids; ids batch_invariant label_smoothing softcap logit_scale with_entropy mask_ids
token_logits_backward: logits; V=logits K=ids; ids label_smoothing softcap logit_scale grad_entropy entropy grad_ids mask_ids
top_k: logits; V=logits; logit_scale logits
linear_top_k: input; H=input V=linear_weight; accumulate_dtype logits_dtype products chunk_rows batch_invariant label_smoothing softcap logit_scale input
top_k_distillation: ids; K=ids; token_weight lse_square_scale""",
    )


def test_what_goes_together():
    """Which argument a call does not go without, or never has, and which is not in the call with all others."""
    found = collections.defaultdict(list)
    for name in SCHEMAS:
        for text in companions(name):
            found[text].append(name)
    assert_expected_inline(
        "\n".join(f"{text}: {' '.join(names)}" for text, names in found.items()),
        """\
reduction=none never: cross_entropy_reduced row_divisors row_summary cross_entropy_shard_reduced linear_cross_entropy_with_grad linear_divergences_with_grad
grad_entropy with entropy: cross_entropy_backward cross_entropy_backward_ token_logits_backward ids_grad_ linear_cross_entropy_backward
entropy with grad_entropy: cross_entropy_backward cross_entropy_backward_ token_logits_backward ids_grad_ linear_cross_entropy_backward
lse_coefficient with num_classes weight: cross_entropy_backward cross_entropy_backward_ linear_cross_entropy_backward
class_start with num_classes: cross_entropy_backward cross_entropy_backward_ ids_forward mask_ids_ ids_grad_ divergences_forward divergences_backward divergences_backward_ linear_cross_entropy_backward
divisor with reduction: row_divisors linear_cross_entropy linear_cross_entropy_with_grad linear_divergences_with_grad
mask_ids not beside all others: token_logits token_logits_backward
label_smoothing never: token_logits token_logits_backward ids_forward mask_ids_ ids_grad_ linear_top_k
target_logit with target: top_k
joined with class_start num_classes fields: divergences_forward
num_classes never: divergences_forward divergences_backward divergences_backward_ divergences_with_grad divergences_with_grad_ linear_divergences_forward linear_divergences_backward linear_divergences_with_grad
fields=kl,reverse_kl,mixture,overlap,log_prob never: divergences_with_grad divergences_with_grad_ linear_divergences_with_grad
fields=overlap never: divergences_with_grad divergences_with_grad_ linear_divergences_with_grad
fields=kl,log_prob with hard_weight: divergences_with_grad divergences_with_grad_ linear_divergences_with_grad
fields=mixture,log_prob with hard_weight: divergences_with_grad divergences_with_grad_ linear_divergences_with_grad
hard_weight with fields: divergences_with_grad divergences_with_grad_ linear_divergences_with_grad
batch_invariant not beside all others: linear_cross_entropy linear_cross_entropy_forward linear_cross_entropy_backward linear_cross_entropy_with_grad linear_cross_entropy_shard linear_cross_entropy_shard_join
ids not beside all others: linear_cross_entropy_forward linear_cross_entropy_shard linear_cross_entropy_shard_join
mask_ids with ids: linear_cross_entropy_forward
num_classes not beside all others: linear_cross_entropy_backward linear_divergences_forward linear_divergences_backward
ids with at_ids grad_ids: linear_cross_entropy_backward
at_ids with ids grad_ids: linear_cross_entropy_backward
grad_ids with ids at_ids: linear_cross_entropy_backward
mask_ids with ids at_ids grad_ids: linear_cross_entropy_backward
products=fp8 never: linear_top_k
products=fp8_gradients never: linear_top_k
with_entropy not beside all others: linear_cross_entropy_shard linear_cross_entropy_shard_join""",
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_argument_is_refused_by_its_name(name):
    """A tensor of another dtype, shape or device, and an option beyond its rule. Nothing else is wrong with the call."""
    found = refusals(name)
    for _, (_, args, options), error, words in found:
        with pytest.raises(error, match=words):
            getattr(torch.ops.xent, name)(*args, **options)
    checked = contract_of(name)
    ruled = {checked.arguments[index] for index, _, _ in checked.rules} & set(REFUSED)
    assert {one.name for one in checked.tensors} | ruled <= {argument for argument, *_ in found}


@pytest.mark.parametrize("kernel", ["C++", "plain torch"])
@pytest.mark.parametrize(
    "name", [name for name, one in OPERATORS.items() if one.check_values and {"target", "ids"} & set(one.arguments)]
)
def test_a_target_out_of_range_is_an_index_error(monkeypatch, name, kernel):
    """On a CPU. Elsewhere it is NaN in its row: test_targets_out_of_range.py."""
    if kernel == "plain torch":
        monkeypatch.setattr(cpu, "kernel", lambda name: None)
    checked = contract_of(name)
    index = checked.positions["ids" if "ids" in checked.required else "target"]
    samples = variants(name, Problem(), {"hard_weight": 0.5, "fields": "kl,log_prob"}, each=False)
    sample = next(one for one in samples if len(one.args) > index and one.args[index] is not None)
    slice_only = checked.positions.get("target_logit")  # with it the logits are a slice, and the target is any column
    classes = checked.bind(sample.args, sample.options)._asdict().get("num_classes") or 37
    for bad in (classes, -1, 10**10, 2**32 + 3):
        args = [None if i == slice_only else arg for i, arg in enumerate(sample.args)]
        args[index] = args[index].clone()
        args[index].view(-1)[1] = bad
        noun = "id" if "ids" in checked.required else "target"
        with pytest.raises(IndexError, match=f"{noun} {bad} is out of bounds: valid are 0 to {classes - 1}"):
            OPERATORS[name].overload(*args, **sample.options)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", [name for name, one in OPERATORS.items() if one.overwrites])
def test_what_may_not_be_overwritten(device, name):
    """Tensors of inference mode outside it, tensors that require grad, and rows that share memory."""
    sample, operator = variants(name, Problem(device=device), each=False)[0], OPERATORS[name]
    written = sample.args[operator.position]
    with torch.inference_mode():
        of_inference = written.clone()

    def call(tensor):
        args = [*sample.args]
        args[operator.position] = tensor
        return operator.overload(*args, **sample.options)

    for wrong, words in (
        (of_inference, rf"was made in inference mode, .* {operator.overwrites}.clone\(\)"),
        (written.clone().requires_grad_(), "must not require grad"),
        (written[:1].expand_as(written), "share memory"),
    ):
        assert_refused(call, wrong, f"^{operator.overwrites} .*{words}")
    assert_written_in_inference_mode(call, of_inference)


def contract(text, arguments=(), results=()):
    schema = torch._C.parse_schema(f"test::{text}")
    return Contract(schema, dict(arguments), dict(results), None, ())


@pytest.mark.parametrize(
    "text, results, message",
    [
        ("f(Tensor logits) -> Tensor los", {}, "the result 'los' has no row"),
        (
            "f(Tensor logits) -> Tensor out",
            {"out": ("acc", "... Q", "")},
            "the result 'out' has a size 'Q', which no argument gives",
        ),
    ],
)
def test_a_misspelt_row_is_an_error_where_the_operator_is_declared(text, results, message):
    with pytest.raises(ValueError, match=message):
        contract(text, results=results)


def test_what_a_new_operator_refuses_and_returns():
    """From its schema alone."""
    toy = contract("f(Tensor logits, Tensor target, float? softcap=None) -> (Tensor loss, Tensor lse)")
    logits, target = torch.zeros(3, 2, 7), torch.zeros(3, 2, dtype=torch.int64)
    assert toy.outputs(toy.bind((logits, target), {})) == [((3, 2), torch.float32)] * 2
    for arguments, options, error, message in (
        ((logits, target[:2]), {}, ValueError, r"target has shape \(2, 2\); expected \(3, 2\)"),
        ((logits.int(), target), {}, TypeError, "logits has dtype torch.int32"),
        ((logits, target.float()), {}, TypeError, "target has dtype torch.float32"),
        ((logits, target.to("meta")), {}, RuntimeError, "target is on meta but logits are on cpu"),
        ((logits[..., :0], target), {}, ValueError, "have 0 classes"),
        ((logits, target), {"softcap": -1.0}, ValueError, "softcap must be a finite number above 0"),
    ):
        with pytest.raises(error, match=message):
            toy.check(toy.bind(arguments, options))
