"""Every kernel, as the launchers call it, compiled for GPUs that this machine need not have; none may spill registers.

The launchers run on CPU tensors and their launches are recorded, so that what is compiled has the launchers' own
argument types, flags and configs.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

from helpers.covering import fewest  # noqa: E402
from helpers.offline import compile_call, constants_of, launch, recorded, specialised, spills  # noqa: E402
from helpers.samples import Problem, of_launchers  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from xent_ops.kernels.triton import (  # noqa: E402
    launch_backward,
    launch_divergences,
    launch_forward,
    launch_ids,
    launch_reduce,
    launch_shard,
    launch_soft,
    launch_top_k,
    launch_with_grad,
    with_grad_shared,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FULL = {"label_smoothing": 0.1, "softcap": 30.0, "logit_scale": 0.5}
KERNELS = {
    kernel
    for module in (
        launch_backward,
        launch_divergences,
        launch_forward,
        launch_ids,
        launch_with_grad,
        launch_reduce,
        launch_shard,
        launch_soft,
        launch_top_k,
    )
    for name, kernel in vars(module).items()
    if name.endswith("_kernel")
}


def record(monkeypatch, run):
    """(kernel, arguments, constants and compiler options) of each launch."""
    return [(launch.kernel, args, launch.constants) for launch, args in recorded(monkeypatch, run)]


def spills_of_all(calls, target, folder: Path) -> list[int]:
    """Compiled by forks of this process, which inherit the kernels and arguments; threads break Triton's `ast.parse`.

    CPython 3.11 counts the depth of a syntax tree in the interpreter, not in the thread.
    """
    context = get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), context, _inherit, (calls, target, folder)) as pool:
        return list(pool.map(_spills_of, range(len(calls))))


def _inherit(calls, target, folder):
    global _inherited
    _inherited = calls, target, folder / str(os.getpid())
    _inherited[-1].mkdir()


def _spills_of(index: int) -> int:
    calls, target, folder = _inherited
    return spills(compile_call(*calls[index], target), target, folder)


def everything(dtype, vocabulary, full):
    """Run all operators' launchers on small tensors of this dtype and vocabulary."""
    options = {"ignore_index": 7} | (FULL if full else {})
    square = {"lse_square_scale": 1e-4 if full else 0.0}

    def given(rows, classes):
        return torch.zeros(rows, classes, dtype=dtype), torch.zeros(rows, dtype=torch.int64)

    for classes in (vocabulary, 256):  # 256: rows that fit in a tile
        launch("cross_entropy_forward", given(50, classes), {})
    for k in (20, 256):
        launch("top_k", (given(50, vocabulary)[0], k), {})
    few_rows = Problem((2,), vocabulary, (vocabulary, 4 * vocabulary), dtype=dtype)  # they are split
    for sample in of_launchers(few_rows, {**options, **square}, full):
        launch(*sample)
    weight = (torch.ones(16),) * full
    for rows in (1000, 9000):  # the sums over rows by one program, by several
        launch("cross_entropy_reduced", given(rows, 16) + weight, {**options, **square, "reduction": "sum"})
        row, target = torch.zeros(rows), torch.zeros(rows, dtype=torch.int64)
        by_token = (torch.ones(rows),) * full
        launch("row_divisors", (target, *(weight or (None,)), *by_token), {"ignore_index": 7, **square})
        summary_args = (row, row, target, *(weight or (None,)), *(by_token or (None,)), None, *(target,) * full)
        launch("row_summary", summary_args, {"ignore_index": 7, **square})


CASES = [
    (torch.bfloat16, 32000, False),
    (torch.bfloat16, 50257, True),
    (torch.bfloat16, 1024, True),
    (torch.float32, 128256, True),
    (torch.float64, 4096, True),
]
# The kernels with all options on every GPU, all of them on one, and each of them on one more. A case takes half a minute:
# the quick one compiles half of its launches, each flag of a kernel on and off, and other GPUs compile all of them.
QUICK = {("sm_90", 50257)}
ONE_MORE = {("sm_80", 32000), ("sm_100", 1024), ("gfx942", 128256), ("gfx942", 4096)}


def of_case(case):
    return f"{str(case[0])[6:]}-{case[1]}-{'full' if case[2] else 'plain'}"


