"""How many rows a chunk of logits has by default: their memory, at sizes that no test could hold."""

import itertools

import pytest
import torch
from helpers.graphs import CompileCounterWithBackend

import xent_ops
from xent_ops.head import loop
from xent_ops.head.sizes import rows_of_chunk, rows_of_one_shape, without_gradients
from xent_ops.kernels.options import Chunking

GIB = 2**30
N = 1 << 20  # many rows, of which a chunk takes as many as it wants


def rows_by_default(device, dtype, features, classes, wider=False, logits_dtype=None):
    """On an accelerator (a meta tensor stands for one) or a CPU, without memory."""
    input = torch.empty(1, device=device, dtype=dtype).expand(N, features)
    return rows_of_chunk(N, input, classes, wider, None, logits_dtype)


# (dtype, H, V, is the weight's gradient added up in more bytes, the logits' dtype): rows on an accelerator
DEFAULTS = {
    (torch.bfloat16, 1024, 32000, False): 4096,
    (torch.bfloat16, 4096, 128256, False): 2048,
    (torch.bfloat16, 4096, 128256, True): 4096,
    (torch.float16, 8192, 128256, True): 4096,
    (torch.float32, 4096, 128256, False): 1024,
    (torch.bfloat16, 4096, 151936, True): 4096,
    (torch.bfloat16, 2304, 256000, False): 2048,
    (torch.bfloat16, 2304, 256000, True): 2048,
    (torch.bfloat16, 64, 500_000, False): 1024,
    (torch.bfloat16, 64, 500_000, True): 1024,
    (torch.float32, 64, 500_000, False): 512,
    (torch.bfloat16, 64, 10_000_000, False): 32,
    (torch.bfloat16, 64, 10_000_000, True): 32,
    (torch.bfloat16, 4096, 128256, False, torch.float32): 2048,
    (torch.bfloat16, 64, 500_000, False, torch.float32): 512,
    (torch.bfloat16, 64, 500_000, False, torch.bfloat16): 1024,
}


@pytest.mark.parametrize("case", DEFAULTS, ids=str)
def test_defaults(case):
    assert rows_by_default("meta", *case) == DEFAULTS[case]


def test_no_default_takes_more_than_a_gibibyte():
    """Nor less than half of it for that reason. A sum in more bytes: twice that at most, in what its copy takes later."""
    sizes = (64, 256, 4096), (1000, 32000, 128256, 262145, 500_000, 10_000_000, 2**31)
    for device, dtype in itertools.product(("meta", "cpu"), (torch.bfloat16, torch.float32, torch.float64)):
        for features, classes in itertools.product(*sizes):
            rows = rows_by_default(device, dtype, features, classes)
            taken = rows * classes * dtype.itemsize
            assert (taken <= GIB or rows == 1) and rows >= 1
            at_least = 512 if device == "cpu" else 4096 // dtype.itemsize
            assert rows >= at_least or 2 * taken > GIB
            wider = rows_by_default(device, dtype, features, classes, True)
            assert rows <= wider <= (rows if device == "cpu" or rows >= features else min(2 * rows, features))
            if dtype == torch.bfloat16:
                in_float32 = rows_by_default(device, dtype, features, classes, logits_dtype=torch.float32)
                assert in_float32 * classes * 4 <= GIB or in_float32 == 1


def test_a_number_of_the_caller_s_counts():
    input = torch.empty(1, device="meta", dtype=torch.bfloat16).expand(N, 64)
    assert rows_of_chunk(N, input, 10_000_000, False, 4096) == 4096


