"""Rules for options and for combinations of arguments: one function per name, for every operator with this name.

``call`` is the operator's call, a namedtuple of its arguments (contract.py). Shapes and dtypes have been checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..kernels.divergences import FIELDS, Divergences
from ..kernels.options import RowOptions
from ..kernels.sizes import statically_equal
from . import checks, distillation_checks

Call = Any
AT_LEAST_ONE = frozenset(("V", "T", "K"))


def width(call: Call) -> int:
    """The number of classes, or of columns of a slice, of this call."""
    return call.linear_weight.shape[0] if hasattr(call, "linear_weight") else call.primary.shape[-1]


def sliced(call: Call) -> bool:
    """Is the call for a slice of the classes? A slice may be empty."""
    return getattr(call, "class_start", None) is not None and call.num_classes is not None


def record(call: Call) -> Divergences:
    options = RowOptions(call.ignore_index, softcap=call.softcap, logit_scale=call.logit_scale)
    return Divergences(options, *[getattr(call, name) for name in Divergences._fields[1:]])


def have(name: str) -> str:
    return "have" if name.endswith("s") else "has"


def are(name: str) -> str:
    return f"{name} {'are' if name.endswith('s') else 'is'}"


def at_least_one(text: str, tensor: Tensor, size: int, call: Call) -> None:
    if (type(size) is int and size > 0) or (text != "ids" and sliced(call)):
        return
    be = "has" if text == "ids" else have(text)
    checks.check_value(size > 0, lambda: f"{text} of shape {tuple(tensor.shape)} {be} 0 classes; expected at least 1")


# Values


def several_classes(call: Call) -> None:
    """Refuse the options of a loss: x of each id is no loss."""
    checks.refuse_products_of_ids(getattr(call, "products", None))
    for name in ("label_smoothing", "lse_square_scale"):
        if getattr(call, name, 0.0) != 0.0:
            raise ValueError(f"{name} is for one target a row: expected 0.0, got {getattr(call, name)}")
    for name in ("weight", "divisors"):
        if getattr(call, name, None) is not None:
            raise ValueError(f"{name} is for one target a row: pass none beside ids")


def _reduction(call: Call) -> None:
    checks.reduction(call.reduction, ("mean", "sum"))
    if getattr(call, "divisor", None) is not None and call.reduction != "sum":
        raise ValueError(f'divisor is what a sum is divided by: expected reduction="sum", got {call.reduction!r}')


def _batch_invariant(call: Call) -> None:
    if hasattr(call, "linear_weight"):
        checks.batch_invariant(call.products)


def chunking(call: Call) -> None:
    """Check the options of chunks and sums."""
    for name in ("accumulate_dtype", "logits_dtype", "products", "chunk_rows"):
        BY_NAME[name](call)
    if call.batch_invariant:
        _batch_invariant(call)


def _temperature(call: Call) -> None:
    """Check all options of a distillation, and its classes."""
    if hasattr(call, "teacher_input"):
        heads = call.input, call.linear_weight, call.teacher_input, call.teacher_weight
        student, names = heads[0], ("linear_weight", "teacher_weight")
        teacher, widths = heads[2], (heads[1].shape[0], heads[3].shape[0])
        if getattr(call, "classes", None) is not None:
            if call.num_classes is not None and not sliced(call):
                raise ValueError(distillation_checks.CLASSES_ALONE)
            widths = (widths[0], call.classes.shape[0])
    else:
        student, teacher, names = call.primary, call.teacher_logits, ("logits", "teacher_logits")
        widths = (width(call), teacher.shape[-1])
    spec = record(call)
    distillation_checks.options(spec, student, teacher)
    distillation_checks.slices(spec, getattr(call, "class_start", None), *widths, names)


def check_targets(call: Call) -> None:
    """Raise IndexError for a class out of range. It reads the targets, so it is for CPU tensors."""
    if "log_prob" in getattr(call, "fields", "log_prob"):  # else the target only marks ignored rows
        ids, classes, number = (getattr(call, name, None) for name in ("ids", "classes", "num_classes"))
        target = call.target if ids is None else None  # else it is one of the ids
        checks.index_values(target, ids, classes, width(call) if number is None else number, call.ignore_index)


# Combinations of arguments


def _class_start(call: Call) -> None:
    if sliced(call):
        checks.shard_range(width(call), call.class_start, call.num_classes)
    elif call.class_start:
        raise ValueError(
            f"class_start={call.class_start} is for a slice of the classes: pass num_classes too, the number of all "
            "classes"
        )


def _lse_coefficient(call: Call) -> None:
    """Check the arguments of a backward that only a slice of the classes has."""
    if call.num_classes is None:
        if call.lse_coefficient is not None:
            raise ValueError("lse_coefficient goes with num_classes, of a slice of the classes")
    elif (call.weight is None) != (call.lse_coefficient is None):
        raise ValueError("a class weight needs the lse_coefficient of cross_entropy_shard_join: pass both or neither")


def _grad_entropy(call: Call) -> None:
    if (call.grad_entropy is None) != (call.entropy is None):
        raise ValueError("grad_entropy and entropy go together: the gradient of an entropy needs its value")


def _entropy(call: Call) -> None:
    is_plain = getattr(call, "weight", None) is None and call.label_smoothing == 0.0
    if sliced(call) and hasattr(call, "input") and not is_plain:
        raise ValueError("entropies go with the plain loss: without class weights and label_smoothing")


def _grad_ids(call: Call) -> None:
    is_given = [tensor is not None for tensor in (call.ids, call.at_ids, call.grad_ids)]
    if any(is_given) and not all(is_given):
        raise ValueError("ids, at_ids and grad_ids go together: expected all of them or none")


def _mask_ids(call: Call) -> None:
    if call.mask_ids and call.ids is None:
        raise ValueError("mask_ids=True masks the columns of ids: pass these too")
    if call.mask_ids and (getattr(call, "with_entropy", False) or getattr(call, "grad_entropy", None) is not None):
        raise ValueError("mask_ids=True gives the lse of some classes, without an entropy")


def _gathered_input(call: Call) -> None:
    if call.gathered_input is not None and not call.group_name:
        raise ValueError("gathered_input needs the group_name of the ranks that it was gathered from")


def _fields(call: Call) -> None:
    names = call.fields.split(",")
    if not set(names) <= set(FIELDS) or len(set(names)) < len(names):
        raise ValueError(f"fields must be some of {', '.join(FIELDS)}, with commas, got {call.fields!r}")
    if "mixture" in names and not 0.0 < call.beta < 1.0:
        raise ValueError(
            f"beta of a mixture (jsd) must be above 0.0 and below 1.0, got {call.beta}: the ends are kl and reverse_kl"
        )


def _hard_weight(call: Call) -> None:
    distillation_checks.hard_weight(call.hard_weight)
    divergence, *others = call.fields.split(",")
    if divergence in ("overlap", "log_prob") or others != ["log_prob"] * (call.hard_weight != 0.0):
        raise ValueError(
            "fields must be one of kl, reverse_kl and mixture, and log_prob behind it with a hard_weight other than "
            f"0.0, got {call.fields!r} with hard_weight={call.hard_weight}"
        )


def _joined(call: Call) -> None:
    if call.joined is not None and (call.class_start is None or not record(call).visits_again()):
        raise ValueError(
            "joined statistics are for a slice of the classes, class_start=, with mixture or overlap among the fields"
        )


# (names, rule, exception: not for schemas with this name). Rules run in this order, if one of the names is not at its
# default. The first name must be in the schema.
RULES: tuple[tuple[tuple[str, ...], Callable[[Call], None], str], ...] = (
    (("ids",), several_classes, "probs"),
    (("grad_dtype",), lambda call: checks.narrower(call.grad_dtype, call.logits), ""),
    (("accumulate_dtype",), lambda call: checks.wider("accumulate_dtype", call.accumulate_dtype, call.input), ""),
    (("logits_dtype",), lambda call: checks.wider("logits_dtype", call.logits_dtype, call.input), ""),
    (("dtype",), lambda call: checks.accumulator("dtype", call.dtype), ""),
    (("products",), lambda call: checks.multiplied(call.products, call.input, call.linear_weight), ""),
    (("chunk_rows",), lambda call: checks.chunk_rows(call.chunk_rows), ""),
    (("batch_invariant",), _batch_invariant, ""),
    (("label_smoothing",), lambda call: checks.label_smoothing(call.label_smoothing), ""),
    (("softcap",), lambda call: checks.softcap(call.softcap, call.primary.dtype), "temperature"),
    (("logit_scale",), lambda call: checks.logit_scale(call.logit_scale, call.primary.dtype), "temperature"),
    (("temperature", "target"), _temperature, ""),
    (("class_start", "num_classes"), _class_start, "temperature"),
    (("lse_coefficient", "class_start", "num_classes"), _lse_coefficient, ""),
    (("grad_entropy", "entropy"), _grad_entropy, ""),
    (("with_entropy",), _entropy, ""),
    (("entropy",), _entropy, ""),
    (("grad_ids", "at_ids", "ids"), _grad_ids, ""),
    (("mask_ids",), _mask_ids, ""),
    (("gathered_input",), _gathered_input, ""),
    (("joined",), _joined, ""),
    (("fields", "target"), _fields, ""),
    (("hard_weight", "target"), _hard_weight, ""),
    (("output_mask",), lambda call: checks.gradient_mask(call.output_mask), ""),
    (("token_weight",), lambda call: checks.real_without_grad(call.token_weight), ""),
    (("lse_square_scale",), lambda call: checks.lse_square_scale(call.lse_square_scale, call.primary.dtype), ""),
    (("reduction", "divisor"), _reduction, ""),
)


BY_NAME = {names[0]: rule for names, rule, _ in RULES}


# Hints for messages: (the expected sizes as printed, text)


def _swapped(call: Call, name: str, rows: Any) -> str:
    """A hint, if linear_weight has the rows that the input should have."""
    input, linear_weight = call.input, call.linear_weight
    if input.dim() != 2 or not statically_equal(linear_weight.shape, (*rows, input.shape[-1])):
        return ""
    return (
        f": input and {name} seem to be swapped, the order is input, {name}, target (Liger-Kernel's has the weight "
        "first)"
    )


def _target_hint(call: Call, name: str, expected: list[Any]) -> tuple[list[Any], str]:
    return expected, _swapped(call, "linear_weight", call.target.shape) if hasattr(call, "input") else ""


def _weight_hint(call: Call, name: str, expected: list[Any]) -> tuple[list[Any], str]:
    shape = call.linear_weight.shape
    if not hasattr(call, "input"):
        return expected, ""
    if len(shape) != 2:
        return ["V", "H"], _swapped(call, name, shape[:-1])
    if statically_equal(shape[:1], call.input.shape[-1:]):
        return [shape[1], shape[0]], (
            f": it is transposed, pass {name}.t(); LinearCrossEntropyLoss takes (H, V), here in_features={shape[0]}, "
            f"num_classes={shape[1]}"
        )
    return expected, ""


def _teacher_weight_hint(call: Call, name: str, expected: list[Any]) -> tuple[list[Any], str]:
    if not statically_equal(call.teacher_input.shape[-1:], call.teacher_weight.shape[:1]):
        return expected, ""
    return expected, (
        ": teacher_input has a number for each class. If it holds logits, pass the teacher's hidden states, or the "
        "logits of both to xent_ops.distillation_loss or distillation_token_loss; else the weight is transposed, pass "
        f"{name}.t()"
    )


def _classes_hint(call: Call, name: str, expected: list[Any]) -> tuple[list[Any], str]:
    return expected, distillation_checks.mask_hint(call.classes, call.teacher_weight.shape[0])


HINTS: dict[str, Callable[[Call, str, list[Any]], tuple[list[Any], str]]] = {
    "target": _target_hint,
    "linear_weight": _weight_hint,
    "teacher_weight": _teacher_weight_hint,
    "classes": _classes_hint,
}
