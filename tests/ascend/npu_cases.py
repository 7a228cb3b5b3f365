"""What holds on every "npu": on a device, and on the emulation of its dispatch (npu_host.py)."""

import types

import torch

from xent_ops import testing

OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"softcap": 20.0, "logit_scale": -0.5},
    {"weight": True, "label_smoothing": 0.1, "softcap": 100.0, "ignore_index": 3},
]


def names(options):
    return "-".join(options) or "plain"


def inputs(classes, dtype, rows=7, ignored=-100):
    logits = testing.realistic_logits(rows, classes, dtype=dtype)
    target = torch.arange(rows) * (classes // rows)
    target[2] = ignored
    return logits, target


def check_values(classes, dtype, options):
    """The row operators and their gradients against float64; the lse's gradient is given or not."""
    ops = torch.ops.xent
    options = dict(options)
    weight = torch.linspace(0.5, 1.5, classes) if options.pop("weight", None) else None
    logits, target = inputs(classes, dtype, ignored=options.get("ignore_index", -100))
    grad_loss, grad_lse = torch.linspace(-1, 2, 7), torch.linspace(1, 0, 7)
    arguments = (target.to("npu"), None if weight is None else weight.to("npu"))
    for b in (None, grad_lse):
        upstream = {"grad_loss": grad_loss, "grad_lse": 0.0 if b is None else b}
        expected = testing.oracle(logits, target, weight, **upstream, **options)
        x = logits.to("npu").requires_grad_()
        loss, lse, argmax = ops.cross_entropy_forward_argmax(x, *arguments, **options)
        outputs, grads = ((loss,), (grad_loss,)) if b is None else ((loss, lse), (grad_loss, b))
        torch.autograd.backward(outputs, [grad.to("npu") for grad in grads])
        testing.assert_loss(loss, expected)
        testing.assert_lse(lse, expected)
        testing.assert_grad(x.grad, expected)
    assert torch.equal(argmax.cpu(), ops.cross_entropy_forward_argmax(logits, target, weight, **options)[2])


def why_no_device():
    """Why there is no NPU here; None where a real one has answered. No emulation of one passes."""
    try:
        import torch_npu
    except ImportError:
        return "torch_npu is not installed"
    if not isinstance(getattr(torch_npu, "_C", None), types.ModuleType) or not torch_npu._C.__file__.endswith(".so"):
        return "this torch_npu is not the real one"
    if getattr(torch, "npu", None) is not torch_npu.npu:
        return "the device npu of this process is not torch_npu's"
    if not torch.npu.is_available():
        return "torch_npu finds no NPU"
    if not torch.npu.get_device_name(0).startswith("Ascend"):
        return f"{torch.npu.get_device_name(0)} is no Ascend NPU"
    try:
        from triton.backends import backends
        from triton.runtime.interpreter import InterpretedFunction

        from xent_ops.kernels.ascend.forward import forward_kernel
    except ImportError as error:
        return f"triton-ascend is not installed ({error})"
    if "ascend" not in backends or isinstance(forward_kernel, InterpretedFunction):
        return "Triton would not compile for the NPU"
    return None
