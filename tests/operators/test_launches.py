"""Launches reuse compiled kernels: calls of one signature share one, as in Triton, and it gets the call's arguments."""

import itertools
import weakref

import pytest
import torch
from helpers.interpreter import INTERPRETED

triton = pytest.importorskip("triton", reason="triton is not installed")

from no_device import LAUNCHED, TARGET, RecordingDriver  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from xent_ops.kernels.options import RowOptions  # noqa: E402
from xent_ops.kernels.triton import cached, launch_backward  # noqa: E402
from xent_ops.kernels.triton.launch import LAUNCHERS  # noqa: E402
from xent_ops.ops.launch_cache import call_signature  # noqa: E402

WHY = f"Triton {triton.__version__} is not in cached.VERSIONS and launches every kernel itself"
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter launches every kernel itself"),
    pytest.mark.xfail(not cached._KNOWN, reason=WHY, strict=False),
]


@pytest.fixture(autouse=True)
def every_version(monkeypatch):
    """Those that are not known, too: whether they could be is the question."""
    monkeypatch.setattr(cached, "_KNOWN", True)


def tensors(rows, classes, dtype, target_dtype, offset, padding, weighted):
    """Arguments of launchers, by name, for logits that start ``offset`` elements behind a 16-byte boundary."""
    storage = torch.zeros(rows * (classes + padding) + offset + 16, dtype=dtype)
    logits = storage[offset:].as_strided((rows, classes), (classes + padding, 1), storage_offset=offset)
    target = torch.zeros(rows, dtype=target_dtype)
    row = torch.zeros(rows + 1)[offset % 2 :][:rows]
    weight = torch.ones(classes + 1)[1:] if weighted else None
    return {
        "cross_entropy_forward": (logits, target, weight),
        "cross_entropy_reduced": (logits, target, weight),
        "row_divisors": (target, weight, row),
        "row_summary": (row, row, target, weight, row, None, target),
        "cross_entropy_backward": (row, None, logits, target, row, weight),
        "cross_entropy_backward_": (row[:1].expand(rows), row, logits, target, row, weight, torch.ones(2)),
        "cross_entropy_with_grad": (logits, target, torch.ones(()), None, weight),
        "cross_entropy_shard": (logits, target, 0, classes, weight),
        "soft_cross_entropy_forward": (logits, logits, weight),
        "scale_grad_": (logits, row),
    }


def second_stages(arguments, runs=None, **options):
    """What the launchers return: functions of the tensors, by name and signature. Those in ``runs`` are not made."""
    runs = {} if runs is None else runs
    for name, args in arguments.items():
        given = {} if name == "scale_grad_" else {"options": RowOptions(**options)}
        if (key := (name, call_signature(args, {}))) not in runs:
            runs[key] = LAUNCHERS[name](*args, **given)
    return runs


@pytest.mark.parametrize("rows", [300, 1, 0])
def test_the_first_stage_holds_no_tensor(rows):
    """The operators keep its result in their cache, which must not keep tensors alive."""
    arguments = tensors(rows, 512, torch.bfloat16, torch.int64, 0, 0, True)
    held = [weakref.ref(arg) for args in arguments.values() for arg in args if isinstance(arg, torch.Tensor)]
    runs = second_stages(arguments, label_smoothing=0.1)
    del arguments
    assert runs and not [ref() for ref in held if ref() is not None]


def test_equal_signatures_are_equal_to_triton(monkeypatch):
    """All calls of one Launch have the same specialisation in Triton."""
    calls = []
    monkeypatch.setattr(cached.Launch, "__call__", lambda self, *tensors: calls.append((self, tensors)))
    for rows, classes in itertools.product([1, 2, 16, 300], [1, 16, 1000, 4096, 50257]):
        for dtype, offset, padding in [(torch.bfloat16, 0, 0), (torch.bfloat16, 1, 0), (torch.float32, 4, 8)]:
            kind = (rows, classes, dtype, torch.int64 if rows > 1 else torch.uint8)
            runs = {}
            for again in (offset, offset, offset + 1):
                given = tensors(*kind, again, padding, offset == 4)
                second_stages(given, runs, ignore_index=classes, logit_scale=1.0 + classes)
                for name, args in given.items():
                    runs[name, call_signature(args, {})](*args)
    backend = make_backend(TARGET)
    seen = {}
    for launch_, args in calls:
        kernel = launch_.kernel
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, *launch_.numbers, **launch_.constants)
        assert seen.setdefault(id(launch_), (specialization, options)) == (specialization, options), kernel
    assert len(calls) > len(seen) > 100, "some calls share a launch"


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(driver, "_active", RecordingDriver())
    LAUNCHED.clear()
    return LAUNCHED


@pytest.mark.xfail(not cached._KNOWN, reason=f"{WHY}: where this passes, add it", strict=True)
def test_launches_are_those_that_triton_makes(monkeypatch, no_device):
    """On a 16-byte boundary, off it and back; Triton itself launches once for each signature."""
    original, by_triton, asked, launches = cached.Launch.__call__, cached.Launch.by_triton, [], []

    def counted(self, *tensors):
        asked.append(self)
        return by_triton(self, *tensors)

    def three_times(self, *tensors):
        original(self, *tensors)
        original(self, *tensors)
        by_triton(self, *tensors)
        assert no_device[-1] == no_device[-2] == no_device[-3]
        assert [tensor.data_ptr() for tensor in tensors] == no_device[-1][2][: len(tensors)]
        launches.append(self)

    monkeypatch.setattr(cached.Launch, "__call__", three_times)
    monkeypatch.setattr(cached.Launch, "by_triton", counted)
    for rows in (300, 7):
        kind = (rows, 512, torch.bfloat16, torch.int64)
        runs = {}
        for offset in (0, 0, 1, 8, 0, 1):
            given = tensors(*kind, offset, 0, False)
            second_stages(given, runs, label_smoothing=0.1)
            for name, args in given.items():
                runs[name, call_signature(args, {})](*args)
    assert 0 < len(asked) == len({id(one) for one in launches}) < len(launches)


def test_a_hook_before_a_kernel_is_not_skipped(monkeypatch, no_device):
    seen = []
    logits, row = torch.zeros(4, 512), torch.zeros(4)
    args = (row, None, logits, torch.zeros(4, dtype=torch.int64), row)
    kernel = launch_backward.backward_kernel
    monkeypatch.setattr(kernel, "pre_run_hooks", [])
    run = LAUNCHERS["cross_entropy_backward"](*args)
    for _ in range(2):
        run(*args)
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(1))
    run(*args)
    assert seen == [1]


def test_a_profiler_sees_every_launch(monkeypatch, no_device):
    """By Triton's own launch hooks, which proton sets."""
    asked, by_triton = [], cached.Launch.by_triton
    monkeypatch.setattr(cached.Launch, "by_triton", lambda self, *args: asked.append(1) or by_triton(self, *args))
    grad, factor = torch.zeros(4, 512), torch.zeros(4)
    run = LAUNCHERS["scale_grad_"](grad, factor)
    run(grad, factor)
    for hooks in (triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook):
        asked.clear()
        run(grad, factor)
        assert not asked
        hooks.add(hook := (lambda metadata: None))
        try:
            run(grad, factor)
        finally:
            hooks.remove(hook)
        assert asked
