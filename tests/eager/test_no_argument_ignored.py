"""Each parameter of every public function, alone and beside each other: it has an effect, or is refused in words.

The effect is another result, value or gradients, bit for bit. Parameters of EXECUTION change time, memory or rounding
by their docstrings: of these it may be other operators, or other options of them.
"""

import contextlib
import inspect
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from helpers.option_values import another
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import xent_ops
from xent_ops import distributed

N, H, V, K = 6, 16, 7, 3  # tokens, features, classes, classes of a token

EXECUTION = {
    "accumulate_dtype",
    "batch_invariant",
    "check",
    "chunk_rows",
    "grad_in_forward",
    "inplace_backward",
    "pipelined",
    "skip_ignored",
}
# What has no effect, by its docstring or because there is one rank here, by the function and the name of its base.
ONE_RANK = {f"{place}{name} is ignored" for place in ("", "shard.") for name in ("class_start", "group")}
ONE_RANK |= {"shard.sequence_parallel is ignored"}
AS_BY_DEFAULT = {f"shard.pipelined beside {name} is ignored" for name in ("skip_ignored", "products")}  # False
ALL_ROWS = {"skip_ignored beside batch_invariant is ignored"}  # by its docstring
NO_EFFECT = {
    "linear_cross_entropy-shard, mean": AS_BY_DEFAULT,
    "linear_cross_entropy-shard, none": {"shard.pipelined is ignored"},
    "linear_token_log_probs-shard, one class": {"shard.pipelined is ignored"},
    "linear_token_log_probs-shard, several classes": {"shard.pipelined is ignored"},
    "linear_token_loss-shard, one class": AS_BY_DEFAULT,
}
CALLED = {"class_weight": "weight", "in_features": "input's features"}  # by an error of the function behind a module


def randn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_tokens(stats, *rows):
    value = (
        stats.lse - 0.3 * stats.entropy - (stats.log_probs.sum(-1) if stats.log_probs.dim() > 1 else stats.log_probs)
    )
    return value * rows[0] if rows else value


def of_divergences(d, *rows):
    value = d.kl + d.jsd - d.overlap * d.coverage
    return value * rows[0] if rows else value


def of_all_divergences(d, *rows):
    return of_divergences(d, *rows) - d.log_prob * (1 + d.agrees)


# What calls are made of

TARGET = torch.tensor([3, 1, 0, 3, 4, 2])
IDS = torch.tensor([[3, 1, 0], [0, 3, 2], [4, 2, 1], [3, 0, 4], [1, 2, 3], [4, 0, 2]])
FEW = {"ids": IDS, "probs": 0.8 * randn(N, K).softmax(-1)}
IMAGE = {"input": randn(V, V, V), "target": TARGET.repeat(9)[: V * V].view(V, V)}  # the classes in any dimension
HEAD = {"input": randn(N, H).bfloat16(), "linear_weight": randn(V, H, seed=2).bfloat16()}
LINEAR = {**HEAD, "target": TARGET}
TEACHER = {"teacher_input": randn(N, 8, seed=3), "teacher_weight": randn(V, 8, seed=4)}


def and_shards(bases, leave_out=()):
    """The bases, and with a shard those that it supports."""
    sharded = {f"shard, {label}": base for label, base in bases.items() if label not in leave_out}
    return bases | {label: {**base, "shard.num_classes": V} for label, base in sharded.items()}


def as_module(bases):
    return {
        label: {"tied_weight": torch.nn.Parameter(base["linear_weight"])}
        | {name: value for name, value in base.items() if name != "linear_weight"}
        for label, base in bases.items()
    }


def each_reduction(base):
    return {"mean": base, "sum": base | {"reduction": "sum"}, "none": base | {"reduction": "none"}}