# (dtype, rows, H, V, the logits' dtype): rows of a chunk of a forward alone
ALONE = {
    (torch.bfloat16, 8192, 4096, 128256, None): 4096,
    (torch.bfloat16, 8192, 2048, 128256, None): 4096,
    (torch.bfloat16, 8192, 1024, 128256, None): 2048,  # its weight's gradient is smaller than a chunk
    (torch.bfloat16, 5000, 4096, 128256, None): 2560,
    (torch.bfloat16, 100, 4096, 128256, None): 100,
    (torch.bfloat16, 0, 4096, 128256, None): 1,
    (torch.bfloat16, 8192, 4096, 32000, None): 8192,
    (torch.bfloat16, 8192, 4096, 128256, torch.float32): 2048,  # 4096 would be 2 GiB
    (torch.float32, 8192, 4096, 128256, None): 2048,
    (torch.bfloat16, 8192, 4096, 500_000, None): 1024,
}


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_a_forward_alone(case):
    """It takes no more memory than a training step, a chunk and the weight's gradient, and no more than 1 GiB."""
    dtype, rows, features, classes, logits_dtype = case
    input = torch.empty(1, device="meta", dtype=dtype).expand(rows, features)
    found = without_gradients(Chunking(logits_dtype=logits_dtype), rows, input, classes).chunk_rows
    assert found == ALONE[case]
    step = rows_by_default("meta", dtype, features, classes, False, logits_dtype)
    row = classes * (logits_dtype or dtype).itemsize
    assert found * row <= min(step * row + classes * features * dtype.itemsize, GIB)


def test_a_forward_alone_with_chunks_of_its_own():
    input = torch.empty(8192, 4096, device="meta", dtype=torch.bfloat16)
    for chunking in (Chunking(512), Chunking(products="fp8")):
        assert without_gradients(chunking, 8192, input, 128256) == chunking
    on_cpu = torch.empty(1, dtype=torch.bfloat16).expand(8192, 4096)
    assert without_gradients(Chunking(), 8192, on_cpu, 128256) == Chunking()


@pytest.mark.parametrize(
    "rows, world, chunk_rows, chunks",
    [(8192, 4, None, 1), (8192, 4, 4096, 2), (16384, 4, None, 4), (8192, 1, None, 4), (4096, 1, None, 2)],
)
def test_ranks_hold_two_chunks_so_two_are_one(rows, world, chunk_rows, chunks):
    """Over ranks the next chunk's product runs before a chunk's gradient."""
    input = torch.empty(rows, 4096, device="meta", dtype=torch.bfloat16)
    weight = torch.empty(128256 // world, 4096, device="meta", dtype=torch.bfloat16)
    head = loop.HeadSlice(weight, None, None, (0, 128256), chunking=Chunking(chunk_rows))
    ends, _ = loop._ends(rows, 1, [input], head, world)
    assert ends[0] == 0 and ends[-1] == rows and len(ends) == chunks + 1


def test_symbolic_sizes_stay_symbolic():
    """In the open loop, whose chunks tracers see."""

    def step(x, head, target):
        return xent_ops.linear_token_loss(x, head, target, lambda stats: -stats.log_probs, reduction="sum")

    counter = CompileCounterWithBackend("aot_eager")
    compiled, frames = torch.compile(step, fullgraph=True, backend=counter, dynamic=True), []
    for rows, classes in ((48, 100), (40, 200), (9, 37), (300, 1000)):
        x, head, target = torch.randn(rows, 16), torch.randn(classes, 16), torch.arange(rows) % classes
        grads = []
        for function in (compiled, step):
            leaf = x.clone().requires_grad_()
            function(leaf, head, target).backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1


def test_rows_of_one_shape_on_a_cpu():
    """A multiple of 4, also of what each of several ranks computes of a chunk."""
    for chunk_rows, parts in ((1, 1), (6, 1), (6, 3), (512, 3)):
        rows = rows_of_one_shape(torch.empty(9, 8), 130, chunk_rows, parts=parts)
        assert rows % 4 == 0 and 0 <= rows - chunk_rows // parts < 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_two_heads_of_float32_logits_have_half_the_rows(dtype):
    """So that both chunks take the memory of the input's dtype. A CPU converts the whole head once a chunk."""
    for classes, rows in ((32000, 4096), (128256, 2048), (256000, 2048)):
        for device, half in (("meta", rows // 2), ("cpu", 512)):
            input = torch.empty(8192, 2048, device="meta", dtype=dtype)
            input = input if device == "meta" else torch.empty(1, dtype=dtype).expand(8192, 2048)
            size_args = (8192, input, classes, False, None)
            assert rows_of_chunk(*size_args, torch.float32, heads=2) == half
            assert rows_of_chunk(*size_args, dtype, heads=2) == (rows if device == "meta" else 512)
            assert rows_of_chunk(*size_args, None, heads=2) == rows_of_chunk(*size_args, None)
    assert rows_of_chunk(*size_args[:4], 24, torch.float32, heads=2) == 24
