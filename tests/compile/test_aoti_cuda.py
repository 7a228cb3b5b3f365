"""AOTInductor packages for CUDA: every operator's kernels are in them, and give the operators' numbers."""

import re
import zipfile

import packed
import pytest
import torch
from torch.export import Dim

pytest.importorskip("triton", reason="triton is not installed")

from xent_ops.kernels.triton import cached

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("aoti_packages")]

CASES = {
    # rows that were traced, rows that are run, classes, dtype, with every option
    "tile": (300, (300, 2, 5000), 1000, torch.bfloat16, False),
    "edges": (64, (64, 3, 700), 50257, torch.bfloat16, True),
    "rows": (3000, (3000, 70, 9000), 4096, torch.float32, True),
}


def pack(module, given, path, dynamic):
    shapes = tuple({0: Dim.DYNAMIC} if rows else None for rows in dynamic)
    write(torch.export.export(module, given, dynamic_shapes=shapes), path)
    return torch._inductor.aoti_load_package(str(path))


def write(program, path):
    """Once more, if torch 2.11 has used the name of an array that its C++ code does not declare.

    It looks a name up by the id of an object that is gone, which by chance is that of another one.
    """
    for again in (True, False):
        try:
            return torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        except torch._inductor.exc.InductorError as error:
            by_chance = torch.__version__ < "2.13" and re.search("int_array_.* was not declared", str(error))
            if not (again and by_chance):
                raise


def source(path):
    """The C++ code that runs a package; nothing in it goes through the dispatcher."""
    with zipfile.ZipFile(path) as files:
        (name,) = [name for name in files.namelist() if name.endswith(".wrapper.cpp")]
        code = files.read(name).decode()
    code = code[code.index("AOTInductorModel::run_impl(") :]
    assert "call_function" not in code and "call_dispatcher" not in code
    return code


def launches(code):
    """The names of our kernels that it launches."""
    return [name for name in re.findall(r"\bcall_(\w+?)_\d+\(", code) if not name.startswith("triton_")]


def launches_of(monkeypatch, module, given):
    """The same, of a call in eager."""
    found, launch = [], cached.Launch.__call__

    def noted(self, *tensors):
        # Gluon's kernel cannot be packed.
        found.append(self.kernel.__name__.replace("with_grad_shared", "with_grad"))
        return launch(self, *tensors)

    with monkeypatch.context() as patch:
        patch.setattr(cached.Launch, "__call__", noted)
        module(*given)
    return found


def assert_near(found, expected, dtype):
    assert len(found) == len(expected)
    units = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 2e-5}
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not other.is_floating_point():
            assert torch.equal(one, other), f"output {place}"
            continue
        unit = 2e-7 if other.dtype == torch.float64 else units[dtype]  # float64: lse + lse_low
        scale = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 1.0
        torch.testing.assert_close(
            one, other, rtol=unit, atol=unit * scale, equal_nan=True, msg=lambda m, place=place: f"output {place}: {m}"
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES)
def test_every_operator(monkeypatch, tmp_path, case):
    """Its launches are those of eager, and give eager's numbers."""
    traced, others, classes, dtype, full = CASES[case]
    module, path = packed.Operators(full), tmp_path / "operators.pt2"
    given = packed.inputs(traced, classes, dtype, "cuda")
    package = pack(module, given, path, (True, True, False, True, True, False))
    assert sorted(launches(source(path))) == sorted(launches_of(monkeypatch, module, given))
    for rows in others:
        given = packed.inputs(rows, classes, dtype, "cuda")
        assert_near(package(*given), module(*given), dtype)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype, chunk_rows", [(torch.bfloat16, None), (torch.float16, 500)], ids=["one", "four"])
def test_linear(monkeypatch, tmp_path, dtype, chunk_rows):
    """As many chunks for every number of rows. With float16 they are added up in float32."""
    module, path = packed.Linear(chunk_rows), tmp_path / "linear.pt2"
    given = packed.linear_inputs(2000, 4099, 128, dtype, "cuda")
    package = pack(module, given, path, (True, False, True, False))
    assert sorted(launches(source(path))) == sorted(launches_of(monkeypatch, module, given))
    for rows in (2000, 3, 4097):
        given = packed.linear_inputs(rows, 4099, 128, dtype, "cuda")
        assert_near(package(*given), module(*given), dtype)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("chunk_rows", [None, 500], ids=["one", "four"])
def test_distillation(monkeypatch, tmp_path, chunk_rows):
    """Losses of rows and gradients, of given logits and of heads, as many chunks for every number of rows."""
    module, path = packed.Distillation(chunk_rows), tmp_path / "distillation.pt2"
    given = packed.distillation_inputs(2000, 4099, 128, torch.bfloat16, "cuda")
    package = pack(module, given, path, (True, False, True, False, True))
    assert sorted(launches(source(path))) == sorted(launches_of(monkeypatch, module, given))
    for rows in (2000, 3, 4097):
        given = packed.distillation_inputs(rows, 4099, 128, torch.bfloat16, "cuda")
        assert_near(package(*given), module(*given), torch.bfloat16)


@pytest.mark.timeout(300)
def test_shards_and_class_probabilities(monkeypatch, tmp_path):
    module, path = packed.Shard(), tmp_path / "shard.pt2"
    given = packed.shard_inputs(300, torch.bfloat16, "cuda")
    shapes = {0: Dim.DYNAMIC}
    program = torch.export.export(module, given, dynamic_shapes=(shapes, shapes, {1: Dim.DYNAMIC}, shapes))
    write(program, path)
    assert sorted(launches(source(path))) == sorted(launches_of(monkeypatch, module, given))
    package = torch._inductor.aoti_load_package(str(path))
    for rows in (300, 2, 2000):
        given = packed.shard_inputs(rows, torch.bfloat16, "cuda")
        assert_near(package(*given), module(*given), torch.bfloat16)


def test_training_step(tmp_path):
    """The gradient is written over the logits, of which there is one buffer."""
    hidden = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    head = torch.randn(32000, 256, device="cuda", dtype=torch.bfloat16) / 16
    target = torch.randint(32000, (512,), device="cuda")
    step = packed.traced_step(hidden, head, target)
    path = tmp_path / "step.pt2"
    package = pack(step, (hidden, head, target), path, (False, False, False))
    code = source(path)
    assert launches(code) == ["forward_kernel", "reduce_kernel", "backward_kernel"]
    expected = step(hidden, head, target)
    assert_near(package(hidden, head, target), expected, torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    package(hidden, head, target)
    logits, gradients = 512 * 32000 * 2, 2 * (hidden.numel() + head.numel())
    assert torch.cuda.max_memory_allocated() - before < 1.1 * (logits + gradients)


def test_a_dynamic_number_of_classes_is_refused(tmp_path):
    class Loss(torch.nn.Module):
        def forward(self, logits, target):
            return packed.ops.cross_entropy_forward(logits, target)

    logits, target = torch.randn(8, 100, device="cuda"), torch.zeros(8, dtype=torch.int64, device="cuda")
    program = torch.export.export(Loss(), (logits, target), dynamic_shapes=({1: Dim.DYNAMIC}, None))
    with pytest.raises(Exception, match="dynamic number of classes"):
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