LOSS = {**each_reduction(IMAGE), "class probabilities": {**IMAGE, "target": randn(V, V, V, seed=5).softmax(1)}}
ROWS = each_reduction({"logits_shard": randn(N, V), "target": TARGET, "num_classes": V})
PLACED = ("input", "linear_weight", "linear_bias", "target")  # DTensors where any is
LINEAR_LOSS = each_reduction(LINEAR)
TOP_K = {**each_reduction({**HEAD, **FEW}), "tail": {**HEAD, **FEW, "tail": True}}
LARGEST = {"": {**HEAD, "k": 2}, "target": {**LINEAR, "k": 2}}
LOG_PROBS = {"one class": LINEAR, "several classes": {**LINEAR, "target": IDS}}
TOKENS = {label: {**base, "fn": of_tokens} for label, base in LOG_PROBS.items()}
TOKENS["sum"] = {**TOKENS["one class"], "reduction": "sum"}
DISTILLATION = {
    "no target": {**HEAD, **TEACHER},
    "target": {**LINEAR, **TEACHER},
    "hard target": {**LINEAR, **TEACHER, "hard_weight": 0.25, "reduction": "sum"},
    "mixture": {**LINEAR, **TEACHER, "beta": 0.25, "reduction": "none"},
}

DRAFT = {"teacher_weight": randn(2 * V, 8, seed=4), "classes": torch.arange(1, 2 * V, 2)}
DIVERGENCES = {
    "no target": {**HEAD, **TEACHER, "fn": of_divergences},
    "target": {**LINEAR, **TEACHER, "fn": of_all_divergences},
    "sum": {**LINEAR, **TEACHER, "fn": of_divergences, "reduction": "sum"},
}
FIELDS = {
    "no target": {**HEAD, **TEACHER},
    "target": {**LINEAR, **TEACHER},
}
OF_HEADS = DIVERGENCES | {"draft vocabulary": {**LINEAR, **TEACHER, **DRAFT, "fn": of_divergences}}


def of_logits(bases):
    """The same with logits."""
    made = {}
    for label, base in bases.items():
        made[label] = {name: value for name, value in base.items() if name not in ("linear_weight", "teacher_weight")}
        made[label]["input"] = (base["input"] @ base["linear_weight"].t()).float()
        made[label]["teacher_input"] = base["teacher_input"] @ base["teacher_weight"].t()
    return made


SQUARE = {"one class": IMAGE, "several classes": {**IMAGE, "target": IMAGE["target"].unsqueeze(-1) + torch.arange(K)}}

CALLS = {  # of each function, its bases
    "cross_entropy": {**LOSS, "DTensors": IMAGE},
    "cross_entropy_outputs": each_reduction(IMAGE),
    "token_log_probs": SQUARE,
    "top_k": {"": {"input": randn(N, V), "k": 2}, "target": {"input": randn(N, V), "k": 2, "target": TARGET}},
    "token_loss": {label: {**base, "fn": of_tokens} for label, base in SQUARE.items()}
    | {"sum": {**IMAGE, "fn": of_tokens, "reduction": "sum"}},
    "distillation_loss": of_logits(DISTILLATION),
    "linear_cross_entropy": {**and_shards(LINEAR_LOSS), "DTensors": LINEAR},
    "linear_cross_entropy_outputs": each_reduction(LINEAR),
    "linear_token_log_probs": and_shards(LOG_PROBS),
    "linear_top_k": and_shards(LARGEST),
    "linear_token_loss": {**and_shards(TOKENS), "DTensors": TOKENS["one class"]},
    "linear_distillation_loss": and_shards(
        DISTILLATION | {"mixture of a sum": {**DISTILLATION["mixture"], "reduction": "sum"}}, ["mixture"]
    ),
    "linear_distillation_token_loss": and_shards(OF_HEADS),
    "distillation_token_loss": of_logits(DIVERGENCES),
    "linear_token_divergences": and_shards(FIELDS | {"draft vocabulary": {**LINEAR, **TEACHER, **DRAFT}}),
    "token_divergences": of_logits(FIELDS),
    "linear_top_k_distillation_loss": and_shards(TOP_K, ["none"]),
    "top_k_distillation_loss": {
        label: {key: value for key, value in base.items() if key != "linear_weight"} | {"input": randn(N, V, seed=11)}
        for label, base in TOP_K.items()
    },
    "CrossEntropyLoss": LOSS,
    "LinearCrossEntropyLoss": as_module(LINEAR_LOSS)
    | {
        "its own weight": {
            "input": HEAD["input"],
            "target": TARGET,
            "in_features": H,
            "num_classes": V,
            "dtype": torch.bfloat16,
        }
    },
    "distributed.vocab_parallel_cross_entropy": ROWS,
}
NO_LOSSES = {"check_targets", "decompositions", "library_path", "remove_xent", "use_xent"}  # with tests of their own


