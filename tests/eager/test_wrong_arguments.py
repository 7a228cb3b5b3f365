"""Every public function refuses tensors whose rows do not fit, and options of chunks without a meaning, before it
computes: in eager, with frozen hidden states, without gradients, and compiled."""

import inspect

import pytest
import torch
from test_no_argument_ignored import CALLS, TARGET, Effects, N, V, of_name, one_rank, parameters, randn, with_shard  # noqa: F401

# Arguments with something for each row, and the arguments of the functions that have no others.
OF_ROWS = ("input", "logits_shard", "target", "ids", "probs", "teacher_input", "rows")
LOGITS = ("cross_entropy", "cross_entropy_outputs", "CrossEntropyLoss", "token_log_probs", "token_loss")
LABELS = ("target", "mean", "one class", "its own weight", "")
HEADS = ("linear_weight", "tied_weight")
ON_RANKS = [f"{name}, shard" for name, bases in CALLS.items() if any(label.startswith("shard") for label in bases)]


def base_of(name):
    name, _, shard = name.partition(", ")
    bases = CALLS[name]
    labels = [f"shard, {label}" for label in LABELS] if shard else LABELS
    base = dict(next(bases[label] for label in labels if label in bases))
    if name in LOGITS:
        base |= {"input": randn(N, V), "target": TARGET, "dim": -1}
    if "fn" in base:
        base["rows"] = (randn(N),)
    return base


def mapped(base, change, names):
    """The base with other tensors of rows."""
    of_rows = {name: base[name] for name in names if name in base}
    return base | {
        name: tuple(map(change, value)) if name == "rows" else change(value) for name, value in of_rows.items()
    }


def wrong_rows(name):
    """(what is wrong, arguments)."""
    base, student = base_of(name), OF_ROWS[:2]
    right = mapped(base, lambda value: value.view(2, 3, *value.shape[1:]), OF_ROWS)
    for other in OF_ROWS[2:]:
        if other in base:
            yield f"{other} swapped", mapped(right, lambda value: value.view(3, 2, *value.shape[2:]), (other,))
    yield "input swapped", mapped(right, lambda value: value.view(3, 2, *value.shape[2:]), student)
    for number in (2 * N, N - 1, N + 1):
        repeated = mapped(base, lambda value: torch.cat([value, value]), student)
        yield f"{number} rows", mapped(repeated, lambda value, number=number: value[:number], student)


def wrong_options(name):
    values = {"chunk_rows": (0, -1), "batch_invariant": (1, "yes"), "skip_ignored": (1,)}
    values |= {"accumulate_dtype": (torch.float16,), "logits_dtype": (torch.float16,)}
    for option in set(values) & set(parameters(name.split(", ")[0])):
        for value in values[option]:
            yield f"{option}={value}", base_of(name) | {option: value}


def call(name, given, learned, compiled=False):
    """The function's, or the module's, results. ``learned``: the arguments that require grad."""
    function, given = of_name(name.split(", ")[0]), with_shard(given)
    for argument in learned:
        if argument in given and argument != "tied_weight":
            given[argument] = given[argument].detach().requires_grad_()
    if inspect.isclass(function):
        of_forward = set(inspect.signature(function.forward).parameters) & set(given)
        function = function(**{key: value for key, value in given.items() if key not in of_forward})
        given = {key: given[key] for key in of_forward}
    return (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(**given)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", [*CALLS, *ON_RANKS])
def test_refused(name):
    ways = {"eager": ("input", "logits_shard", *HEADS), "frozen hidden states": HEADS, "without gradients": ()}
    for wrong, given in (*wrong_rows(name), *wrong_options(name)):
        for way, learned in ways.items():
            with Effects() as effects, pytest.raises((TypeError, ValueError), match=word_of(wrong)):
                call(name, given, learned)
                pytest.fail(f"{wrong}, {way}: not refused")
            assert not [one for one, *_ in effects.log if "mm" in one], f"{wrong}, {way}: computed"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", ["one", pytest.param("all", marks=pytest.mark.slow)])  # Dynamo takes .1 s for each
@pytest.mark.parametrize("name", [*CALLS, *ON_RANKS])
def test_refused_compiled(name, kind):
    """One number of rows, one value of an option; ``one``: rows and an option alone."""
    wrongs = {wrong.partition("=")[0].lstrip("0123456789"): given for wrong, given in wrong_rows(name)}
    options = {wrong.partition("=")[0]: given for wrong, given in wrong_options(name)}
    if kind == "one":
        wrongs, options = dict([*wrongs.items()][-1:]), dict([*options.items()][:1])
    for wrong, given in (wrongs | options).items():
        with pytest.raises(Exception, match=wrong if wrong in options else "has shape"):
            call(name, given, ("input", "logits_shard", *HEADS), compiled=True)
            pytest.fail(f"{wrong}: not refused")
        torch.compiler.reset()


def word_of(wrong):
    """A word of the error."""
    return wrong.split("=")[0] if "=" in wrong else "has shape"
