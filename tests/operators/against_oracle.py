"""The row operator, forward and backward, against the float64 oracle; dtypes and options that the tests share."""

import torch

from xent_ops.testing import assert_grad, assert_loss, assert_lse, oracle

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


# Exactly representable: the interpreter hands kernels a Python float as float32.
OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.125},
    "softcap": {"softcap": 20.0},
    "scale": {"logit_scale": 1.5},
    "all": {"label_smoothing": 0.25, "softcap": 30.0, "logit_scale": 0.75},
}


def _bits(tensor):
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def row_case(device, logits, target, weight=None, *, upstream=True, **options):
    """Run forward and backward of the row operator and hold both against the oracle."""
    logits = logits.to(device).requires_grad_()
    target = target.to(device)
    weight = None if weight is None else weight.to(device)
    before = logits.detach().clone()
    loss, lse, *_ = torch.ops.xent.cross_entropy_forward(logits, target, weight, **options)
    generator = torch.Generator().manual_seed(7)
    grad_loss = torch.randn(target.shape, generator=generator).to(loss) if upstream else torch.ones_like(loss)
    grad_lse = torch.randn(target.shape, generator=generator).to(loss) if upstream else None
    (grad,) = torch.autograd.grad(
        (loss, lse) if upstream else (loss,), logits, (grad_loss, grad_lse) if upstream else (grad_loss,)
    )
    expected = oracle(logits, target, weight, grad_loss=grad_loss, grad_lse=grad_lse if upstream else 0.0, **options)
    assert grad.dtype == logits.dtype and loss.dtype == lse.dtype
    assert loss.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert_loss(loss, expected)
    assert_lse(lse, expected)
    assert_grad(grad, expected)
    assert _bits(before) == _bits(logits), "the logits were written"