def number_a_row(base):
    return randn(
        *(base["target"] if "target" in base else base["input"][..., 0]).shape[: base_rows(base)], seed=6
    ).abs()


def base_rows(base):
    return base.get("input", base.get("logits_shard")).dim() - 1


def of_input(*shape):
    return lambda base: randn(*shape, seed=7).to(base["input"].dtype)


# Of a parameter with a default another value, where helpers/samples.py has none. A function is called with the base.
VALUES = {
    "beta": 0.75,
    "fields": ("jsd", "overlap", "coverage"),
    "class_weight": randn(V, seed=8).abs(),
    "class_start": 0,
    "classes": torch.tensor([3, 1, 0, 2, 6, 5, 4]),
    "device": "meta",
    "dim": 0,
    "divisor": 3.0,
    "group": lambda base: dist.group.WORLD,
    "in_features": H + 1,
    "linear_bias": of_input(V),
    "num_classes": 5,
    "pipelined": False,
    "reduction": lambda base: "mean" if base.get("reduction") == "sum" else "sum",
    "rows": lambda base: (number_a_row(base),),
    "tail": lambda base: not base.get("tail", False),
    "target": torch.tensor([-100, 3, 0, 1, 4, 3]),
    "teacher_bias": lambda base: randn(len(base["teacher_weight"]), seed=9),
    "tied_weight": lambda base: torch.nn.Parameter(randn(V, H, seed=10).bfloat16()),
    "token_weight": number_a_row,
    "weight": randn(V, seed=8).abs(),
}
LEARNED = ("input", "logits_shard", "linear_weight", "linear_bias")
PLAIN = (bool, int, float, str, torch.dtype)


# What a call does


class Effects(TorchDispatchMode):
    """Which operators ran, with all of their arguments that are no tensors, by place or name."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append((str(func), *plain_leaves((*enumerate(args), *(kwargs or {}).items()))))
        return func(*args, **(kwargs or {}))


def plain_leaves(items):
    """(place or name, value) of each value of a plain type, also in lists. torch's tree_flatten_with_path takes half of
    this file's time."""
    for place, value in items:
        if isinstance(value, PLAIN):
            yield place, value
        elif isinstance(value, (list, tuple)):
            yield place, tuple(plain_leaves(enumerate(value)))


def parameters(name, with_shard=False):
    """Of a module: those of its constructor and those of forward. Of a shard: its fields, as "shard." and the name."""
    function = of_name(name)
    found = dict(inspect.signature(function).parameters)
    if found.pop("shard", None) is not None and with_shard:
        fields = inspect.signature(distributed.Shard).parameters
        found |= {f"shard.{field}": fields[field] for field in fields}
    if inspect.isclass(function):
        found |= dict(list(inspect.signature(function.forward).parameters.items())[1:])
    return found


def of_name(name):
    return getattr(distributed, name.removeprefix("distributed.")) if "." in name else getattr(xent_ops, name)


def run(name, given, dtensors=False, changed=EXECUTION):
    """(values and gradients, operators), or the text of an error that was raised in words. Operators are recorded if one
    of ``changed`` is of EXECUTION, for nobody compares those of other parameters."""
    mesh = init_device_mesh("cpu", (1,)) if dtensors else None
    function, given, learned = of_name(name), dict(given), []
    for argument in LEARNED:
        if argument in given:
            leaf = given[argument].detach().requires_grad_()
            learned.append(leaf)
            given[argument] = leaf * 1  # no leaf, over which a gradient may be written
    if dtensors:
        given |= {key: DTensor.from_local(given[key], mesh, [Replicate()]) for key in given if key in PLACED}
    given = with_shard(given)
    effects = Effects()
    with effects if {*map(bare, changed)} & EXECUTION else contextlib.nullcontext():
        if "fn" in given:
            fn = given["fn"]
            given["fn"] = lambda stats, *rows: effects.log.append("fn") or fn(stats, *rows)
        try:
            if inspect.isclass(function):
                torch.manual_seed(0)
                of_forward = set(inspect.signature(function.forward).parameters) & set(given)
                module = function(**{key: value for key, value in given.items() if key not in of_forward})
                module.zero_grad()
                learned += module.parameters()
                results = module(**{key: given[key] for key in of_forward})
            else:
                results = function(**given)
        except (TypeError, ValueError, NotImplementedError, RuntimeError, IndexError) as error:
            return str(error)
        results = results if isinstance(results, tuple) else (results.to_local() if dtensors else results,)
        summed = [result for result in results if result is not None and result.requires_grad]
        upstream = [randn(*result.shape).to(result.dtype) for result in summed]
        grads = torch.autograd.grad(summed, learned, upstream, allow_unused=True) if summed else ()
    return [None if tensor is None else tensor.detach().clone() for tensor in (*results, *grads)], effects.log


