"""A mean or sum does not read the logits of ignored rows, forward or backward: they change no bit, whatever they hold."""

import pytest
import torch
from flat_options import FlatOptions
from helpers.covering import covering
from helpers.processes import run_with_torch

import xent_ops
from xent_ops.kernels import reductions, reference
from xent_ops.testing import realistic_logits

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.125},
    "all": {"label_smoothing": 0.25, "softcap": 30.0, "logit_scale": 0.75, "lse_square_scale": 0.25},
}
PATTERNS = {
    "none": lambda rows: [],
    "all": lambda rows: range(rows),
    "one": lambda rows: [rows - 1],
    "every other": lambda rows: range(0, rows, 2),
    "a run": lambda rows: range(rows // 2, rows),
}
# Rows x classes that take, on a GPU and in the interpreter: several rows a program; one, whose rows start on every
# boundary or none; few rows, shared by programs. The interpreter runs one program after the other.
SHAPES = [(21, 256), (9, 1003), (6, 2304), (3, 9001)]


def case(device, shape, pattern, dtype, ignore_index=-100):
    """Logits with NaN, infinities and large numbers where they are ignored, the same with zeros there, and targets."""
    rows, classes = shape
    zeros = realistic_logits(rows, classes, dtype=dtype)
    target = torch.randint(1, classes, (rows,), generator=torch.Generator().manual_seed(1))
    ignored = list(PATTERNS[pattern](rows))
    target[ignored] = ignore_index
    zeros[ignored] = 0
    anything = zeros.clone()
    for row, value in zip(ignored, [float("nan"), float("inf"), 1e4, float("-inf")] * rows, strict=False):
        anything[row] = value
    return anything.to(device), zeros.to(device), target.to(device)


def loss_and_grad(function, logits, *arguments, **options):
    logits = logits.clone().requires_grad_()
    loss = function(logits, *arguments, **options)
    return loss.detach(), *torch.autograd.grad(loss, logits)


@pytest.mark.interpreter
@pytest.mark.parametrize("shape, pattern, name", covering(SHAPES, PATTERNS, OPTIONS), ids=str)
def test_the_logits_change_nothing(device, shape, pattern, name):
    weighted = name != "plain"
    weight = torch.rand(shape[1], device=device) if weighted else None
    # With class 0 ignored, the logit at the target is not read either.
    anything, zeros, target = case(device, shape, pattern, torch.bfloat16, 0 if weighted else -100)
    options = {"reduction": "sum" if pattern == "all" else "mean", "ignore_index": 0 if weighted else -100}
    options |= OPTIONS[name]
    loss, grad = loss_and_grad(xent_ops.cross_entropy, anything, target, weight, **options)
    wanted, wanted_grad = loss_and_grad(xent_ops.cross_entropy, zeros, target, weight, **options)
    assert loss.isfinite() and torch.equal(loss, wanted) and torch.equal(grad, wanted_grad)
    assert not grad[target == options["ignore_index"]].any()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype, shape, name", covering([torch.float32, torch.float64], SHAPES, OPTIONS), ids=str)
def test_the_lse_of_an_ignored_row_is_infinite(device, kernels, shape, name, dtype):
    """That of a counted row has the bits of the row operator, and so has its loss."""
    ascend = kernels is not torch.ops.xent and kernels.module is not reference
    if ascend and dtype == torch.float64:
        pytest.skip("NPUs have no float64")
    plain = FlatOptions(reductions) if isinstance(kernels, FlatOptions) and not ascend else kernels
    anything, zeros, target = case(device, shape, "every other", dtype)
    rows = {key: value for key, value in OPTIONS[name].items() if key != "lse_square_scale"}
    loss, lse, *_ = kernels.cross_entropy_forward(zeros, target, **rows)
    value, _, saved, _ = plain.cross_entropy_reduced(anything, target, reduction="sum", **rows)
    assert torch.equal(saved, lse.masked_fill(target == -100, float("inf")))
    torch.testing.assert_close(value.double(), loss.double().sum(), rtol=1e-6, atol=0)
    one = torch.ones((), dtype=lse.dtype, device=device)
    square = {"lse_square_scale": 0.25}
    grads = [kernels.cross_entropy_backward(one, None, x, target, saved, **rows, **square) for x in (anything, zeros)]
    assert torch.equal(*grads) and not grads[0][target == -100].any() and grads[0].isfinite().all()


def test_second_derivatives_make_the_lse_again(device):
    """Of large logits, with rows whose saved lse is infinite."""
    x = torch.full((4, 10), 200.0, device=device)
    x[0, 3], target = 201.0, torch.tensor([3, -100, 4, -100], device=device)

    def second(function):
        logits = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(logits), logits, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), logits)[0]

    wanted = second(lambda logits: torch.nn.functional.cross_entropy(logits, target))
    for function in (xent_ops.cross_entropy, torch.ops.xent.cross_entropy):
        grad = second(lambda logits: function(logits, target))  # noqa: B023
        torch.testing.assert_close(grad, wanted)
        assert not grad[1::2].any()


