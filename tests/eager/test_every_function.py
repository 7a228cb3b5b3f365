"""What all functions do alike: ignored rows, chunks, no gradients, autocast, checkpoints, several backwards, what they refuse."""

import contextlib
import inspect
import itertools
import math

import pytest
import torch
from test_no_argument_ignored import CALLS, IDS, TARGET, N, V, of_divergences, of_name, of_tokens, parameters, randn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

LOCAL = [name for name in CALLS if "." not in name and not inspect.isclass(of_name(name))]
HIDDEN = ("input", "teacher_input")
HEADS = ("linear_weight", "teacher_weight")
LEAVES = ("input", "linear_weight")
IGNORED = [1, 4]
NO_TARGET = ("class probabilities", "no target", "")  # no row is ignored


def each(*names, but=()):
    """Parametrises a test with the functions that have all these parameters, each with its bases."""
    cases = [(name, label) for name in LOCAL for label in CALLS[name] if not {"DTensors", *but} & {name, label}]
    cases = [case for case in cases if not case[1].startswith("shard")]  # tests/distributed has these
    return pytest.mark.parametrize("name, label", [case for case in cases if {*names} <= {*parameters(case[0])}])


def arguments(name, label, device, dtype=torch.float64, ignored=()):
    """Of a call on N rows, whose leaves require grad."""
    base = dict(CALLS[name][label])
    if base["input"].dim() > 2:
        target = {"several classes": IDS, "class probabilities": randn(N, V, seed=5).softmax(1)}.get(label, TARGET)
        base |= {"input": randn(N, V), "target": target, "dim": -1}
    for key, value in base.items():
        if isinstance(value, torch.Tensor):
            base[key] = value.detach().to(device, dtype if value.is_floating_point() else None, copy=True)
            base[key].requires_grad_(key in LEAVES)
    if len(ignored) > 0:
        base["ids" if "ids" in base else "target"][ignored] = -100
    return base


def replaced(given, **values):
    """The same call with other tensors, which require grad where they did."""
    return given | {key: value.detach().requires_grad_(given[key].requires_grad) for key, value in values.items()}


def results_of(name, given):
    """All but the lse, which an ignored row has too."""
    found = of_name(name)(**given)
    fields = found._asdict() if hasattr(found, "_asdict") else {"loss": found}
    return [value for field, value in fields.items() if value is not None and field != "lse"]


def gradients(results, given, upstream=lambda value: torch.full_like(value, 0.75), **options):
    scalars = [value for value in results if value.requires_grad]
    upstream = [upstream(value.detach()) for value in scalars]
    return torch.autograd.grad(scalars, [given[key] for key in LEAVES if key in given], upstream, **options)


def run(name, given):
    results = results_of(name, given)
    return [value.detach() for value in results], gradients(results, given)


def read_all(stats, *rows):
    """Of an ignored row the derivatives are not finite: its divergences and its entropy are zeros."""
    if hasattr(stats, "overlap"):
        return of_divergences(stats, *rows) + stats.overlap.log() + stats.kl.sqrt()
    return of_tokens(stats, *rows) + stats.entropy.log()


