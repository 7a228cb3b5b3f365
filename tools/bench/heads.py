"""All forms of head and loss as one operator, with other chunk sizes, other packages, and an AOTInductor package."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops
from xent_ops.bench import check
from xent_ops.bench.contestants import (
    CUTLASS,
    LIGER,
    LINEAR_PEERS,
    THREE_MATMULS,
    Contestant,
    Function,
    Outputs,
    Peer,
    compiled,
    imported,
    installed,
    linear,
    products,
    unfused_torch,
)
from xent_ops.bench.contestants import heads as common
from xent_ops.bench.run import Setting, Table, head_tables

ONE_MATMUL = "one matmul"
# Limits of relative errors: of gradients in the 2-norm, and of the loss in addition to the limit of its dtype. Heads
# with few features and classes have larger errors than the large heads in docs/precision.md.
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


def one_product(hidden: Tensor, matrix: Tensor, target: Tensor) -> Outputs:
    torch.mm(hidden.detach(), matrix.detach().t())
    return Outputs(hidden.new_zeros(()), ())


def forward(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Outputs:
    with torch.no_grad():
        return Outputs(linear(hidden, matrix, target, **options), ())


def outputs(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Computes all outputs for logging, and differentiates only the loss."""
    return xent_ops.linear_cross_entropy_outputs(hidden, matrix, target, **options).loss


def unfused_ours(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return xent_ops.cross_entropy(F.linear(hidden, matrix), target)


def ours(dtype: torch.dtype, rows: int | None) -> list[Contestant]:
    """Our contestants with chunks of ``rows`` rows."""
    ways: list[tuple[str, Any, dict[str, Any]]] = [
        ("xent eager", linear, {}),
        ("xent outputs", outputs, {}),
        ("xent skipping", linear, {"skip_ignored": True}),
    ]
    if dtype == torch.bfloat16:  # other dtypes always add up in float32 or wider
        ways.append(("xent float32 dW", linear, {"accumulate_dtype": torch.float32}))
    if dtype in (torch.bfloat16, torch.float16):
        ways.append(("xent float32 logits", linear, {"logits_dtype": torch.float32}))
        ways += [(f"xent {products}", linear, {"products": products}) for products in IN_8_BITS]
    end = "" if rows is None else f" {rows}"

    def load(function: Any, options: dict[str, Any]) -> Callable[[], Function]:
        return functools.partial(functools.partial, function, chunk_rows=rows, **options)

    return [
        *(
            Contestant(
                f"{name}{end}",
                "ours",
                load(function, how),
                THREE_MATMULS,
                in_8_bits=IN_8_BITS.get(how.get("products", "")),
            )
            for name, function, how in ways
        ),
        Contestant(f"xent compiled{end}", "ours", compiled(load(linear, {})), THREE_MATMULS),
        Contestant(f"xent forward{end}", "ours", load(forward, {}), ONE_MATMUL),
    ]


def of_log_probs(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    log_probs = xent_ops.linear_token_log_probs(hidden, matrix, target, **options).log_probs
    return -log_probs.sum() / (target != check.IGNORE_INDEX).sum()


def invariant(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    """The cost of batch_invariant with few rows and with many."""
    ways: list[tuple[str, Any, str]] = [
        ("xent", linear, THREE_MATMULS),
        ("xent log-probs", of_log_probs, THREE_MATMULS),
        ("xent forward", forward, ONE_MATMUL),
    ]
    found = [
        Contestant(THREE_MATMULS, "torch", lambda: products, unit=THREE_MATMULS),
        Contestant(ONE_MATMUL, "torch", lambda: one_product, unit=ONE_MATMUL),
    ]
    for name, function, unit in ways:
        found.append(Contestant(name, "ours", functools.partial(functools.partial, function), unit))
        one_shape = functools.partial(functools.partial, function, batch_invariant=True)
        found.append(Contestant(f"{name} batch_invariant", "ours", one_shape, unit))
    return head_tables(arguments.shapes, arguments.hidden, found, setting), ()


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
        return imported(f"{folder}_sm90", "liger_fused_linear_cross_entropy_sm90")
    function = importlib.import_module(folder).LigerFusedLinearCrossEntropyFunction
    return lambda *tensors: function.apply(*tensors)[0]


def quack(all_rows: bool, **options: Any) -> Function:
    loss = imported("quack.linear_cross_entropy", "chunked_linear_cross_entropy", **options)
    return lambda *tensors: loss(*tensors, chunk_size=len(tensors[0])) if all_rows else loss(*tensors)


CUTE = Peer(*LIGER, liger_cute, label="liger-kernel CuTe all logits", also=(CUTLASS,))
QUACK = next(peer for peer in LINEAR_PEERS if "quack-kernels" in peer.distributions)
PEERS = (
    *LINEAR_PEERS,
    CUTE,
    replace(QUACK, label="quack-kernels untuned", load=functools.partial(quack, False, tuned=False)),
    # One chunk with all rows, and the pipeline without exponentials in its products.
    replace(QUACK, label="quack-kernels all logits", load=functools.partial(quack, True, use_scaled_exp=False)),
)


def heads(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    found = [line for line in common() if line.kind == "torch"]
    found.append(Contestant(ONE_MATMUL, "torch", lambda: one_product, unit=ONE_MATMUL))
    for rows in arguments.chunk_rows or [None]:
        found += ours(setting.dtype, rows)
    found.append(Contestant("unfused xent compiled", "ours", compiled(lambda: unfused_ours), THREE_MATMULS))
    for chunks in AUTO_CHUNKS if has_auto_chunker() else ():
        load = compiled(lambda: unfused_torch, options=AUTO_CHUNKER | {"auto_chunker.num_chunk": chunks})
        found.append(Contestant(f"auto_chunker {chunks}", "torch", load, THREE_MATMULS, confirm=was_chunked))
    found += installed(PEERS, THREE_MATMULS)
    return head_tables(arguments.shapes, arguments.hidden, found, setting), PEERS


def package(step: Function) -> Function:
    """Loss and gradients, exported and compiled ahead of time."""
    loaded: list[Any] = []

    def call(*tensors: Tensor) -> Outputs:
        inputs = tuple(tensor.detach() for tensor in tensors)
        if not loaded:
            program = torch.export.export(make_fx(step)(*inputs), inputs)
            with tempfile.TemporaryDirectory() as folder:
                path = str(Path(folder) / "step.pt2")
                torch._inductor.aoti_compile_and_package(program, package_path=path)
                loaded.append(torch._inductor.aoti_load_package(path))
        loss, *grads = loaded[0](*inputs)
        return Outputs(loss, tuple(grads))

    return call


def packages(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    def with_gradients(loss: Function) -> Function:
        def step(hidden: Tensor, head: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            hidden, head = hidden.detach().requires_grad_(), head.detach().requires_grad_()
            value = loss(hidden, head, target)
            return value.detach(), *torch.autograd.grad(value, (hidden, head))

        return step

    def lines(name: str, loss: Function) -> list[Contestant]:
        load: Callable[[], Function] = lambda: loss  # noqa: E731
        return [
            Contestant(f"{name} eager", "ours", load, THREE_MATMULS),
            Contestant(f"{name} compiled", "ours", compiled(load), THREE_MATMULS),
            Contestant(f"{name} package", "ours", lambda: package(with_gradients(loss)), THREE_MATMULS),
        ]

    units = [line for line in common() if line.unit]
    known = [*units, *lines("all logits", unfused_ours), *lines("linear", linear)]
    return head_tables(arguments.shapes, arguments.hidden, known, setting), ()
