"""Launches reuse compiled kernels: two calls share one only where Triton would, and it gets the arguments of the call."""

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

from xent_ops.kernels.options import Options  # noqa: E402
from xent_ops.kernels.triton import cached, launch, launch_backward  # noqa: E402

pytestmark = pytest.mark.skipif(
    INTERPRETED or not cached._KNOWN, reason="this triton, or its interpreter, launches every kernel itself"
)


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
        "cross_entropy_divisor": (logits, target, weight),
        "cross_entropy_backward": (row, None, logits, target, row, weight),
        "cross_entropy_backward_": (row[:1].expand(rows), row, logits, target, row, weight, torch.ones(2)),
        "cross_entropy_with_grad": (logits, target, torch.ones(()), None, weight),
        "scale_grad_": (logits, row),
    }


def second_stages(arguments, **options):
    """What the launchers return, by name: functions of the tensors."""
    given = {name: {} if name == "scale_grad_" else {"options": Options(**options)} for name in arguments}
    return {name: getattr(launch, name)(*args, **given[name]) for name, args in arguments.items()}


@pytest.mark.parametrize("rows", [300, 1, 0])
def test_the_first_stage_holds_no_tensor(rows):
    """The operators keep its result in their cache, which must not keep tensors alive."""
    arguments = tensors(rows, 512, torch.bfloat16, torch.int64, 0, 0, True)
    held = [weakref.ref(arg) for args in arguments.values() for arg in args if isinstance(arg, torch.Tensor)]
    runs = second_stages(arguments, label_smoothing=0.1)
    del arguments
    assert runs and not [ref() for ref in held if ref() is not None]


def test_equal_keys_are_equal_to_triton(monkeypatch):
    """Calls of one Launch whose alignment is the same have the same specialisation in Triton."""
    calls = []
    monkeypatch.setattr(cached.Launch, "__call__", lambda self, *tensors: calls.append((self, tensors)))
    for rows, classes in itertools.product([1, 2, 16, 300], [1, 16, 1000, 4096, 50257]):
        for dtype, offset, padding in [(torch.bfloat16, 0, 0), (torch.bfloat16, 1, 0), (torch.float32, 4, 8)]:
            kind = (rows, classes, dtype, torch.int64 if rows > 1 else torch.uint8)
            runs = second_stages(
                tensors(*kind, offset, padding, offset == 4), ignore_index=classes, logit_scale=1.0 + classes
            )
            for again in (offset, offset, offset + 1):
                for name, args in tensors(*kind, again, padding, offset == 4).items():
                    runs[name](*args)
    backend = make_backend(TARGET)
    seen = {}
    for launch_, args in calls:
        kernel = launch_.kernel
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, *launch_.numbers, **launch_.constants)
        key = (id(launch_), launch_.alignment(tuple(tensor.data_ptr() for tensor in args)))
        assert seen.setdefault(key, (specialization, options)) == (specialization, options), kernel
    assert len(calls) > len(seen) > 100, "some calls share a key"


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(driver, "_active", RecordingDriver())
    LAUNCHED.clear()
    return LAUNCHED


@pytest.mark.parametrize("hooked", [False, True], ids=["", "profiled"])
def test_launches_are_those_that_triton_makes(monkeypatch, no_device, hooked):
    """On a 16-byte boundary, off it and back; Triton itself launches once for each alignment."""
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

    monkeypatch.setattr(cached, "_hooked", lambda: hooked)
    monkeypatch.setattr(cached.Launch, "__call__", three_times)
    monkeypatch.setattr(cached.Launch, "by_triton", counted)
    for rows in (300, 7):
        kind = (rows, 512, torch.bfloat16, torch.int64)
        runs = second_stages(tensors(*kind, 0, 0, False), label_smoothing=0.1)
        for offset in (0, 0, 1, 8, 0, 1):
            for name, args in tensors(*kind, offset, 0, False).items():
                runs[name](*args)
    assert 0 < len(asked) <= 2 * len({id(one) for one in launches}) < len(launches)


def test_a_hook_before_a_kernel_is_not_skipped(monkeypatch, no_device):
    seen = []
    logits, row = torch.zeros(4, 512), torch.zeros(4)
    args = (row, None, logits, torch.zeros(4, dtype=torch.int64), row)
    kernel = launch_backward.backward_kernel
    monkeypatch.setattr(kernel, "pre_run_hooks", [])
    run = launch.cross_entropy_backward(*args)
    for _ in range(2):
        run(*args)
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(1))
    run(*args)
    assert seen == [1]


def test_launch_hooks_are_noticed(monkeypatch, no_device):
    """Triton's own launch hooks, which proton sets."""
    if not cached._HOOKS_ARE_CHAINS:
        pytest.skip("this triton hands every launch to its hooks")
    assert not cached._hooked()
    triton.knobs.runtime.launch_enter_hook.add(hook := (lambda metadata: None))
    try:
        assert cached._hooked()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
