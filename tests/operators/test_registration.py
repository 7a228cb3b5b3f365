"""Registration: schemas, fakes, autograd, errors. test_values.py tests the values."""

import itertools

import pytest
import torch
from helpers.refusals import refusals
from helpers.samples import calls_of, launched
from torch._subclasses.fake_tensor import FakeTensorMode

import xent_ops
from xent_ops.kernels.options import LossOptions, RowOptions
from xent_ops.ops.library import OPERATORS
from xent_ops.ops.schemas import SCHEMAS

ops = torch.ops.xent


# What a fake says of dtypes does not depend on gradients.
KINDS = [(torch.float32, True), (torch.bfloat16, False), pytest.param(torch.float64, False, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype, requires_grad", KINDS, ids=str)
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(device, dtype, requires_grad, name):
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for sample in calls_of(name, device, dtype, requires_grad):
        torch.library.opcheck(getattr(ops, name).default, *sample[1:], test_utils=utilities)


def traced_differently(device, dtype, name):
    """Calls of an operator; without gradients where there is none with them, which traces the forward as well."""
    found = {}
    for requires_grad in (True, False):
        for sample in calls_of(name, device, dtype, requires_grad):
            found.setdefault(_form(*sample[1:]), sample[1:])
    return list(found.values())


@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck_of_a_trace(device, name):
    """The one check of opcheck that takes long, on the call with the most options."""
    call = max(traced_differently(device, torch.float32, name), key=lambda call: len(call[1]))
    torch.library.opcheck(getattr(ops, name).default, *call, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck_of_every_trace(device, name):
    for call in traced_differently(device, torch.bfloat16, name):
        torch.library.opcheck(getattr(ops, name).default, *call, test_utils="test_aot_dispatch_dynamic")


def _form(args, kwargs):
    """What a graph of the call depends on: the number of dimensions, which arguments are given, and what is no number."""
    tensors = [arg.dim() if isinstance(arg, torch.Tensor) else str(type(arg)) for arg in args]
    masks = [arg for arg in args if isinstance(arg, list | bool)]
    options = sorted((name, value if isinstance(value, str | bool) else "") for name, value in kwargs.items())
    return str((tensors, masks, options))


def transposed(value):
    """The same numbers, in memory in which the first dimension is the last."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    return value.detach().movedim(0, -1).contiguous().movedim(-1, 0)


@pytest.mark.parametrize("name", SCHEMAS)
def test_results_have_the_strides_of_fakes(device, name):
    """Whatever the strides of the arguments are. Compiled code calls view where the fake says that it may."""
    overwritten = [argument.alias_info is not None for argument in getattr(ops, name).default._schema.arguments]
    for _, args, options in calls_of(name, device, torch.float32, False):
        dense_rows = any(arg is torch.bfloat16 for arg in args)  # a narrow gradient is refused for others
        args = [arg if kept or dense_rows else transposed(arg) for arg, kept in zip(args, overwritten, strict=False)]
        with FakeTensorMode() as mode:
            fake_args = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
            fakes = getattr(ops, name)(*fake_args, **options)
        results = getattr(ops, name)(*args, **options)
        pairs = (
            [(results, fakes)] if isinstance(results, torch.Tensor) else zip(results or (), fakes or (), strict=True)
        )
        for result, fake in pairs:
            assert result.numel() == 0 or result.stride() == fake.stride()


@pytest.mark.parametrize("name", SCHEMAS)
def test_samples_have_every_argument(name):
    """At a value that is not its default; of those with ranks, tests/distributed has calls."""
    schema = getattr(ops, name).default._schema
    given = set()
    for _, args, options in calls_of(name, "cpu", torch.bfloat16, False) + calls_of(name, "cpu", torch.float32, False):
        values = {**dict(zip([argument.name for argument in schema.arguments], args, strict=False)), **options}
        given |= {
            one.name for one in schema.arguments if one.name in values and values[one.name] is not one.default_value
        }
    refused = {"label_smoothing", "products"} if given & {"ids", "k"} else set()
    of_ranks = {"group_name", "gathered_input"}
    assert {argument.name for argument in schema.arguments} - of_ranks - refused <= given


def test_every_operator_has_its_launchers():
    """Without a GPU or an NPU no call would miss one."""
    pytest.importorskip("triton", reason="triton is not installed")
    from xent_ops.kernels.ascend import launch as ascend
    from xent_ops.kernels.triton import launch

    assert set(launch.LAUNCHERS) == launched()
    assert set(ascend.LAUNCHERS) == {name for name, operator in OPERATORS.items() if operator.ascend}


def test_schemas_are_what_the_dispatcher_holds():
    for name, schema in SCHEMAS.items():
        parsed = torch._C.parse_schema(f"xent::{name}{schema}")
        assert str(parsed) == str(getattr(ops, name).default._schema)


def test_options_are_those_of_the_schemas():
    """Names, order and defaults: Python leaves out what equals the record's default, and operators fill in theirs."""
    for name, record in (
        ("cross_entropy_forward", RowOptions()),
        ("cross_entropy", (*RowOptions(), *LossOptions()[1:])),
    ):
        arguments = torch._C.parse_schema(f"xent::{name}{SCHEMAS[name]}").arguments
        found = {one.name: one.default_value for one in arguments if one.kwarg_only}
        assert tuple(found)[: len(RowOptions._fields)] == RowOptions._fields
        assert tuple(found.values()) == tuple(record)


@pytest.mark.usefixtures("eager_and_dispatched")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weight"])
def test_gradcheck_and_gradgradcheck(device, reduction, weighted):
    """First and second derivatives against finite differences, with every option and an ignored row."""
    logits = torch.randn(4, 7, device=device, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 6, -100, 3], device=device)
    weight = torch.rand(7, device=device, dtype=torch.float64) if weighted else None
    options = {"label_smoothing": 0.25, "softcap": 3.0, "logit_scale": 1.5, "lse_square_scale": 0.1}

    def function(x):
        return xent_ops.cross_entropy(x, target, weight, reduction=reduction, **options)

    assert torch.autograd.gradcheck(function, logits)
    assert torch.autograd.gradgradcheck(function, logits)


def test_gradgradcheck_of_the_backward_operators(device):
    """With respect to every differentiable argument: upstream gradients, logits, lse, entropy, probabilities, weight."""

    def leaf(*shape):
        return torch.rand(*shape, device=device, dtype=torch.float64, requires_grad=True)

    target = torch.tensor([0, 6, -100], device=device)
    weight = leaf(7).detach()
    options = {"label_smoothing": 0.25, "softcap": 3.0}
    assert torch.autograd.gradcheck(
        lambda a, b, x, s: ops.cross_entropy_backward(a, b, x, target, s, weight, **options),
        (leaf(3), leaf(3), leaf(3, 7), leaf(3)),
    )
    assert torch.autograd.gradcheck(
        lambda a, c, x, s, h: ops.cross_entropy_backward(a, None, x, target, s, weight, None, c, h, **options),
        (leaf(3), leaf(3), leaf(3, 7), leaf(3), leaf(3)),
    )
    assert torch.autograd.gradcheck(
        lambda a, b, x, q, s, w: ops.soft_cross_entropy_backward(a, b, x, q, s, w, **options),
        (leaf(3), leaf(3), leaf(3, 7), leaf(3, 7), leaf(3), leaf(7)),
    )
    soft = (leaf(3, 7), leaf(3, 7), leaf(7))
    function = lambda x, q, w: xent_ops.cross_entropy(x, q, w, **options)  # noqa: E731
    assert torch.autograd.gradcheck(function, soft) and torch.autograd.gradgradcheck(function, soft)
    outputs = lambda x: xent_ops.token_log_probs(x, target)  # noqa: E731
    assert torch.autograd.gradcheck(outputs, leaf(3, 7)) and torch.autograd.gradgradcheck(outputs, leaf(3, 7))


LOGITS, TARGET = (4, 10), torch.tensor([1, 2, 3, 4])


@pytest.mark.parametrize("argument", ["logits", "target", "weight", "label_smoothing", "softcap", "logit_scale"])
def test_bad_arguments_name_themselves_while_compiling(argument):
    """As in eager mode, for which test_contract.py asks every operator."""
    for one, (_, args, options), _, words in refusals("cross_entropy"):
        if one == argument:
            torch.compiler.reset()
            with pytest.raises(Exception, match=words.removeprefix("^")):
                torch.compile(ops.cross_entropy, backend="eager", fullgraph=True)(*args, **options)


def test_bad_arguments_of_the_public_functions():
    x = torch.randn(LOGITS)
    bad = [
        (lambda: xent_ops.cross_entropy(x, TARGET, reduction="avg"), ValueError, "'avg' is not a valid value for reduction; valid are 'none', 'mean', 'sum'"),
        (lambda: xent_ops.CrossEntropyLoss(reduction="avg"), ValueError, "'avg' is not a valid"),
        (lambda: xent_ops.cross_entropy(x, TARGET, dim=2), ValueError, r"dim=2 is not a dimension of input with shape \(4, 10\); valid are -2 to 1"),
        (lambda: xent_ops.cross_entropy(x[0, 0], TARGET), ValueError, "no dimension"),
        (lambda: xent_ops.cross_entropy(x, x.softmax(-1), ignore_index=3), ValueError, "ignore_index=3 is not supported for class probabilities"),
        (lambda: xent_ops.cross_entropy(x, TARGET.view(4, 1).expand(4, 10)), TypeError, "class indices have shape"),
        (lambda: xent_ops.cross_entropy(x, TARGET, lse_square_scale=float("nan")), ValueError, "lse_square_scale must be finite"),
        (lambda: xent_ops.cross_entropy(x, TARGET, x[0].clone().requires_grad_()), RuntimeError, "weight requires grad"),
        (lambda: xent_ops.cross_entropy(x, TARGET.to("meta")), RuntimeError, "target is on meta but logits are on cpu"),
        (lambda: xent_ops.check_targets(x, 10), TypeError, "target has dtype torch.float32"),
    ]  # fmt: skip
    for call, error, text in bad:
        with pytest.raises(error, match=text):
            call()


def test_weight_that_requires_grad_is_refused_by_the_row_operators():
    weight = torch.rand(10, requires_grad=True)
    x = torch.randn(LOGITS, requires_grad=True)
    for wanted in itertools.product((False, True), repeat=2):
        with pytest.raises(RuntimeError, match="weight requires grad"):
            ops.cross_entropy_forward(x, TARGET, weight, *wanted)
    with torch.no_grad():
        assert xent_ops.cross_entropy(x, TARGET, weight).isfinite()


@pytest.mark.usefixtures("eager_and_dispatched")
def test_nothing_is_saved_without_grad(device):
    saved = []
    x = torch.randn(4, 10, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            xent_ops.cross_entropy(x, TARGET.to(device))
        xent_ops.cross_entropy(x.detach(), TARGET.to(device))
        assert saved == []
        xent_ops.cross_entropy(x, TARGET.to(device), reduction="sum")
    sized = [t for t in saved if t.numel() >= 40]
    assert len(sized) == 1 and sized[0].data_ptr() == x.data_ptr(), "the logits themselves, and no copy of them"


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_device_without_a_kernel_is_named(requires_grad):
    """Meta tensors stand for it: an operator without kernel for a key says which."""
    with pytest.raises(NotImplementedError, match=r"xent::cross_entropy_forward.*'SparseCPU'"):
        x = torch.randn(LOGITS).to_sparse()
        ops.cross_entropy_forward(x.requires_grad_(requires_grad), TARGET)


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [True, False])
def test_logits_on_another_device_than_the_current(threads):
    """Autograd's own thread makes their device the current one. Without that thread the launch must do so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for _ in range(3):  # later calls take the cached launches
        x = torch.randn(4, 1000, device="cuda:1", requires_grad=True)
        with torch.cuda.device(0), torch.autograd.set_multithreading_enabled(threads):
            xent_ops.cross_entropy(x, TARGET.to("cuda:1")).backward()
            assert torch.cuda.current_device() == 0
        y = x.detach().cpu().requires_grad_()
        xent_ops.cross_entropy(y, TARGET).backward()
        torch.testing.assert_close(x.grad.cpu(), y.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70000, 32768), (3, 2**31 // 3 + 5000)], ids=str)
def test_more_than_two_to_the_31_elements(shape):
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    target = torch.randint(0, shape[1], shape[:1], device="cuda")
    grad_loss = torch.rand(shape[0], device="cuda")
    loss, lse, argmax, _, _ = ops.cross_entropy_forward(x, target, with_argmax=True)
    grad = ops.cross_entropy_backward(grad_loss, None, x, target, lse)
    for row in (0, 1, shape[0] // 2, shape[0] - 1):
        last = x[row].double()
        assert abs(loss[row] - torch.nn.functional.cross_entropy(last, target[row])) < 1e-4
        assert last[argmax[row]] == last.max()
        wanted = grad_loss[row] * (torch.softmax(last, -1) - torch.nn.functional.one_hot(target[row], shape[1]))
        torch.testing.assert_close(grad[row].double(), wanted, rtol=1e-2, atol=1e-12)


def test_combinations_of_upstream_gradients(device):
    """An output without an upstream gradient changes nothing."""
    x = torch.randn(4, 10, device=device, dtype=torch.float64, requires_grad=True)
    target = TARGET.to(device)
    full = {}
    for use in itertools.product([False, True], repeat=3):
        loss, lse, _, entropy, _ = ops.cross_entropy_forward(x, target, with_entropy=True)
        used = [o.sum() for o, keep in zip((loss, lse, entropy), use, strict=True) if keep]
        if not used:
            continue
        (full[use],) = torch.autograd.grad(sum(used), x)
    one = [full[tuple(i == j for j in range(3))] for i in range(3)]
    for use, grad in full.items():
        torch.testing.assert_close(grad, sum(g for g, keep in zip(one, use, strict=True) if keep))
