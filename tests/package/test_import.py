"""What `import xent_ops` needs and costs, each in a fresh process."""

import pytest
from helpers.processes import run_python

import xent_ops


def test_import_needs_torch_alone():
    """With triton blocked: import, eager and compiled on the CPU, tracing on meta; CUDA tensors would be told."""
    run_python(
        """
        import sys

        class Without:  # not an error for the name: torch, too, asks whether triton is there
            def __init__(self, finder):
                self.finder = finder

            def __getattr__(self, name):
                return getattr(self.finder, name)

            def find_spec(self, name, path=None, target=None):
                missing = name.split(".")[0] in ("triton", "torch_npu", "transformers")
                return None if missing else self.finder.find_spec(name, path, target)

        sys.meta_path[:] = map(Without, sys.meta_path)
        import torch
        import xent_ops
        assert "triton" not in sys.modules
        x, target = torch.randn(4, 9, requires_grad=True), torch.tensor([1, 2, 3, -100])
        xent_ops.cross_entropy(x, target).backward()
        torch.compile(xent_ops.cross_entropy, backend="aot_eager", fullgraph=True)(x, target).backward()
        try:
            torch.ops.xent.cross_entropy_forward.default.redispatch(
                torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), x, target
            )
        except ImportError as error:
            assert "install the triton that belongs" in str(error), error
        else:
            raise AssertionError("no ImportError")
    """,
        CUDA_VISIBLE_DEVICES="",
    )  # with a GPU, torch itself imports triton


def test_import_pays_for_nothing_else():
    """Inductor takes over a second, which a program that never compiles need not pay."""
    run_python("""
        import sys, torch
        before = set(sys.modules)
        import xent_ops
        xent_ops.inductor.last_report()
        new = set(sys.modules) - before
        others = ("torch._inductor", "torch._dynamo", "torch.distributed.tensor", "triton", "matplotlib")
        others += ("xent_ops.bench", "xent_ops._doctor", "xent_ops._environment")
        assert not [name for name in new if name.startswith(others)], new
        assert "torch._inductor" not in sys.modules and "triton" not in sys.modules
        assert set(xent_ops.__all__) <= set(dir(xent_ops))
        assert xent_ops.distributed.vocab_parallel_cross_entropy  # imported when asked for
    """)


def test_interpreter_mode_is_loud():
    """TRITON_INTERPRET left set costs a factor of a thousand: the first launch warns."""
    pytest.importorskip("triton", reason="triton is not installed")
    run_python(
        """
        import warnings, xent_ops
        from xent_ops.kernels import devices
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                devices.triton_launchers()  # what every launch asks for its kernels
        found = [w for w in caught if "TRITON_INTERPRET is set" in str(w.message)]
        assert len(found) == 1, caught
        """,
        TRITON_INTERPRET="1",
    )


def test_the_public_names():
    for name in xent_ops.__all__:
        assert getattr(xent_ops, name) is not None
        if name not in ("__version__", "Reduction"):  # a string, an alias
            assert getattr(xent_ops, name).__doc__
