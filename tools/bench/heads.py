"""All forms of head and loss as one operator, with other chunk sizes, other packages, and an AOTInductor package."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops
from xent_ops import _environment
from xent_ops.bench import check, contestants
from xent_ops.bench.contestants import (
    THREE_MATMULS,
    Contestant,
    Function,
    Load,
    Outputs,
    compiled,
    imported,
    linear,
    partial,
    products,
    unfused_torch,
    unit,
)
from xent_ops.bench.problems import Head, Setting
from xent_ops.bench.run import Table, tables_of

ONE_MATMUL = "one matmul"
UNITS = [
    unit(THREE_MATMULS, lambda: products),
    unit(ONE_MATMUL, lambda: lambda hidden, matrix, *_: hidden @ matrix.T),
]
# Tolerance of relative errors: of gradients in the 2-norm, and of the loss. Heads with few features and classes have
# larger errors than the large heads in docs/precision.md.
IN_8_BITS = {"fp8": (5e-2, 3e-3), "fp8_gradients": (4e-2, 0.0)}
AUTO_CHUNKS = (4, 8)  # auto_chunker's default is 8; fewer chunks are faster and need more memory
AUTO_CHUNKER: dict[str, Any] = {
    "auto_chunker.enable": True,
    # It chunks only above these thresholds. The defaults need logits 8 times as large as the inputs of their product.
    # The logits of 16384 rows of Llama 3.2 1B are smaller than that.
    "auto_chunker.output_size_threshold": 0,
    "auto_chunker.amplify_ratio_threshold": 0,
    # A step from a cache on disk does not report whether it was chunked.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}


def forward(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Outputs:
    with torch.no_grad():
        return Outputs(linear(hidden, matrix, target, **options), ())


def outputs(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Computes all outputs for logging, and differentiates only the loss."""
    return xent_ops.linear_cross_entropy_outputs(hidden, matrix, target, **options).loss


