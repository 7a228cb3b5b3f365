"""Launches through triton-ascend's own JITFunction, on a stub of its driver: what compiles when, and what it says."""

import collections
import functools
import shutil
import types

import pytest
import torch

try:
    from triton.backends import backends
except ImportError:
    backends = {}
if "ascend" not in backends:
    pytest.skip("needs triton-ascend, in an environment of its own: `make test-ascend`", allow_module_level=True)

import triton
from npu_cases import kernels
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from xent_ops.kernels import devices
from xent_ops.kernels.ascend.launch import LAUNCHERS
from xent_ops.kernels.options import RowOptions

launch = types.SimpleNamespace(**LAUNCHERS)


class _Driver:
    """What a launch asks of Triton's driver."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("npu", "Ascend910B3", 0)


def test_after_one_call_a_step_only_launches(monkeypatch):
    """What a capture asks for. Other values and targets compile nothing, nor does another number of rows."""
    compiled, launched = [], []

    def compile_(source, **options):
        compiled.append(source.fn.__name__)
        run = functools.partial(_ignore, launched.append, source.fn.__name__)
        return types.SimpleNamespace(
            launch_metadata=lambda *_: None, _init_handles=lambda: None, function=0, packed_metadata=(), run=run
        )

    def _ignore(record, name, *arguments):
        record(name)

    monkeypatch.setattr(triton.compiler, "compile", compile_)
    monkeypatch.setattr(driver, "active", _Driver())
    for module, name in kernels():
        kernel = getattr(module, name)
        monkeypatch.setattr(kernel, "binder", None)
        monkeypatch.setattr(kernel, "cache", collections.defaultdict(dict))

    def step(rows, seed, options):
        launched.clear()
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(rows, 1000, generator=generator)
        target = torch.randint(1000, (rows,), generator=generator)
        value, divisor, lse, _ = launch.cross_entropy_reduced(logits, target, options=options)
        launch.cross_entropy_backward_(value, None, logits, target, lse, None, divisor, options=options)
        launch.cross_entropy_with_grad(logits, target, lse, options=options)
        gathered = launch.cross_entropy_shard(logits, target, 1000 * seed, 9000, options=options)
        launch.cross_entropy_shard_reduced(logits, target, gathered, 1000 * seed, 9000, options=options)
        of_slice = {"class_start": 1000 * seed, "num_classes": 9000}
        launch.cross_entropy_backward(lse, None, logits, target, lse, **of_slice, options=options)
        made = launch.soft_cross_entropy_forward(logits, logits, options=options)
        launch.soft_cross_entropy_backward(*made, logits, logits, lse, options=options)
        return list(launched)

    first = step(64, 1, RowOptions(label_smoothing=0.1))
    number = len(compiled)
    assert set(compiled) == set(first) == {name for _, name in kernels()}
    for rows, seed, smoothing in ((64, 2, 0.1), (64, 3, 0.2), (63, 4, 0.1), (1, 5, 0.1)):
        assert step(rows, seed, RowOptions(ignore_index=seed, label_smoothing=smoothing)) == first
        assert len(compiled) == number, compiled[number:]


@pytest.mark.skipif(shutil.which("bisheng") is not None, reason="CANN is there")
def test_without_cann_the_error_names_its_script():
    devices.ascend_launchers.cache_clear()
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match=r"set_env\.sh.*0 active drivers"):
        devices.ascend_launchers()
