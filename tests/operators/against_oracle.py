"""Operators of rows against the float64 oracle: forward and backward, both in one; dtypes and options that tests share."""

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


def assert_lse_where_read(lse, expected, target, ignore_index=-100):
    """That of a counted row is right, that of an ignored one infinite."""
    ignored = (target.long() == ignore_index).to(expected.lse.device)
    assert_lse(lse, expected._replace(lse=expected.lse.masked_fill(ignored, float("inf"))))


def with_grad_case(device, logits, target, weight=None, *, upstream=True, square=None, **options):
    """The operator for both at once and its in-place form, which leaves the gradient in the logits."""
    ops, generator = torch.ops.xent, torch.Generator().manual_seed(7)
    logits, target, weight = logits.to(device), target.to(device), None if weight is None else weight.to(device)
    scale = torch.randn(target.shape, generator=generator) if upstream else torch.tensor(0.25)
    square = 0.1 * torch.rand(target.shape, generator=generator) if upstream else square
    rows = (target, scale.to(device), None if square is None else square.to(device), weight)
    before, counted = logits.clone(), target.long() != options.get("ignore_index", -100)
    loss, lse, argmax, entropy, grad = ops.cross_entropy_with_grad(logits, *rows, **options)
    assert argmax.shape == entropy.shape == (0,) and _bits(logits) == _bits(before)
    grad_lse = 0.0 if square is None else torch.where(counted, 2 * rows[2].double() * lse.double(), 0)
    expected = oracle(logits, target, weight, grad_loss=rows[1], grad_lse=grad_lse, **options)
    assert loss.dtype == lse.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert grad.dtype == logits.dtype and grad.is_contiguous()
    version, over = logits._version, logits
    if any(stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        version, over = -1, logits.clone()  # whose rows share memory
    loss_, lse_, *_ = ops.cross_entropy_with_grad_(over, *rows, **options)
    assert over._version > version
    # Not bit for bit: rows of other strides may take another kernel.
    for found in ((loss, lse, grad), (loss_, lse_, over)):
        assert_loss(found[0], expected)
        assert_lse_where_read(found[1], expected, target, options.get("ignore_index", -100))
        assert_grad(found[2], expected)


CASES = [row_case, with_grad_case]
