"""Launches that reuse what Triton compiled: the key must part what Triton parts, and the arguments must arrive."""

import itertools
import types

import pytest
import torch
from conftest import INTERPRETED

triton = pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from xent_ops.kernels.triton import cached, launch, launch_one_pass  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)
pytestmark = pytest.mark.skipif(
    INTERPRETED or not cached._KNOWN, reason="this triton, or its interpreter, launches every kernel itself"
)


class Recorder:
    def __init__(self, kernel, calls):
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((self.kernel, args, kwargs))


def run(rows, classes, dtype, target_dtype, offset, padding, options):
    """Forward, backward and one pass of logits that start ``offset`` elements behind a 16-byte boundary."""
    storage = torch.zeros(rows * (classes + padding) + offset + 16, dtype=dtype)
    logits = storage[offset:].as_strided((rows, classes), (classes + padding, 1), storage_offset=offset)
    target = torch.zeros(rows, dtype=target_dtype)
    row = torch.zeros(rows + 1)[offset % 2 :][:rows]
    options = dict(options)
    weight = torch.ones(classes + 1)[1:] if options.pop("weight", False) else None
    launch.cross_entropy_forward(logits, target, weight, **options)
    launch.cross_entropy_backward(row, None, logits, target, row, weight, **options)
    launch.cross_entropy_backward(row[:1].expand(rows), row, logits, target, row, weight, **options)
    launch_one_pass.cross_entropy_with_grad(logits, target, row[0], None, weight, **options)
    launch_one_pass.scale_grad_(logits, row)
    launch_one_pass.scale_grad_(logits, row[0])


def test_equal_keys_are_equal_to_triton(monkeypatch):
    calls = []
    for module in (launch, launch_one_pass):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), calls))
    for rows, classes in itertools.product([1, 2, 16, 300], [1, 16, 1000, 4096, 50257]):
        for dtype, offset, padding in [(torch.bfloat16, 0, 0), (torch.bfloat16, 1, 0), (torch.float32, 4, 8)]:
            options = {"ignore_index": rows, "logit_scale": 1.0 + rows, "weight": offset == 4}
            run(rows, classes, dtype, torch.int64 if rows > 1 else torch.uint8, offset, padding, options)
    backend = make_backend(TARGET)
    seen = {}
    for kernel, args, constants in calls:
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*args, **constants)
        key = (kernel, cached.Cached(kernel).key(args, constants))
        assert seen.setdefault(key, (specialization, options)) == (specialization, options), kernel
    assert len(calls) > len(seen) > 100, "some calls share a key"


LAUNCHED = []


class Launcher:
    def __init__(self, source, metadata):
        self.name = metadata.name

    def __call__(self, *args):
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[9:]]
        LAUNCHED.append((self.name, args[:3], values))


class Driver:
    """A device that launches nothing; all else is Triton's own: binding, keys, compilation."""

    launcher_cls = Launcher
    utils = types.SimpleNamespace(
        load_binary=lambda *args: (object(), object(), 32, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def get_current_device(self):
        return 99  # no GPU's: what is compiled here cannot run

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGET


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(driver, "_active", Driver())
    cached._cached.cache_clear()
    LAUNCHED.clear()
    yield LAUNCHED
    cached._cached.cache_clear()


def test_the_same_arguments_are_launched(monkeypatch, no_device):
    """Another place, another target, other options and other pointers: as many launches as calls, each with its own."""
    kernel, out = launch.backward_kernel, torch.empty(4, 512)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: out)
    rows = torch.zeros(2, 4)
    for run_number, scale in enumerate((1.0, 2.0, 3.0)):
        logits, target = torch.zeros(4, 512), torch.zeros(4, dtype=torch.int64)
        for launcher in (cached.launch, lambda kernel, grid: kernel[(grid,)]):
            monkeypatch.setattr(launch, "launch", launcher)
            launch.cross_entropy_backward(rows[0], None, logits, target, rows[1], logit_scale=scale)
        assert no_device[-1] == no_device[-2]
        assert scale in no_device[-1][2] and logits.data_ptr() in no_device[-1][2]
        assert len(cached._cached(kernel)._compiled) == 1 and len(no_device) == 2 * (run_number + 1)


def test_a_hook_before_a_kernel_is_not_skipped(monkeypatch, no_device):
    seen = []
    logits, row = torch.zeros(4, 512), torch.zeros(4)
    target = torch.zeros(4, dtype=torch.int64)
    monkeypatch.setattr(launch.backward_kernel, "pre_run_hooks", [])
    for _ in range(2):
        launch.cross_entropy_backward(row, None, logits, target, row)
    launch.backward_kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(1))
    launch.cross_entropy_backward(row, None, logits, target, row)
    assert seen == [1]
