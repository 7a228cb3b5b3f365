"""``python -m xent_ops doctor`` reports the kernels for each device, the reasons, and whether the results are right."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import collect_env

import xent_ops

from . import _compile_check, _doctor_npu, _environment, _extension, testing
from ._private import LEFT_OUT
from .head import products
from .kernels import cpu
from .kernels.devices import interpreter_is_set

DTYPES = (torch.float32, torch.bfloat16)


ABSENT = {"cuda": "no, this torch is built without", "rocm": "no, this torch is built without"}


@dataclass(frozen=True)
class Service:
    """The kernels for one kind of device, whether or not this machine has such a device."""

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
)


def devices() -> list[torch.device]:
    """Every device of this machine that can hold tensors and that an operator might support."""
    found = [torch.device("cpu")]
    found += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append(torch.device("mps"))
    found += [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
    if npu := getattr(torch, "npu", None):  # torch imports torch_npu by itself
        found += [torch.device("npu", index) for index in range(npu.device_count())]
    return found


def check(device: torch.device, dtype: torch.dtype) -> str | None:
    """A description of a wrong loss or gradient of a tiny case on this device, or None if both are right."""
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
    except Exception as error:  # any error of a broken driver or compiler is a result
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


def _npu_problem() -> str | None:
    """The error of torch_npu's import. torch's own import shows it first, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0."""
    if importlib.util.find_spec("torch_npu") is None or hasattr(torch, "npu"):
        return None
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        words = _compile_check.in_words(str(error)) or "it does not belong to this torch, or CANN is missing"
        return f"torch_npu is installed and cannot be imported: {words} ({type(error).__name__}: {error})"
    return None


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    return f"{device} {_environment.cpu_name()}" if device.type == "cpu" else str(device)


def _cpu_service() -> Service:
    reason = cpu.problem()
    if reason is None:
        return Service(
            "CPU", f"C++ (xent_ops._C, {cpu.instruction_set()} instructions)", "the extension is built and loads"
        )
    return Service("CPU", "plain torch (xent_ops.kernels.reference), the slower one", reason)


def _slow_cpu() -> str | None:
    """A message if CPU tensors use the slow path. It says how to change that."""
    if (reason := cpu.problem()) is None:
        return None
    return (
        f"Plain torch serves the CPU, more slowly than the C++ kernels: {reason}. This builds them in about a "
        f"minute, or says what they lack:\n    {_extension.build_command()}"
    )


def _library() -> tuple[str, str | None]:
    """The library for processes without Python, and its problem if there is one."""
    if not _extension.LIBRARY.exists():
        missing = f"there is no {_extension.LIBRARY}"
        return f"nothing: {missing}", missing if _extension.MODULE.exists() else None
    if _extension.sources_hash() not in (None, _extension.built_hash(_extension.LIBRARY)):
        stale = f"{_extension.LIBRARY} was built from other sources than those beside it"
        return stale, stale
    return str(_extension.LIBRARY), None


def _skipping(device: torch.device) -> str:
    """The effect of skip_ignored=True for bfloat16 on this device."""
    if device.type == "cpu":
        return "ignored rows are skipped"
    try:
        reason = products.why_not_counting(*torch.empty(2, 1, 16, dtype=torch.bfloat16, device=device))
    except Exception as error:  # no Triton or a broken driver, which the checks below report too
        return f"not known: {error}"
    return f"all rows are computed: {reason}" if reason else "ignored rows are skipped"


def _row_bits(device: torch.device) -> str:
    """Does a row have the same bits in every batch, with batch_invariant=True?"""
    hidden, classes, most = (2048, 50257, 2048) if device.type == "cuda" else (256, 5003, 512)
    found = []
    try:
        for dtype in DTYPES:
            head = (torch.randn(classes, hidden, device=device) / hidden**0.5).to(dtype)
            x, target = torch.randn(most + 1, hidden, device=device).to(dtype), torch.arange(most + 1, device=device)
            every = _numbers_of_rows(x, head, target)
            for number in (1, 100, most):
                which = torch.randperm(most + 1)[:number].to(device)
                if differing := int((_numbers_of_rows(x[which], head, target[which]) != every[which]).any(1).sum()):
                    found.append(f"{differing} of {number} rows in {str(dtype).removeprefix('torch.')}")
    except Exception as error:  # no Triton or a broken driver, which the checks below report too
        return f"not known: {error}"
    if not found:
        return "a row has the same bits in every batch"
    return f"NOT SO: {', '.join(found)} differ: the bits of its matrix multiplications depend on a row's place"


def _numbers_of_rows(x: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    stats = xent_ops.linear_token_log_probs(x, head, target, batch_invariant=True)
    (grad,) = torch.autograd.grad((stats.log_probs + stats.entropy).sum(), x)
    return torch.cat([torch.stack(stats, 1).detach(), grad], 1)


INTERPRETED = (
    "\n" + "!" * 100 + "\n!! WARNING: TRITON_INTERPRET is set. Every Triton kernel of a process that starts like "
    "this runs in an\n!! interpreter on the CPU: on a GPU machine A THOUSAND TIMES SLOWER, with no other sign of "
    "it. Unset it,\n!! unless you are debugging a kernel.\n" + "!" * 100
)


def _checks(found: list[torch.device], say: Callable[..., None]) -> list[dict[str, str | None]]:
    """Print the name of each check before it runs, because a compilation is slow."""
    done: list[dict[str, str | None]] = []
    for device in found:
        for dtype in (*DTYPES, None):
            way = f"eager, {str(dtype).removeprefix('torch.')}" if dtype else "torch.compile"
            say(f"  {_name(device)}, {way}: ", end="")
            problem = check(device, dtype) if dtype else _compile_check.check(device)
            say(problem or "ok")
            done.append({"device": _name(device), "way": way, "problem": problem})
    return done


def main(arguments: argparse.Namespace) -> int:
    """The exit status: 0, or 1 if there is a problem. All problems are repeated at the end."""

    def say(text: str, end: str = "\n") -> None:
        if not arguments.json:
            print(text, end=end, flush=True)

    found = devices()
    gpus = any(device.type == "cuda" for device in found)
    versions, interpreted, npu = _environment.versions(), interpreter_is_set(), _doctor_npu.parts()
    services = [_cpu_service(), *SERVICES]
    services.append(Service("NPU (Ascend)", "Triton (xent_ops.kernels.ascend)", _doctor_npu.why(npu)))
    library, library_problem = _library()

    say("Versions")
    for name, version in versions.items():
        say(f"  {name:10} {version or ABSENT.get(name, 'not found')}")
    if not gpus and (torch.version.cuda or torch.version.hip):
        say("  this torch is built for GPUs but sees none: no driver, or none is visible to this process")
    say("\nWhich kernels serve which device")
    for service in services:
        say(f"  {service.label:14} {service.library}: {service.why}")
    say(f"\nOperators for processes without Python\n  {library}")
    skipping = {_name(device): _skipping(device) for device in found}
    say("\nlinear_cross_entropy(..., skip_ignored=True)")
    for name, what in skipping.items():
        say(f"  {name}: {what}")
    row_bits = {_name(device): _row_bits(device) for device in found}
    say("\nbatch_invariant=True")
    for name, what in row_bits.items():
        say(f"  {name}: {what}")
    packages = _environment.package_problem()
    say(f"\nAOTInductor packages\n  {packages or 'this C++ compiler builds packages that this process can load'}")
    say(INTERPRETED if interpreted else "\nTRITON_INTERPRET is not set: Triton kernels are compiled.")
    say("\nA loss and its gradient on each device, against float64 (torch.compile takes 10 s to a minute)")
    checks = _checks(found, say)

    problems = [_triton_problem() if gpus else None, _npu_problem(), *_doctor_npu.problems(npu)]
    problems += [cpu.problem() if _extension.MODULE.exists() else None, library_problem]
    problems += ["TRITON_INTERPRET is set on a machine with a GPU"] if gpus and interpreted else []
    problems += [each["problem"] and f"{each['device']}, {each['way']}: {each['problem']}" for each in checks]
    wrong = [problem for problem in problems if problem]
    notes = [note] if (note := _slow_cpu()) else []
    if interpreted and not gpus:
        notes.append("TRITON_INTERPRET is set: a process with a GPU would run Triton kernels a thousand times slower")
    notes += [f"torch {torch.__version__} does not serve {what}: {cost}" for what, cost in LEFT_OUT.items()]
    notes += [f"batch_invariant=True, {name}: {what}" for name, what in row_bits.items() if what.startswith("NOT SO")]
    notes += [f"AOTInductor packages: {packages}"] if packages else []
    everything = "Nothing is wrong, but:" if notes else "Everything is right."
    say("\nSomething is wrong:" if wrong else f"\n{everything}")
    for each in wrong + notes:
        say(f"  {each}")
    if arguments.json:
        report = {
            "versions": versions,
            "kernels": [dataclasses.asdict(service) for service in services],
            "skip_ignored": skipping,
            "batch_invariant": row_bits,
            "library": library,
            "packages": packages,
            "triton_interpret": interpreted,
            "checks": checks,
            "problems": wrong,
            "notes": notes,
            "torch": collect_env.get_env_info()._asdict(),
        }
        json.dump(report, sys.stdout, indent=2)
        print()
    return int(bool(wrong))