def log_probs(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    stats = xent_ops.linear_token_log_probs(hidden, matrix, target, **options)
    return -stats.log_probs.sum() / (target != check.IGNORE_INDEX).sum()


def unfused_ours(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return xent_ops.cross_entropy(F.linear(hidden, matrix), target)


def ours(dtype: torch.dtype, rows: int | None) -> list[Contestant]:
    """Our contestants with chunks of ``rows`` rows."""
    head, end = functools.partial(partial, linear, chunk_rows=rows), "" if rows is None else f" {rows}"
    ways = {"eager": head(), "compiled": compiled(head()), "skipping": head(skip_ignored=True)}
    ways["outputs"] = partial(outputs, chunk_rows=rows)
    if dtype == torch.bfloat16:  # other dtypes always add up in float32 or wider
        ways["float32 dW"] = head(accumulate_dtype=torch.float32)
    if dtype in (torch.bfloat16, torch.float16):
        ways["float32 logits"] = head(logits_dtype=torch.float32)
        ways |= {name: head(products=name) for name in IN_8_BITS}
    found = [
        Contestant(f"xent {name}{end}", "ours", load, in_8_bits=IN_8_BITS.get(name, (0.0, 0.0)))
        for name, load in ways.items()
    ]
    return [*found, Contestant(f"xent forward{end}", "ours", partial(forward, chunk_rows=rows), against=ONE_MATMUL)]


def invariant(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    """The cost of batch_invariant with few rows and with many."""
    known = [*UNITS]
    for name, function, against in (
        ("xent", linear, THREE_MATMULS),
        ("xent log-probs", log_probs, THREE_MATMULS),
        ("xent forward", forward, ONE_MATMUL),
    ):
        known.append(Contestant(name, "ours", partial(function), against=against))
        one_shape = partial(function, batch_invariant=True)
        known.append(Contestant(f"{name} batch_invariant", "ours", one_shape, against=against))
    return tables_of(Head, arguments.shapes, arguments.hidden, known, setting)


def was_chunked() -> str:
    """Raise if Inductor did not chunk the graph, because that would be another contestant."""
    from torch._inductor import metrics

    if metrics.num_auto_chunking == 0:
        raise RuntimeError("Inductor's auto_chunker left the graph as it is")
    metrics.num_auto_chunking = 0
    return ""


def has_auto_chunker() -> bool:
    import torch._inductor.config as inductor

    if not hasattr(inductor, "auto_chunker"):
        print(f"left out: auto_chunker, not in the Inductor of torch {torch.__version__}", file=sys.stderr)
    return hasattr(inductor, "auto_chunker")


def liger_cute() -> Function:
    """This architecture's function. LIGER_KERNEL_IMPL=cutedsl always selects that of 10.0; it fails on 9.0 (0.8.5)."""
    folder = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy"
    if torch.cuda.get_device_capability()[0] == 9:
        return imported(f"{folder}_sm90", "liger_fused_linear_cross_entropy_sm90")()
    function = importlib.import_module(folder).LigerFusedLinearCrossEntropyFunction
    return lambda *tensors: function.apply(*tensors)[0]


def quack_all_rows() -> Function:
    """One chunk with all rows, and the pipeline without exponentials in its products."""
    loss = imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy", use_scaled_exp=False)()
    return lambda *tensors: loss(*tensors, chunk_size=len(tensors[0]))


def peers() -> list[Contestant]:
    untuned = imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy", tuned=False)
    found = [one for one in contestants.heads() if one.kind == "peer"]
    quack = next(one.needs for one in found if one.name == "quack-kernels")
    return [
        *found,
        Contestant("liger-kernel CuTe all logits", "peer", liger_cute, ("liger_kernel", "cutlass")),
        Contestant("quack-kernels untuned", "peer", untuned, quack),
        Contestant("quack-kernels all logits", "peer", quack_all_rows, quack),
    ]


def heads(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    known = UNITS + [one for one in contestants.heads() if one.kind == "torch"]
    for rows in arguments.chunk_rows or [None]:
        known += ours(setting.dtype, rows)
    known.append(Contestant("unfused xent compiled", "ours", compiled(lambda: unfused_ours)))
    for chunks in AUTO_CHUNKS if has_auto_chunker() else ():
        load = compiled(lambda: unfused_torch, options=AUTO_CHUNKER | {"auto_chunker.num_chunk": chunks})
        known.append(Contestant(f"auto_chunker {chunks}", "torch", load, confirm=was_chunked))
    return tables_of(Head, arguments.shapes, arguments.hidden, known + peers(), setting)


def package(loss: Function) -> Function:
    """Loss and gradients, exported and compiled ahead of time."""
    loaded: list[Any] = []

    def step(hidden: Tensor, matrix: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        hidden, matrix = hidden.detach().requires_grad_(), matrix.detach().requires_grad_()
        value = loss(hidden, matrix, target)
        return value.detach(), *torch.autograd.grad(value, (hidden, matrix))

    def call(*tensors: Tensor) -> Outputs:
        inputs = tuple(tensor.detach() for tensor in tensors)
        if not loaded:
            if problem := _environment.package_problem():
                raise RuntimeError(problem)
            program = torch.export.export(make_fx(step)(*inputs), inputs)
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "step.pt2")
                torch._inductor.aoti_compile_and_package(program, package_path=path)
                # By default a call asks whether the one before has ended, which a capture forbids.
                loaded.append(torch._inductor.aoti_load_package(path, run_single_threaded=True))
        value, *grads = loaded[0](*inputs)
        return Outputs(value, tuple(grads))

    return call


def packages(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    known = UNITS[:1]
    for name, loss in (("all logits", unfused_ours), ("linear", linear)):
        ways: dict[str, Load] = {
            "eager": partial(loss),
            "compiled": compiled(partial(loss)),
            "package": functools.partial(package, loss),
        }
        known += [Contestant(f"{name} {way}", "ours", load) for way, load in ways.items()]
    return tables_of(Head, arguments.shapes, arguments.hidden, known, setting)