def test_the_lse_is_not_differentiable(device):
    x, target = torch.randn(4, 10, device=device, requires_grad=True), torch.tensor([1, -100, 2, 3], device=device)
    value, divisor, lse, _ = torch.ops.xent.cross_entropy_reduced(x, target)
    assert value.requires_grad and not divisor.requires_grad and not lse.requires_grad


def test_vmap(device):
    x, target = torch.randn(3, 4, 10, device=device), torch.randint(0, 10, (3, 4), device=device)
    target[:, ::2] = -100
    x[target == -100] = float("nan")
    batched = torch.vmap(torch.ops.xent.cross_entropy_reduced)(x, target)
    for sample in range(3):
        for one, other in zip(torch.ops.xent.cross_entropy_reduced(x[sample], target[sample]), batched, strict=True):
            torch.testing.assert_close(other[sample], one)
    grad = torch.vmap(torch.func.grad(lambda a, b: xent_ops.cross_entropy(a, b, lse_square_scale=0.25)))(x, target)
    assert grad.isfinite().all() and not grad[target == -100].any()


@pytest.mark.parametrize("cpp", [True, False], ids=["", "plain torch"])
def test_compiled(device, cpp, monkeypatch):
    """Without our C++ kernels, Inductor fuses the plain-torch gradient."""
    from xent_ops.inductor.lowerings import reuse

    if not cpp:
        if device != "cpu":
            pytest.skip("Inductor fuses plain torch on the CPU alone")
        monkeypatch.setattr(reuse, "writes_over", lambda device: False)
    anything, zeros, target = case(device, (9, 1003), "every other", torch.float32)

    def function(logits, target):
        return xent_ops.cross_entropy(logits * 2, target, lse_square_scale=0.25)

    compiled = torch.compile(function, fullgraph=True)
    loss, grad = loss_and_grad(compiled, anything, target)
    wanted, wanted_grad = loss_and_grad(compiled, zeros, target)
    assert loss.isfinite() and torch.equal(loss, wanted) and torch.equal(grad, wanted_grad)
    torch.testing.assert_close(loss, function(zeros, target))
    torch.testing.assert_close(grad, loss_and_grad(function, zeros, target)[1])


@pytest.mark.interpreter
def test_no_ignored_row_is_read():
    """By C++, and by the Triton kernels in the interpreter: a read of their memory would end the process."""
    program = """
        import ctypes, mmap, os
        import torch
        import xent_ops
        from xent_ops.kernels import cpu
        from xent_ops.ops import library

        if os.environ.get("TRITON_INTERPRET") == "1":
            override = torch.library.Library("xent", "IMPL")
            for name, operator in library.OPERATORS.items():
                override.impl(name, operator.on_triton, "CPU", allow_override=True)
        elif cpu.problem() is not None:
            raise SystemExit(0)  # plain torch reads them
        ops, one = torch.ops.xent, torch.ones(())
        libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
        for rows, pages, options in (
            (12, 1, {}), (4, 3, {"label_smoothing": 0.125}), (2, 9, {}), (2, 9, {"label_smoothing": 0.125, "softcap": 30.0})
        ):
            memory = mmap.mmap(-1, (rows + 2) * pages * page)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            x = torch.frombuffer(memory, dtype=torch.bfloat16).view(rows + 2, -1)[1:-1].normal_()
            for classes in {x.shape[1], x.shape[1] - 1, 256}:
                logits, target = x[:, :classes], torch.arange(1, rows + 1)
                ignored = list(range(0, rows, 2))
                target[ignored] = 0

                def protect(flags):
                    for row in ignored:
                        start = ctypes.c_void_p(address + (row + 1) * pages * page)
                        assert libc.mprotect(start, ctypes.c_size_t(pages * page), flags) == 0, ctypes.get_errno()

                def compute():
                    loss, lse, *_, grad = ops.cross_entropy_with_grad(logits, target, one, ignore_index=0, **options)
                    return *ops.cross_entropy_reduced(logits, target, ignore_index=0, **options), lse, loss, grad

                wanted = compute()
                protect(0)
                got = compute()
                protect(mmap.PROT_READ | mmap.PROT_WRITE)
                assert all(map(torch.equal, got, wanted))
                assert got[2][ignored].isinf().all() and got[4][ignored].isinf().all() and not got[-1][ignored].any()
    """
    run_with_torch(program)