def bare(parameter):
    return parameter.removeprefix("shard.")


def with_shard(given):
    """A shard of the arguments that are its fields."""
    place = {bare(key): value for key, value in given.items() if key != bare(key)}
    others = {key: value for key, value in given.items() if key == bare(key)}
    return {**others, "shard": distributed.Shard(**place)} if place else others


def same(one, other):
    """The same bits, NaN too. A tensor more, a bias's gradient, is no other result."""
    return all(
        (a is None) == (b is None)
        and (a is None or (a.shape == b.shape and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())))
        for a, b in zip(one, other, strict=False)
    )


def has_effect(parameter, found, without):
    return not same(found[0], without[0]) or (bare(parameter) in EXECUTION and found[1] != without[1])


def named(names, text):
    names = [*map(bare, names), *(CALLED[name] for name in names if name in CALLED)]
    return any(re.search(rf"\b{name}\b", text) for name in names)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("name", "label"), [(name, label) for name, bases in CALLS.items() for label in bases])
def test_each_pair(name, label):
    base, dtensors, given = CALLS[name][label], label == "DTensors", {}
    kind = label.removeprefix("shard, ")
    for parameter, signature in parameters(name, with_shard=kind != label).items():
        if signature.default is inspect.Parameter.empty:
            continue
        field = bare(parameter)
        value = VALUES[field] if field in VALUES else another(field, signature.default)
        if field == "logits_dtype" and ("distillation" in name or "divergences" in name):  # None is float32
            value = torch.bfloat16
        given[parameter] = value(base) if callable(value) else value
    alone = run(name, base, dtensors)
    assert not isinstance(alone, str), alone
    singles, ignored = {}, []
    for parameter, value in given.items():
        singles[parameter] = found = run(name, {**base, parameter: value}, dtensors)
        ignored += judged((parameter,), found, {parameter: alone})
    others = [name for name in given if f"{name} is ignored" not in ignored]
    if kind.startswith(("sum", "none")) or kind.endswith("tail"):  # the other base has pairs, these among them
        others = []
    for one, other in itertools.combinations(others, 2):
        found = run(name, {**base, one: given[one], other: given[other]}, dtensors, (one, other))
        ignored += judged((one, other), found, {one: singles[other], other: singles[one]})
    known = NO_EFFECT.get(f"{name}-{label}", set()) | ONE_RANK
    known = {text for text in known if text.split()[0] in given}
    assert set(ignored) - ALL_ROWS == known, "\n".join(sorted(set(ignored) ^ known))


def judged(names, found, without):
    """What is wrong with a call of these parameters; ``without``: those without one of them."""
    if isinstance(found, str):
        return [] if named(names, found) or found in without.values() else [f"{names}: {found}"]
    return [
        " beside ".join((name, *(other for other in names if other != name))) + " is ignored"
        for name in names
        if not isinstance(without[name], str) and not has_effect(name, found, without[name])
    ]


def is_call(value):
    return inspect.isfunction(value) or (inspect.isclass(value) and issubclass(value, torch.nn.Module))


def test_all_functions_are_here():
    functions = {name for name in xent_ops.__all__ if is_call(getattr(xent_ops, name))}
    functions |= {f"distributed.{name}" for name in distributed.__all__} - {"distributed.Shard"}
    assert functions - NO_LOSSES == set(CALLS)
