"""Runs the kernels under NVIDIA's compute-sanitizer on a GPU: `make sanitize-gpu`, ARGS="initcheck" for one tool.

Each tool watches the samples of all operators in four dtypes, and rows of 1 to 262145 classes at odd strides. The names
of the kernels that it reports are printed with the number of reports. Its own output is in build/sanitize-TOOL.txt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build"
TOOLS = ("memcheck", "racecheck", "initcheck")
# "at 0x2d0 in kernel" or "at 0x2d0 in file.py:9:kernel" until CUDA 12.3, "at kernel+0x2d0 in file.py:9" after.
KERNEL = re.compile(
    r"^=+ .*\bat (?:0x[0-9a-f]+ in (?:\S+:\d+:)?(?P<old>.+?)(?: \[.*)?$|(?P<new>.+?)\+0x[0-9a-f]+)", re.M
)


def samples() -> int:
    """Call every operator on its samples. Returns the number of calls."""
    sys.path[:0] = map(str, (ROOT, ROOT / "tests"))
    from helpers.samples import calls

    done = 0
    for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.float64):
        for sample in calls("cuda", dtype, False):
            getattr(torch.ops.xent, sample.name)(*sample.args, **sample.options)
            done += 1
    return done


def wide_rows() -> int:
    """Call with three rows of each number of classes. Shifts and odd strides misalign the rows to 16 bytes."""
    ops, done, one = torch.ops.xent, 0, torch.ones((), device="cuda")
    for classes in (1, 2, 7, 31, 129, 1000, 4097, 32003, 50257, 128256, 151936, 262145):
        target, class_weight = torch.tensor([0, classes - 1, -100], device="cuda"), torch.rand(classes, device="cuda")
        for dtype in (torch.bfloat16, torch.float32):
            for shift in (0, 1, 3):
                logits = torch.randn(3, classes + shift, device="cuda").to(dtype)[:, shift:]
                for options in ({}, {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 1.5}):
                    for weight in (None, class_weight):
                        given = (logits, target, weight)
                        loss, lse, *_ = ops.cross_entropy_forward(*given, True, True, **options)
                        ops.cross_entropy_backward(loss, lse, logits, target, lse, weight, **options)
                        ops.cross_entropy_with_grad(logits, target, one, None, weight, True, True, **options)
                        ops.cross_entropy_with_grad_(logits.clone(), target, one, None, weight, **options)
                        done += 4
    return done


def reported(text: str) -> Counter[str]:
    """The number of reports for each kernel."""
    return Counter(match["old"] or match["new"] for match in KERNEL.finditer(text))


def check(tool: str, sanitizer: str) -> bool:
    """Print the tool's reports. True if it is clean, except for memory that other libraries' kernels read."""
    log = LOGS / f"sanitize-{tool}.txt"
    LOGS.mkdir(exist_ok=True)
    command = (sanitizer, "--tool", tool, "--show-backtrace", "no", "--print-limit", "100000", "--log-file", str(log))
    # In PyTorch's memory pool, a read past the end of a tensor would be a valid read of another tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run((*command, sys.executable, __file__, "--watched"), env=environment)
    text = log.read_text()
    kernels, number = reported(text), sum(map(int, re.findall(r"SUMMARY: (\d+)", text)))
    print(f"{tool}: {number} reports, in {log}", *(f"{n:8} in {name}" for name, n in kernels.most_common()), sep="\n")
    triton = "".join(file.read_text() for file in (ROOT / "xent_ops/kernels/triton").glob("*.py"))
    ours = set(kernels).intersection(re.findall(r"^def (\w+)\(", triton, re.M))
    # cuBLAS reads the uninitialised padding after the classes, and stores no result of it.
    expected = tool == "initcheck" and kernels and not ours
    return done.returncode == 0 and (number == 0 or bool(expected))


def main() -> None:
    if "--watched" in sys.argv:
        print(f"{samples()} calls of operators, {wide_rows()} with wide rows", flush=True)
        return torch.cuda.synchronize()
    if not torch.cuda.is_available():
        sys.exit("make sanitize-gpu needs an NVIDIA GPU, and torch finds none here.")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        sys.exit("make sanitize-gpu needs compute-sanitizer of the CUDA toolkit, on PATH or in /usr/local/cuda/bin.")
    tools = sys.argv[1:] or TOOLS
    if unknown := set(tools) - set(TOOLS):
        sys.exit(f"{', '.join(sorted(unknown))}: no tool of make sanitize-gpu; there are {', '.join(TOOLS)}.")
    sys.exit(not all([check(tool, sanitizer) for tool in tools]))


if __name__ == "__main__":
    main()
