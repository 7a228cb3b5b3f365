"""What follows from the names in a schema: who has the rows, who gives a size, which rules are asked, in which order."""

import pytest
import torch
from expecttest import assert_expected_inline
from test_registration import calls_of

from xent_ops.ops.contract import NAMES, Contract
from xent_ops.ops.library import OPERATORS


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
cross_entropy_forward: logits; V=logits; label_smoothing softcap logit_scale with_entropy
cross_entropy_reduced: logits; V=logits; label_smoothing softcap logit_scale lse_square_scale reduction
cross_entropy_backward: logits; V=logits; grad_dtype label_smoothing softcap logit_scale class_start num_classes lse_coefficient class_start num_classes grad_entropy entropy entropy lse_square_scale
distillation_forward: logits; V=logits T=teacher_logits; target joined
distillation_backward: logits; V=logits T=teacher_logits; target
distillation_with_grad: logits; V=logits T=teacher_logits; target
linear_cross_entropy_forward: input; H=input V=linear_weight; accumulate_dtype logits_dtype products chunk_rows label_smoothing softcap logit_scale with_entropy
linear_cross_entropy_backward: input; H=input V=linear_weight; accumulate_dtype logits_dtype products chunk_rows label_smoothing softcap logit_scale class_start num_classes lse_coefficient class_start num_classes grad_entropy entropy entropy output_mask lse_square_scale
linear_cross_entropy_with_grad: input; H=input V=linear_weight; accumulate_dtype logits_dtype products chunk_rows label_smoothing softcap logit_scale with_entropy output_mask token_weight lse_square_scale reduction divisor
linear_scale_grad: grad; columns=grad; no rule
linear_cross_entropy_chunk: input; H=input V=linear_weight K=ids; logits_dtype label_smoothing softcap logit_scale class_start num_classes with_entropy mask_ids input
linear_cross_entropy_chunk_grad_: logits; V=linear_weight H=linear_weight K=ids; label_smoothing softcap logit_scale class_start num_classes lse_coefficient class_start num_classes grad_entropy entropy entropy grad_ids at_ids ids mask_ids lse_square_scale
linear_cross_entropy_chunk_add_: input; H=input; grad_linear_weight grad_linear_weight
attach_gradients: input; H=input columns=linear_weight; value
linear_distillation_forward: input; H=input V=linear_weight G=teacher_input T=teacher_weight; accumulate_dtype chunk_rows target
linear_distillation_backward: input; H=input V=linear_weight G=teacher_input T=teacher_weight; accumulate_dtype chunk_rows target output_mask
linear_distillation_with_grad: input; H=input V=linear_weight G=teacher_input T=teacher_weight; accumulate_dtype chunk_rows target output_mask token_weight reduction divisor
linear_distillation_chunk: input; H=input V=linear_weight G=teacher_input T=teacher_weight; target input
linear_distillation_chunk_grad_: logits; V=linear_weight H=linear_weight; target
linear_cross_entropy_shard: input; H=input V=linear_weight; logits_dtype products chunk_rows label_smoothing softcap logit_scale class_start with_entropy
linear_cross_entropy_shard_join: input; H=input V=linear_weight ranks=gathered; accumulate_dtype logits_dtype products chunk_rows label_smoothing softcap logit_scale class_start with_entropy gathered_input input
ids_grad_: grad_logits; columns=grad_logits K=ids; label_smoothing softcap logit_scale class_start num_classes grad_entropy entropy entropy grad_ids
token_logits: logits; V=logits K=ids; label_smoothing softcap logit_scale with_entropy
token_logits_backward: logits; V=logits K=ids; label_smoothing softcap logit_scale grad_entropy entropy grad_ids
linear_token_logits: input; H=input V=linear_weight K=ids; accumulate_dtype logits_dtype products chunk_rows label_smoothing softcap logit_scale with_entropy mask_ids
linear_token_logits_backward: input; H=input V=linear_weight K=ids; accumulate_dtype logits_dtype products chunk_rows label_smoothing softcap logit_scale grad_entropy entropy grad_ids mask_ids output_mask
linear_token_logits_with_grad: input; H=input V=linear_weight K=ids; accumulate_dtype logits_dtype products chunk_rows label_smoothing softcap logit_scale output_mask
cross_entropy_shard: logits; V=logits; label_smoothing softcap logit_scale class_start
cross_entropy_shard_join: logits; V=logits ranks=gathered; label_smoothing softcap logit_scale class_start
cross_entropy_shard_reduced: logits; V=logits ranks=gathered; label_smoothing softcap logit_scale class_start lse_square_scale reduction
soft_cross_entropy_forward: logits; V=logits; label_smoothing softcap logit_scale
soft_cross_entropy_backward: logits; V=logits; label_smoothing softcap logit_scale
cross_entropy_with_grad: logits; V=logits; grad_dtype label_smoothing softcap logit_scale with_entropy
cross_entropy_divisor: logits; V=logits; no rule
scale_grad_: grad; columns=grad; no rule""",
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_each_tensor_is_refused_by_its_name(name):
    """Of another dtype, shape or device. Tests of operators have what is refused beside that."""
    contract = OPERATORS[name].contract
    calls = [contract.bind(args, options) for _, args, options in calls_of(name, "cpu", torch.float32, False)]
    for argument in (*contract.tensors, *contract.checked_last):
        given = [call for call in calls if call[argument.position] is not None and call.primary.dim() > 1]
        if not given and argument.name not in contract.required:
            continue  # that no sample has
        call = given[0]
        tensor, text = call[argument.position], NAMES.get(argument.name, argument.name)
        wrong = []
        if argument.like != "any":
            wrong += [(tensor.bool(), TypeError, "has dtype torch.bool")]
        if argument.name != contract.primary:
            wrong += [(tensor.new_zeros((*tensor.shape, 2)), ValueError, r"has shape \(.*\); expected \(")]
            wrong += [(tensor.to("meta"), RuntimeError, "(is|are) on meta but .* on cpu")]
        for one, error, words in wrong:
            changed = call._replace(**{argument.name: one})._asdict()
            with pytest.raises(error, match=f"^{text} {words}"):
                OPERATORS[name].overload(
                    *(value for key, value in changed.items() if key not in contract.keyword_only),
                    **{key: changed[key] for key in contract.keyword_only},
                )


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
