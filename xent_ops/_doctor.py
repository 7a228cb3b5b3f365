"""``python -m xent_ops doctor``: which kernels serve which device here, why, and are they right?"""

from __future__ import annotations

import argparse
import importlib
import traceback
from dataclasses import dataclass
from typing import Any

import torch

import xent_ops

from . import _environment, _extension, testing
from .kernels import cpu
from .ops.devices import interpreter_is_set

HELP = "versions, which kernels serve which device and why, and a tiny loss on each device against float64"

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Service:
    """Who computes on one kind of device other than the CPU, whether or not this machine has it."""

    label: str
    library: str
    why: str


SERVICES = (
    Service(
        "CUDA / ROCm",
        "Triton (xent_ops.kernels.triton)",
        "torch calls both of them cuda; Triton is imported when the first tensor arrives",
    ),
    Service("MPS", "plain torch (xent_ops.kernels.reference)", "no kernels of its own"),
    Service("XPU", "plain torch (xent_ops.kernels.reference)", "no kernels of its own"),
    Service(
        "NPU (Ascend)",
        "Triton (xent_ops.kernels.ascend)",
        "needs torch_npu and triton-ascend; never run on a device so far (docs/npu.md)",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None so far; here for the dispatcher of commands."""


def devices() -> list[torch.device]:
    """Every device of this machine that tensors can be on and that an operator might serve."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    found += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    if npu := getattr(torch, "npu", None):  # torch_npu has been imported, as it is by itself with torch
        found += [torch.device("npu", index) for index in range(npu.device_count())]
    return found


def check(device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with a tiny loss and its gradient on this device; None where nothing is."""
    options: dict[str, Any] = {"ignore_index": 3, "label_smoothing": 0.1, "softcap": 20.0}
    logits = testing.realistic_logits(7, 1003, dtype=dtype)
    target = torch.arange(7) * 143
    target[2] = 3
    weight = torch.linspace(0.5, 1.5, 1003)
    expected = testing.oracle(logits, target, weight, **options)
    x = logits.to(device).requires_grad_()
    try:
        loss = xent_ops.cross_entropy(x, target.to(device), weight.to(device), reduction="none", **options)
        (grad,) = torch.autograd.grad(loss.sum(), x)
        testing.assert_loss(loss.cpu(), expected)
        testing.assert_grad(grad.cpu(), expected)
    except AssertionError as error:
        return f"WRONG: {error}"
    except Exception as error:  # whatever a broken driver or compiler raises is the finding
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"ERROR: {type(error).__name__}: {error} (at {frame.filename}:{frame.lineno})"
    return None


def _triton_problem() -> str | None:
    try:
        importlib.import_module("triton")
    except Exception as error:  # an installed Triton can fail in many ways
        problem = f"{type(error).__name__}: {error}"
        return f"Triton cannot be imported ({problem}); install the triton that belongs to this build of torch"
    return None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{device} {_environment.cpu_name()}" if device.type == "cpu" else str(device)


def _print_versions() -> None:
    absent = {"cuda": "no, this torch is built without", "rocm": "no, this torch is built without"}
    for name, version in _environment.versions().items():
        print(f"  {name:10} {version or absent.get(name, 'not found')}")


def _cpu_service() -> str:
    reason = cpu.problem()
    if reason is None:
        return f"C++ (xent_ops._C, {cpu.instruction_set()} instructions): the extension is built and loads"
    return f"plain torch (xent_ops.kernels.reference), the slower one: {reason}"


def _library() -> tuple[str, str | None]:
    """What there is for processes without Python, and what is wrong with it."""
    if not _extension.LIBRARY.exists():
        missing = f"there is no {_extension.LIBRARY}"
        return f"nothing: {missing}", missing if _extension.MODULE.exists() else None
    if _extension.sources_hash() not in (None, _extension.built_hash(_extension.LIBRARY)):
        stale = f"{_extension.LIBRARY} was built from other sources than those beside it"
        return stale, stale
    return str(_extension.LIBRARY), None


def _print_services() -> None:
    print("\nWhich kernels serve which device")
    print(f"  {'CPU':14} {_cpu_service()}")
    for service in SERVICES:
        print(f"  {service.label:14} {service.library}: {service.why}")


def _interpreter(gpus: bool) -> str | None:
    if not interpreter_is_set():
        print("\nTRITON_INTERPRET is not set: Triton kernels are compiled.")
        return None
    print(
        "\n" + "!" * 100 + "\n!! WARNING: TRITON_INTERPRET is set. Every Triton kernel of a process that starts like "
        "this runs in an\n!! interpreter on the CPU: on a GPU machine A THOUSAND TIMES SLOWER, with no other sign of "
        "it. Unset it,\n!! unless you are debugging a kernel.\n" + "!" * 100
    )
    return "TRITON_INTERPRET is set on a machine with a GPU" if gpus else None


def main(arguments: argparse.Namespace) -> int:
    """0, or 1 where something is wrong; what it is is repeated at the end."""
    found = devices()
    gpus = any(device.type == "cuda" for device in found)
    problems = []
    print("Versions")
    _print_versions()
    if gpus:
        problems.append(_triton_problem())
    elif torch.version.cuda or torch.version.hip:
        print("  this torch is built for GPUs but sees none: no driver, or none is visible to this process")
    _print_services()
    library, library_problem = _library()
    print(f"\nOperators for processes without Python\n  {library}")
    problems += [cpu.problem() if _extension.MODULE.exists() else None, library_problem]
    problems.append(_interpreter(gpus))
    print("\nA loss and its gradient on each device, against float64")
    for device in found:
        for dtype in DTYPES:
            problem = check(device, dtype)
            what = f"{_name(device)}, {str(dtype).removeprefix('torch.')}"
            print(f"  {what}: {problem or 'ok'}")
            problems.append(problem and f"{what}: {problem}")
    wrong = [problem for problem in problems if problem]
    print("\nEverything is right." if not wrong else "\nSomething is wrong:")
    for problem in wrong:
        print(f"  {problem}")
    return int(bool(wrong))
