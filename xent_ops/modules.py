"""``nn.Module`` faces of the functions."""

from __future__ import annotations

from torch import Tensor, nn

from . import functional
from .ops import arguments


class CrossEntropyLoss(nn.Module):
    """``xent_ops.cross_entropy`` as a module; the state_dict is that of ``nn.CrossEntropyLoss`` (``weight``, if given).

    Arguments, shapes, dtypes, formula and errors: see ``xent_ops.cross_entropy``.
    """

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        lse_square_scale: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        dim: int = 1,
        inplace_backward: bool = False,
        grad_in_forward: bool = False,
    ) -> None:
        super().__init__()
        rows, self.lse_square_scale, self.reduction = arguments.loss_options(
            ignore_index, label_smoothing, softcap, logit_scale, lse_square_scale, reduction
        )
        self.ignore_index, self.label_smoothing, self.softcap, self.logit_scale = rows
        self.register_buffer("weight", weight)
        self.dim = arguments.integer("dim", dim)
        self.inplace_backward = inplace_backward
        self.grad_in_forward = grad_in_forward

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            lse_square_scale=self.lse_square_scale,
            softcap=self.softcap,
            logit_scale=self.logit_scale,
            dim=self.dim,
            inplace_backward=self.inplace_backward,
            grad_in_forward=self.grad_in_forward,
        )

    def extra_repr(self) -> str:
        defaults = {
            "ignore_index": -100,
            "reduction": "mean",
            "label_smoothing": 0.0,
            "lse_square_scale": 0.0,
            "softcap": None,
            "logit_scale": 1.0,
            "dim": 1,
            "inplace_backward": False,
            "grad_in_forward": False,
        }
        return ", ".join(
            f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value
        )
