"""Products of as many rows as a number on the device says, on a GPU of capability 9 and in the interpreter."""

import pytest
import torch
from helpers.interpreter import INTERPRETED

import xent_ops
from xent_ops.head import packing, products

triton = pytest.importorskip("triton", reason="triton is not installed")

from helpers.offline import compile_call, spills  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from xent_ops.kernels.triton import launch_product  # noqa: E402

SHARED_MEMORY = 232448  # bytes that a program may have on an H100 and an H200
ROWS, CHUNK = (60, 24) if INTERPRETED else (90, 40)  # the interpreter runs a program after the other
DTYPES = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]  # the interpreter cannot multiply others


@pytest.fixture
def device(device, monkeypatch):
    if device == "cpu" and not INTERPRETED:
        pytest.skip("the kernels are those of GPUs")
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernels need a GPU of capability 9")
    if device == "cpu":  # the interpreter takes as long for a small tile, and for many less than for large ones
        monkeypatch.setattr(launch_product, "_TILE", launch_product.Tile(32, 64, 32))
    return device


def normal(*shape, device, dtype):
    return torch.randn(shape, device=device).to(dtype)


def close(got, wanted, dtype):
    assert (got.double() - wanted).norm() <= 2 * torch.finfo(dtype).eps * wanted.norm()


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [0, 50, ROWS])
@pytest.mark.parametrize("features, classes", [(136, 203)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(device, dtype, features, classes, count):
    """Of the rows that are counted; no tile beyond them is written, and what is there is not read."""
    how = {"device": device, "dtype": dtype}
    x, head, bias = normal(ROWS, features, **how), normal(classes, features, **how), normal(classes, **how)
    counted = torch.tensor(count, dtype=torch.int32, device=device)
    memory = torch.full((ROWS, -(-classes // 8) * 8), 7.0, **how)
    logits = memory[:, :classes]
    launch_product.logits(x, head, bias, counted, logits)
    close(logits[:count], x[:count].double() @ head.double().t() + bias.double(), dtype)
    tile = launch_product._TILE.ROWS
    assert (logits[-(-count // tile) * tile :] == 7).all()
    wide = torch.full((ROWS, -(-classes // 4) * 4), 7.0, device=device)[:, :classes]  # not rounded
    launch_product.logits(x, head, bias, counted, wide)
    close(wide[:count], x[:count].double() @ head.double().t() + bias.double(), torch.float32)
    assert (wide[-(-count // tile) * tile :] == 7).all()

    gradient = logits.normal_()
    gradient[count:] = 0
    wanted = gradient.double().t() @ x.double()
    for sums in (dtype, torch.float32):
        grad_weight = torch.full((classes, features), float("nan"), device=device, dtype=sums)
        launch_product.grad_weight(gradient, x, counted, grad_weight, add=False)
        close(grad_weight, wanted, dtype)
        launch_product.grad_weight(gradient, x, counted, grad_weight, add=True)
        close(grad_weight, 2 * wanted, dtype)

    gradient[-(-count // tile) * tile :] = float("nan")
    order = torch.randperm(2 * ROWS, device=device)[:ROWS]
    grad_input = torch.full((2 * ROWS, features), 7.0, **how)
    launch_product.grad_input(gradient, head, counted, order, grad_input)
    close(grad_input[order[:count]], gradient[:count].double() @ head.double(), dtype)
    others = torch.ones(2 * ROWS, dtype=torch.bool, device=device).index_fill_(0, order[:count], False)
    assert (grad_input[others] == 7).all()


@pytest.mark.interpreter
def test_one_class_of_any_stride(device):
    """The one row of a transposed or sliced head: its stride is never taken, and is not one of whole 16 bytes."""
    how = {"device": device, "dtype": torch.float16}
    x, head = normal(ROWS, 40, **how), normal(40, 1, **how).t()
    assert head.stride(0) == 1 and head.is_contiguous()
    counted = torch.tensor(ROWS, dtype=torch.int32, device=device)
    logits = torch.empty(ROWS, 8, **how)[:, :1]
    launch_product.logits(x, head, None, counted, logits)
    close(logits, x.double() @ head.double().t(), torch.float16)
    grad_input = torch.empty(ROWS, 40, **how)
    launch_product.grad_input(logits, head, counted, torch.arange(ROWS, device=device), grad_input)
    close(grad_input, logits.double() @ head.double(), torch.float16)


@pytest.mark.interpreter
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
def test_a_whole_loss(device, entropy, logits_dtype, monkeypatch):
    """In chunks, of which the first is full, the second is not, and the third has no row."""
    monkeypatch.setattr(packing, "_on_the_host", lambda *args: packing._on_the_device(*args, launch_product))
    how = {"device": device, "dtype": torch.float16}
    x, head, bias = normal(ROWS, 40, **how), normal(59, 40, **how) / 4, normal(59, **how)
    target = torch.where(torch.rand(ROWS, device=device) < 0.5, torch.randint(59, (ROWS,), device=device), -100)
    counted = target != -100

    def step(**options):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, head, bias)]
        call = {"linear_bias": inputs[2], "chunk_rows": CHUNK, "logits_dtype": logits_dtype, **options}
        if entropy:
            made = xent_ops.linear_token_log_probs(*inputs[:2], target, **call)
            loss = made.log_probs.sum() + made.entropy[counted].sum()
        else:
            loss = xent_ops.linear_cross_entropy(*inputs[:2], target, lse_square_scale=0.01, **call)
        return loss.detach(), *torch.autograd.grad(loss, inputs)

    for got, wanted in zip(step(skip_ignored=True), step(), strict=True):
        assert (got.double() - wanted.double()).norm() <= 2e-3 * wanted.double().norm()


@pytest.mark.interpreter
@pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning")
@pytest.mark.usefixtures("new_memory_is_nan")
def test_row_operators_get_logits_that_somebody_wrote(device, monkeypatch):
    monkeypatch.setattr(packing, "_on_the_host", lambda *args: packing._on_the_device(*args, launch_product))
    chunks, finite = products.Products.chunks, []

    def looked_at(self):
        for chunk, logits in chunks(self):
            finite.append(bool(logits.isfinite().all()))
            yield chunk, logits

    monkeypatch.setattr(products.Products, "chunks", looked_at)
    how = {"device": device, "dtype": torch.float16}
    x, head, target = normal(ROWS, 40, **how), normal(59, 40, **how), torch.arange(ROWS, device=device) % 59
    target[20:] = -100
    torch.ops.xent.linear_cross_entropy_forward(x, head, target, chunk_rows=CHUNK, skip_ignored=True)
    assert finite == [True] * 3


@pytest.mark.gpu
def test_shares_of_tiles(device):
    """Few rows and many, so that programs take whole tiles, shares of tiles, or both; the same bits each time."""
    for rows, features in ((64, 256), (700, 4096), (2048, 2304), (2048, 4096)):
        gradient = normal(rows, 5000, device=device, dtype=torch.bfloat16)
        head = normal(5000, features, device=device, dtype=torch.bfloat16)
        order = torch.randperm(rows, device=device)
        for count in (rows, rows // 3, 1):
            counted, made = torch.tensor(count, dtype=torch.int32, device=device), []
            for _ in range(2):
                grad_input = torch.zeros(rows, features, device=device, dtype=torch.bfloat16)
                launch_product.grad_input(gradient, head, counted, order, grad_input)
                made.append(grad_input)
            assert torch.equal(*made)
            close(made[0][order[:count]], gradient[:count].double() @ head.double(), torch.bfloat16)


def test_what_it_serves():
    def reason(x, head):
        return launch_product.why_not(x, head)

    x, head = torch.ones(4, 16, dtype=torch.bfloat16), torch.ones(9, 16, dtype=torch.bfloat16)
    assert reason(x, head) is None
    assert reason(x, torch.ones(16, 1, dtype=torch.bfloat16).t()) is None
    assert "nothing to multiply" in reason(x[:, :0], head[:, :0])
    assert "nothing to multiply" in reason(x, head[:0])
    assert "torch.float32" in reason(x.float(), head.float())
    assert "16 bytes" in reason(x[:, :12], head[:, :12].contiguous())
    assert "16 bytes" in reason(x, head.t().contiguous().t())
    assert "16 bytes" in reason(x, torch.ones(9 * 16 + 1, dtype=torch.bfloat16)[1:].view(9, 16))


class Recorded:
    """In place of a kernel: keeps what it is launched with."""

    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda *args, **keywords: self.calls.append((self.kernel, args, keywords))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_compiled_without_a_gpu(dtype, monkeypatch, tmp_path):
    """Each launch fits into shared memory, and no register spills."""
    calls = []
    for name, kernel in vars(launch_product).copy().items():
        if name.endswith("_kernel"):
            monkeypatch.setattr(launch_product, name, Recorded(kernel, calls))
    x, head, logits = (torch.ones(shape, dtype=dtype) for shape in ((256, 64), (512, 64), (256, 512)))
    count, order = torch.tensor(1, dtype=torch.int32), torch.arange(256)
    for bias in (None, head[:, 0].contiguous()):
        for out in (logits, logits.float()):
            launch_product.logits(x, head, bias, count, out)
    for sums in (dtype, torch.float32):
        for add in (False, True):
            launch_product.grad_weight(logits, x, count, head.to(sums), add)
    launch_product.grad_input(logits, head, count, order, x)
    assert len(calls) == 4 + 4 + 3
    target = GPUTarget("cuda", 90, 32)
    for call in calls:
        compiled = compile_call(*call, target)
        assert compiled.metadata.shared <= SHARED_MEMORY
        assert spills(compiled, target, tmp_path) == 0
