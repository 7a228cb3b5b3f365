"""The contestants for the head and the loss as one: a loss here is a function of (hidden, matrix, target)."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

import xent_ops

from .cases import Loss, Peer, Variant, imported, of_peers, products
from .outputs import Outputs

UNIT = "three products"
FORWARD_UNIT = "one product"
TEACHER_UNIT = "four products"  # three of the student, one of the teacher
AUTO_CHUNKER: dict[str, Any] = {
    "auto_chunker.enable": True,
    # Above these thresholds alone it chunks. They ask for logits 8 times as large as the inputs of their product, which
    # those of 16384 rows of Llama 3.2 1B are not.
    "auto_chunker.output_size_threshold": 0,
    "auto_chunker.amplify_ratio_threshold": 0,
    # A step from a cache on disk does not tell whether it was chunked.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
}
AUTO_CHUNKS = (4, 8)  # 8 is what auto_chunker takes by itself; fewer are faster and need more memory

# Relative errors of gradients, in the 2-norm, and of the loss beside those of its dtype. docs/precision.md has those of
# large heads; fewer features and classes make them larger.
IN_8_BITS = {"fp8": (5e-2, 3e-3), "fp8_gradients": (4e-2, 0.0)}
Products = Callable[..., Outputs]  # of hidden states, matrix and what else a problem's losses take


@dataclass(frozen=True)
class LinearVariant(Variant):
    """``load`` returns a function of (hidden, matrix, target)."""

    against: str = UNIT
    products: Products | None = None  # a unit: these, and no loss
    forward_alone: bool = False  # below no_grad
    inductor: dict[str, Any] = field(default_factory=dict)  # options of torch.compile
    auto_chunked: bool = False  # Inductor has to chunk it, or it is another contestant
    chunked: str = ""  # ours with a chunk size of its own: the name without the number
    in_8_bits: tuple[float, float] | None = None  # tolerances of gradients and loss where products have 8-bit numbers

    def build(self) -> Loss:
        if not self.compiled:
            return self.load()
        return torch.compile(self.load(), fullgraph=True, options=self.inductor or None)


L = TypeVar("L", bound=LinearVariant)


def _three_products(hidden: Tensor, matrix: Tensor, *_: Tensor) -> Outputs:
    return Outputs(hidden.new_zeros(()), products(hidden, matrix))


def _four_products(hidden: Tensor, matrix: Tensor, teacher: Tensor, teacher_matrix: Tensor) -> Outputs:
    torch.mm(teacher, teacher_matrix.t())
    return _three_products(hidden, matrix)


def _one_product(hidden: Tensor, matrix: Tensor, *_: Tensor) -> Outputs:
    torch.mm(hidden, matrix.t())
    return Outputs(hidden.new_zeros(()), ())


def _no_loss() -> Loss:
    raise NotImplementedError("the products have no loss")


def unit(of: str, name: str | None = None, against: str = "") -> LinearVariant:
    units: dict[str, Products] = {UNIT: _three_products, TEACHER_UNIT: _four_products, FORWARD_UNIT: _one_product}
    products = units[of]
    return LinearVariant(name or of, "torch", _no_loss, against=against, products=products)


def by_chunks(name: str, rows: int | None) -> str:
    return name if rows is None else f"{name} {rows}"


def ours(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    return xent_ops.linear_cross_entropy(hidden, matrix, target, **options)


def _outputs(hidden: Tensor, matrix: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Everything that one logs is computed, and the loss alone differentiated."""
    return xent_ops.linear_cross_entropy_outputs(hidden, matrix, target, **options).loss


def unfused_ours(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return xent_ops.cross_entropy(F.linear(hidden, matrix), target)


def unfused_torch(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, matrix).float(), target)


def _torch_chunked() -> Loss:
    options = torch.nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined, unused-ignore]
    return lambda hidden, matrix, target: F.linear_cross_entropy(  # type: ignore[attr-defined, unused-ignore]
        hidden, matrix, target, options=options
    )


def _liger_cute() -> Loss:
    """Of the architecture. LIGER_KERNEL_IMPL=cutedsl leads to the one of 10.0 alone, which raises on 9.0 (0.8.5)."""
    folder = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy"
    if torch.cuda.get_device_capability()[0] == 9:
        return imported(f"{folder}_sm90", "liger_fused_linear_cross_entropy_sm90")
    function = importlib.import_module(folder).LigerFusedLinearCrossEntropyFunction
    return lambda *given: function.apply(*given)[0]