def ways(name, given):
    """Options by which an ignored row comes another way."""
    found = [{}, {"skip_ignored": True, "chunk_rows": 4}, {"grad_in_forward": True}, {"batch_invariant": True}]
    if "ids" in given:  # the loss of class indices
        found.append({"ids": given["ids"][:, :1], "probs": given["probs"][:, :1]})
    return [way for way in found if {*way} <= {*parameters(name)}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@each(but=NO_TARGET)
def test_what_an_ignored_row_holds_counts_for_nothing(device, name, label, dtype):
    """Its weights, probabilities, teacher and, as padding, hidden states: results and gradients are those of ones."""
    given = arguments(name, label, device, dtype, ignored=IGNORED)

    def call(value, padding, way):
        rows = {key: given[key].detach().clone() for key in (*HIDDEN, "probs") if key in given}
        weight = randn(N, seed=6).abs().to(device)
        for key, tensor in (*rows.items(), ("weight", weight)):
            tensor[IGNORED] = value if padding or key != "input" else 1.0
        more = {"token_weight": weight, "lse_square_scale": 0.1, "softcap": 5.0, **way}
        more |= {"fn": read_all, "rows": (weight,)} if "fn" in given else {}
        more |= {"probs": rows.pop("probs")[:, :1]} if "ids" in way else {}
        return run(name, replaced(given, **rows) | {key: more[key] for key in more if key in parameters(name)})

    zero = name.endswith("token_log_probs")  # also the log-probability and the entropy of an ignored row
    for way, padding in itertools.product(ways(name, given), (False, True)):
        wanted, (of_input, *of_head) = call(1.0, padding, way)
        assert not (zero and any(value[IGNORED].any() for value in wanted))
        for bad in (math.nan, math.inf):
            found, (of_bad, *of_bad_head) = call(bad, padding, way)
            torch.testing.assert_close((found, of_bad), (wanted, of_input), rtol=0, atol=0)
            assert not of_bad[IGNORED].any() and of_bad.isfinite().all()
            # Else a zero is multiplied by NaN, as nn.Linear's. A GPU skips 16-bit rows.
            if not padding or ("skip_ignored" in way and device == "cpu"):
                torch.testing.assert_close(of_bad_head, of_head, rtol=0, atol=0)


@each("skip_ignored", but=NO_TARGET)
def test_chunks_and_skipped_rows_change_nothing(device, name, label):
    given = arguments(name, label, device, ignored=IGNORED)
    wanted = run(name, given)
    for how in ({"chunk_rows": 4}, {"skip_ignored": True}, {"skip_ignored": True, "chunk_rows": 2}):
        torch.testing.assert_close(run(name, given | how), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("ignored", [True, False], ids=["all are ignored", "no rows"])
@each("reduction", but=NO_TARGET)
def test_nothing_is_counted(device, name, label, ignored, dtype):
    """A mean of none is NaN, as in torch; a sum and each row are 0. Gradients are 0."""
    given = arguments(name, label, device, dtype, ignored=range(N) if ignored else ())
    if not ignored:
        rows = {key: given[key][:0] for key in (*HIDDEN, "target", "ids", "probs") if key in given}
        given = replaced(given, **rows)
    given |= {"lse_square_scale": 0.1} if "lse_square_scale" in parameters(name) else {}
    reductions = [given["reduction"]] if "reduction" in given else ["mean", "sum"]
    for way, reduction in itertools.product(ways(name, given), reductions):
        more = {"divisor": 3.0} if reduction == "sum" and "divisor" in parameters(name) else {}
        results = results_of(name, given | way | {"reduction": reduction, **more})
        assert results[0].isnan() if reduction == "mean" else not results[0].any()
        assert not any(grad.any() for grad in gradients(results, given))


@each()
def test_without_gradients(device, name, label):
    """The same numbers, by other operators."""
    given = arguments(name, label, device)
    wanted = results_of(name, given)
    with torch.no_grad():
        found = results_of(name, given)
    assert not any(value.requires_grad for value in found)
    torch.testing.assert_close(found, [value.detach() for value in wanted])


@each("linear_weight")
def test_autocast(device, name, label):
    """Hidden states and heads are cast, as nn.Linear's; gradients have the dtype of their leaf."""
    given = arguments(name, label, device, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        results = results_of(name, given)
    low = {key: given[key].bfloat16() for key in (*HIDDEN, *HEADS) if key in given}
    wanted, of_low = run(name, replaced(given, **low))
    torch.testing.assert_close([value.detach() for value in results], wanted, rtol=0, atol=0)
    for grad, right in zip(gradients(results, given), of_low, strict=True):
        assert grad.dtype == torch.float32 and torch.equal(grad, right.float())


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@each()
def test_inside_a_checkpoint(device, name, label, reentrant):
    """Which runs the forward twice."""
    given = arguments(name, label, device)
    names = [key for key in LEAVES if key in given]

    def step(*leaves):
        hidden = dict(zip(names, leaves, strict=True))
        results = results_of(name, given | hidden | {"input": hidden["input"].sin()})
        return sum(value.sum() for value in results if value.is_floating_point())

    leaves = [given[key] for key in names]
    wanted = torch.autograd.grad(step(*leaves), leaves)
    checkpoint(step, *leaves, use_reentrant=reentrant).backward()
    torch.testing.assert_close([leaf.grad for leaf in leaves], list(wanted))


@each()
def test_later_backwards(device, name, label):
    """The same gradients, also of one leaf, and those of the loss in two places; once the graph is gone, an error."""
    given = arguments(name, label, device)
    results = results_of(name, given)
    wanted = tuple(grad.clone() for grad in gradients(results, given, retain_graph=True))  # nothing scales these
    torch.testing.assert_close(gradients(results, given, retain_graph=True), wanted)
    assert not any(grad.any() for grad in gradients(results, given, torch.zeros_like, retain_graph=True))
    alone = [gradients(results, {key: given[key]}, retain_graph=True) for key in LEAVES if key in given]
    torch.testing.assert_close(alone, [(grad,) for grad in wanted])
    twice = [2 * value + value.square() for value in results if value.requires_grad]
    found = gradients(twice, given, torch.ones_like, retain_graph=True)
    torch.testing.assert_close(found, gradients(results, given, lambda value: 2 + 2 * value, retain_graph=True))
    torch.testing.assert_close(gradients(results, given), wanted)
    with pytest.raises(RuntimeError, match=r"second time|given away by its first backward"):
        gradients(results, given)


def dual(function):
    def call(x):
        with forward_ad.dual_level():
            function(forward_ad.make_dual(x, x))

    return call


@each(but=("cross_entropy", "top_k"))
def test_transforms_are_refused(device, name, label):
    given = arguments(name, label, device)

    def function(key):
        return lambda tensor: results_of(name, given | {key: tensor})[0].sum()

    for key in {*LEAVES} & {*given}:
        one = given[key].detach()
        for transform in (torch.func.grad, vmap, lambda f: lambda x: jvp(f, (x,), (x,)), dual):
            with pytest.raises(NotImplementedError, match=f"xent_ops.{name} inside a functorch transform"):
                transform(function(key))(one)


@pytest.mark.parametrize("name", [name for name in LOCAL if name not in ("cross_entropy", "top_k")])
def test_transforms_are_refused_while_compiling(device, name):
    given = arguments(name, next(iter(CALLS[name])), device)
    x, text = given["input"].detach(), "inside a functorch transform .*cross_entropy is, and F\\.linear makes"

    def function(x):
        return results_of(name, given | {"input": x})[0].sum()

    for transform, fullgraph, error in (
        (torch.func.grad(function), False, NotImplementedError),
        (torch.func.grad(function), True, torch._dynamo.exc.Unsupported),
        (lambda x: vmap(torch.func.grad(function))(x.unsqueeze(0)), True, torch._dynamo.exc.Unsupported),
        (lambda x: jvp(function, (x,), (x,)), True, torch._dynamo.exc.Unsupported),
    ):
        torch.compiler.reset()
        with pytest.raises(error, match=rf"xent_ops\.{name} {text}"):
            torch.compile(transform, backend="aot_eager", fullgraph=fullgraph)(x)


class LikeDTensor(torch.Tensor):
    device_mesh = None


@pytest.mark.parametrize(
    "name", [name for name in LOCAL if any(part in name for part in ("distillation", "token_loss", "divergences"))]
)
def test_dtensors_are_refused(device, name):
    """Of distillation; of a function of tokens where a row has several classes."""
    label = [*CALLS[name]][1 if name in ("token_loss", "linear_token_loss") else 0]
    given = arguments(name, label, device)
    for key in {*HIDDEN, *HEADS} & {*given}:
        with pytest.raises(NotImplementedError, match=rf"{name} of DTensors"):
            of_name(name)(**given | {key: given[key].detach().as_subclass(LikeDTensor)})


class Subclass(torch.Tensor):
    """As those of torchvision and fastai: every result is one too."""


@each()
def test_a_subclass_of_tensor(device, name, label):
    given = arguments(name, label, device)
    values, grads = run(name, given)
    leaves = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
    found = run(name, replaced(given, **{key: value.detach().as_subclass(Subclass) for key, value in leaves.items()}))
    assert all(type(value) is Subclass for value in found[0])
    torch.testing.assert_close(tree_map_only(Subclass, lambda x: x.as_subclass(torch.Tensor), found), (values, grads))


@pytest.mark.parametrize("way", ["meta", "fake", "recorded"])
@each()
def test_no_value_is_read(name, label, way):
    """Meta and fake tensors have none, and make_fx cannot record what Python makes of one."""
    given = arguments(name, label, "cpu")
    if name in ("distillation_token_loss", "token_divergences"):
        given |= {"classes": torch.arange(V)}
    want = [(x.shape, x.dtype) for x in itertools.chain(*run(name, given))]
    if way == "recorded":
        make_fx(lambda: results_of(name, given))()
        return
    mode = FakeTensorMode()
    convert = mode.from_tensor if way == "fake" else lambda x: x.detach().to("meta").requires_grad_(x.requires_grad)
    given = tree_map_only(torch.Tensor, convert, given)
    with mode if way == "fake" else contextlib.nullcontext():
        found = list(itertools.chain(*run(name, given)))
    assert [(x.shape, x.dtype) for x in found] == want
    assert {x.device.type for x in found} == {"cpu" if way == "fake" else "meta"}


def test_an_operator_inside_a_checkpoint_unpacks_its_tensors_once(device):
    """Also for a second derivative of a mean, and for the entropy of ids alone."""
    x, ids = randn(N, V).double().to(device).requires_grad_(), IDS.to(device)
    for step, second in (
        (lambda x: torch.ops.xent.cross_entropy_reduced(x, ids[:, 0])[0], True),
        (lambda x: torch.ops.xent.token_logits(x, ids, with_entropy=True)[2].sum(), False),
    ):
        (grad,) = torch.autograd.grad(checkpoint(step, x, use_reentrant=False), x, create_graph=second)
        torch.testing.assert_close(grad.detach(), torch.autograd.grad(step(x), x)[0])
        assert not second or torch.autograd.grad(grad.square().sum(), x)[0].any()