@pytest.mark.parametrize(
    "name, case",
    [
        pytest.param(
            name,
            case,
            id=f"{name}-{of_case(case)}",
            marks=() if (name, case[1]) in QUICK else pytest.mark.slow,
        )
        for name in TARGETS
        for case in CASES
        if name == "sm_90" or case[1] == 50257 or (name, case[1]) in ONE_MORE
    ],
)
def test_kernels_compile_without_spills(monkeypatch, tmp_path, name, case):
    target = TARGETS[name]
    calls = record(monkeypatch, lambda: everything(*case))
    missing = KERNELS - {call[0] for call in calls}
    if case[0] == torch.float64:  # plain torch
        missing -= {launch_top_k.block_keys_kernel, launch_top_k.choose_kernel}
    if case[1] != 1024:  # short rows are not split
        assert not missing, "no call of everything() launches these"
    calls = list({specialised(*call): call for call in calls}.values())  # Triton compiles equal ones once
    if (name, case[1]) in QUICK:
        calls = fewest(calls, lambda call: constants_of(*call))
    for (kernel, _, kwargs), found in zip(calls, spills_of_all(calls, target, tmp_path), strict=True):
        flags = {k: v for k, v in kwargs.items() if v is not False}
        # ptxas keeps this one to 64 or 128 registers, and a few numbers that no loop reads in memory.
        few = 16 if kernel is launch_divergences.divergences_kernel else 0
        assert found <= few, f"{kernel.__name__} spills {found} bytes on {name} with {flags}"


def test_a_tile_holds_whole_blocks(monkeypatch):
    """Blocks are the longest where one class of many is chosen."""
    (_, _, constants), *_ = record(monkeypatch, lambda: launch("top_k", (torch.empty(1, 2**22), 1), {}))
    assert constants["WIDTH"] % constants["BLOCK"] == 0


@pytest.mark.parametrize(
    "name, capacity",
    [
        pytest.param("sm_80", 166912, marks=pytest.mark.slow),
        ("sm_90", 232448),
        pytest.param("sm_100", 232448, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "dtype, classes",
    [
        (torch.bfloat16, 1000),  # 8 divides it, 16 does not
        (torch.bfloat16, 4096),
        (torch.bfloat16, 50257),
        (torch.float16, 128256),
        (torch.float32, 100003),
    ],
    ids=str,
)
def test_rows_in_shared_memory(monkeypatch, tmp_path, name, capacity, dtype, classes):
    """The Gluon kernel, whose language is experimental: another Triton may not compile it."""
    monkeypatch.setattr(launch_with_grad, "_shared_memory", lambda device: (capacity, 32))
    row = torch.zeros(3)
    tensors = (torch.zeros(3, classes, dtype=dtype), row.long(), row[0], row)
    ((kernel, args, kwargs),) = record(monkeypatch, lambda: launch("cross_entropy_with_grad", tensors, {}))
    assert kernel is with_grad_shared.with_grad_shared_kernel
    compiled = compile_call(kernel, args, kwargs, TARGETS[name])
    assert spills(compiled, TARGETS[name], tmp_path) <= 8, kwargs  # 32 warps leave a thread 64 registers
    assert compiled.metadata.shared <= capacity


def test_another_option_value_is_the_same_kernel(monkeypatch):
    """What Triton specialises a kernel on must not change with the value of an option, an ignore_index or N."""

    def keys(rows, classes, scale, **options):
        def launches():
            place = (5 * rows + 16, 10 * classes + rows)  # another rank, another vocabulary
            for sample in of_launchers(Problem((rows,), classes, place), {**options, "lse_square_scale": scale}, True):
                if not sample.name.startswith("cross_entropy_with_grad"):
                    launch(*sample)
            weight = torch.ones(classes)
            more = torch.zeros(rows + 2)  # fewer rows than processors take forward and backward
            args = (torch.zeros(rows + 2, classes), more.long(), more[0], more, weight)
            launch("cross_entropy_with_grad", args, options)

        result = []
        for kernel, args, kwargs in record(monkeypatch, launches):
            constants = dict(kwargs)
            for parameter, value in zip(kernel.params, args, strict=False):
                if not isinstance(value, torch.Tensor):
                    width = parameter.annotation_type or ("i32" if abs(value) < 2**31 else "i64")
                    special = (value == 1, value % 16 == 0) if not parameter.do_not_specialize else None
                    constants[parameter.name] = (width, special if isinstance(value, int) else None)
            result.append(constants)
        return result

    # As many rows as leave the forward whole: how many parts a row is split into is a constant of the join. As few as
    # share a block of the sum over rows, which is one too.
    first = keys(8, 512, 1e-4, label_smoothing=0.1, softcap=30.0, logit_scale=1.0, ignore_index=-100)
    again = keys(16, 512, 1.0, label_smoothing=0.7, softcap=1.0, logit_scale=16.0, ignore_index=1)
    assert first == again
    assert first == keys(1, 512, 16.0, label_smoothing=1.0, softcap=2.5, logit_scale=0.3, ignore_index=2**40)