def _quack_all_logits() -> Loss:
    """One chunk of all rows, and the pipeline without exponentials in its products."""
    loss = _load_quack(use_scaled_exp=False)
    return lambda hidden, matrix, target: loss(hidden, matrix, target, chunk_size=len(hidden))


_CUTLASS = ("nvidia-cutlass-dsl", "cutlass")
_load_quack = functools.partial(imported, "quack.linear_cross_entropy", "chunked_linear_cross_entropy")
PEERS = (
    Peer(
        ("liger-kernel", "liger-kernel-nightly"),
        "liger_kernel",
        lambda: imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    ),
    Peer(
        ("liger-kernel", "liger-kernel-nightly"),
        "liger_kernel",
        _liger_cute,
        label="liger-kernel CuTe all logits",
        also=(_CUTLASS,),
    ),
    Peer(("cut-cross-entropy",), "cut_cross_entropy", lambda: imported("cut_cross_entropy", "linear_cross_entropy")),
    # It tunes its products in the first call, for minutes.
    Peer(("quack-kernels",), "quack", _load_quack, also=(_CUTLASS, ("apache-tvm-ffi", "tvm_ffi"))),
)


def _own(dtype: torch.dtype, chunk_rows: Sequence[int | None]) -> list[LinearVariant]:
    ways: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("xent eager", {}, {}),
        ("xent compiled", {}, {"compiled": True}),
        ("xent outputs", {}, {}),
    ]
    if dtype == torch.bfloat16:  # the others add up in float32 or wider by themselves
        ways.append(("xent float32 dW", {"accumulate_dtype": torch.float32}, {}))
    if dtype in (torch.bfloat16, torch.float16):
        ways.append(("xent float32 logits", {"logits_dtype": torch.float32}, {}))
        ways += [(f"xent {products}", {"products": products}, {"in_8_bits": of}) for products, of in IN_8_BITS.items()]
    ways += [
        ("xent skipping", {"skip_ignored": True}, {}),
        ("xent forward", {}, {"forward_alone": True, "against": FORWARD_UNIT}),
    ]
    found = []
    for name, keywords, how in ways:
        for rows in chunk_rows:
            loss = _outputs if name == "xent outputs" else ours
            load = functools.partial(functools.partial, loss, chunk_rows=rows, **keywords)
            chunked = "" if rows is None else name
            found.append(LinearVariant(by_chunks(name, rows), "ours", load, chunked=chunked, **how))
    return found


def auto_chunked(kind: type[L], options: dict[str, dict[str, Any]]) -> tuple[list[L], list[str]]:
    """(Inductor's own chunks, by name, with these options; why there are none)."""
    import torch._inductor.config as inductor

    if not hasattr(inductor, "auto_chunker"):
        return [], [f"auto_chunker: not in the Inductor of torch {torch.__version__}"]
    how: dict[str, Any] = {"compiled": True, "auto_chunked": True}
    load = lambda: unfused_torch  # noqa: E731
    return [kind(name, "torch", load, inductor=AUTO_CHUNKER | more, **how) for name, more in options.items()], []


def _from_torch() -> tuple[list[LinearVariant], list[str]]:
    """(what this torch has, a line for each that it has not)."""
    chunks = {f"auto_chunker {number}": {"auto_chunker.num_chunk": number} for number in AUTO_CHUNKS}
    found, missing = auto_chunked(LinearVariant, chunks)
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        return [LinearVariant("F.linear_cross_entropy", "torch", _torch_chunked), *found], missing
    return found, [f"F.linear_cross_entropy: torch has it from 2.13 on, this is {torch.__version__}", *missing]


def variants(dtype: torch.dtype, chunk_rows: Sequence[int | None]) -> tuple[list[LinearVariant], list[str]]:
    """(the contestants without the units, what is left out and why)."""
    unfused = LinearVariant("unfused xent compiled", "ours", lambda: unfused_ours, compiled=True)
    of_torch, missing = _from_torch()
    peers, absent = of_peers(LinearVariant, PEERS)
    of_quack = [
        replace(peer, name=f"{peer.name} {how}", load=load)
        for peer in peers
        if peer.load is _load_quack
        for how, load in (
            ("untuned", functools.partial(_load_quack, tuned=False)),
            ("all logits", _quack_all_logits),
        )
    ]
    return [
        *_own(dtype, chunk_rows),
        unfused,
        replace(unfused, name="unfused F compiled", kind="torch", load=lambda: unfused_torch),
        *of_torch,
        *peers,
        *of_quack,
    ], [*missing, *absent]
