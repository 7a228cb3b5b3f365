"""Launches that reuse what Triton compiled: the key must part what Triton parts, and the arguments must arrive."""

import itertools

import pytest
import torch
from conftest import INTERPRETED

triton = pytest.importorskip("triton", reason="triton is not installed")

from no_device import LAUNCHED, TARGET, RecordingDriver  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from xent_ops.kernels.triton import cached, launch, launch_mean, launch_one_pass  # noqa: E402
from xent_ops.ops import library  # noqa: E402

pytestmark = pytest.mark.skipif(
    INTERPRETED or not cached._KNOWN, reason="this triton, or its interpreter, launches every kernel itself"
)


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
    launch_mean.mean(row, target, -100)
    launch_mean.mean(row, row, None)
    launch_one_pass.scale_grad_(logits, row)
    launch_one_pass.scale_grad_(logits, row[0])


def test_equal_keys_are_equal_to_triton(monkeypatch):
    calls = []

    def launched(self, grid, *tensors, varying=()):
        calls.append((self, tensors, varying))

    monkeypatch.setattr(cached.Launch, "__call__", launched)
    for rows, classes in itertools.product([1, 2, 16, 300], [1, 16, 1000, 4096, 50257]):
        for dtype, offset, padding in [(torch.bfloat16, 0, 0), (torch.bfloat16, 1, 0), (torch.float32, 4, 8)]:
            options = {"ignore_index": classes, "logit_scale": 1.0 + classes, "weight": offset == 4}
            run(rows, classes, dtype, torch.int64 if rows > 1 else torch.uint8, offset, padding, options)
    backend = make_backend(TARGET)
    seen = {}
    for launch_, tensors, varying in calls:
        kernel = launch_.kernel
        binder = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binder(*tensors, *varying, *launch_.numbers, **launch_.constants)
        pointers = tuple(tensor.data_ptr() for tensor in tensors)
        key = (id(launch_), launch_.key(tensors, pointers))
        assert seen.setdefault(key, (specialization, options)) == (specialization, options), kernel
    assert len(calls) > len(seen) > 100, "some calls share a key"


@pytest.fixture
def no_device(monkeypatch):
    monkeypatch.setattr(driver, "_active", RecordingDriver())
    _forget()
    LAUNCHED.clear()
    yield LAUNCHED
    _forget()


def _forget():
    """What was planned for another driver."""
    for module in (launch, launch_mean, launch_one_pass):
        for plan in vars(module).values():
            if hasattr(plan, "cache_clear"):
                plan.cache_clear()


@pytest.mark.parametrize("hooked", [False, True], ids=["", "profiled"])
def test_launches_are_those_that_triton_makes(monkeypatch, no_device, hooked):
    """With other rows and other pointers, on a 16-byte boundary and off it; and Triton is asked once for each kind."""
    original, asked, launches = cached.Launch.__call__, [], []

    def by_triton(self, grid, *tensors, varying=()):
        asked.append(self)
        return self.kernel[(grid,)](*tensors, *varying, *self.numbers, **self.constants)

    def three_times(self, grid, *tensors, varying=()):
        original(self, grid, *tensors, varying=varying)
        original(self, grid, *tensors, varying=varying)
        by_triton(self, grid, *tensors, varying=varying)
        asked.pop()
        assert no_device[-1] == no_device[-2] == no_device[-3]
        assert [tensor.data_ptr() for tensor in tensors] == no_device[-1][2][: len(tensors)]
        launches.append(id(self._compiled))  # which a Bound launch shares with that which it is made of

    monkeypatch.setattr(cached, "_hooked", lambda: hooked)
    monkeypatch.setattr(cached.Launch, "__call__", three_times)
    monkeypatch.setattr(cached.Launch, "by_triton", by_triton)
    for rows, offset in [(300, 0), (300, 0), (300, 1), (7, 0), (7, 1), (300, 1)]:
        run(rows, 512, torch.bfloat16, torch.int64, offset, 0, {"label_smoothing": 0.1})
    assert 0 < len(asked) <= 2 * len(set(launches)) < len(launches)


def test_a_bound_launch_is_the_same(monkeypatch, no_device):
    """On a boundary, off it, and back; with a hook before the kernel, which hears of every launch."""
    plain = launch_mean.mean_launches(8, True, -100)
    bound, seen = plain.bound(), []
    assert type(bound.kernel) is cached.Bound
    storage, row = torch.zeros(16), torch.zeros(8, dtype=torch.int64)
    value, divisor = torch.zeros(()), torch.zeros(())

    def both(offset):
        for launches in (plain, bound):
            launches(8, storage[offset:][:8], row, value, divisor)
        assert no_device[-1] == no_device[-2]
        assert no_device[-1][2][:2] == [storage[offset:].data_ptr(), row.data_ptr()]

    for offset in (1, 0, 0, 1, 4, 0):
        both(offset)
    assert bound.kernel._fixed is not None
    monkeypatch.setattr(plain.kernel.kernel, "pre_run_hooks", [lambda *args, **options: seen.append(1)])
    both(0)
    assert len(seen) == 2


def test_a_kept_call_launches_what_a_first_one_does(no_device):
    """On a boundary and off it; all but what it allocates."""
    kernel, first = library.KERNELS["cuda"]["cross_entropy_backward_"], launch.cross_entropy_backward_
    storage, row, target = torch.zeros(3 * 512 + 4), torch.zeros(3), torch.zeros(3, dtype=torch.int64)
    for offset in (0, 0, 0, 1, 4, 0, 1):
        logits = storage[offset:][: 3 * 512].view(3, 512)
        for run in (kernel, first):
            run(row, None, logits, target, row, softcap=27.0)
        assert no_device[-1] == no_device[-2]
        assert no_device[-1][2][4] == logits.data_ptr()


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


def test_profilers_hear_of_launches(monkeypatch, no_device):
    """Triton's own launch hooks, which proton sets."""
    if not cached._HOOKS_ARE_CHAINS:
        pytest.skip("this triton hands every launch to its hooks")
    assert not cached._hooked()
    triton.knobs.runtime.launch_enter_hook.add(hook := (lambda metadata: None))
    try:
        assert cached._hooked()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
