"""Random calls of the functions of distillation, as fuzz_draws.py makes those of the others."""

import math

import torch
import torch.nn.functional as F
from fuzz_program import Draw
from helpers.option_values import drawn

from xent_ops.testing import assert_distillation, distillation_oracle
from xent_ops.testing.rows import assert_within, eps

NAMES = ("distillation_loss", "linear_distillation_loss")
OVER_RANKS = "vocab_parallel_linear_distillation_loss"
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")


def draw(random, seed, device, name, backend, ranks=1):
    linear, given, lines, split, sequence = "linear" in name, {}, [], ranks > 1, None
    maybe, pick = (lambda share=0.5: random.random() < share), random.choice
    dtype, teacher_dtype = pick(DTYPES), pick(DTYPES)
    if "torch.float64" in (dtype, teacher_dtype):
        teacher_dtype = dtype
    classes, shape = pick((1, 2, 17, 64, 130, 1003)), pick([(), (0,), (1,), (7,), (33,), (2, 3), (2, 0), (2, 3, 2)])
    if split and maybe(0.3):  # of this dimension each rank has its part of the inputs
        sequence = pick((0, 1))
        shape = (2 * ranks, 3) if sequence == 0 else (3, 2 * ranks)
    padding, teacher_padding = (pick((0, 3, 5)), pick((0, 1, 8))) if maybe(0.3) and not split else (0, 0)
    ignored, rows = pick((-100, -1, classes + 9)), torch.Size(shape).numel()
    targets = [ignored if maybe(0.3) else random.randrange(classes) for _ in range(rows)]
    for option, (_, *choices) in (drawn("divergences_with_grad") | {"beta": (0.0, 0.5, 1.0, 0.03, 0.875)}).items():
        if maybe(0.4):
            given[option] = pick(choices)
    with_target = "hard_weight" in given or maybe(0.7)
    if padding != teacher_padding or maybe(0.1) or split:
        given["num_classes"] = classes
    else:
        padding = teacher_padding = 0
    if maybe(0.8):
        given["reduction"] = pick(("mean", "sum") if split else ("mean", "sum", "none"))
    if given.get("reduction") == "sum" and maybe():
        given["divisor"] = pick((3.0, -2.0))
    if linear and maybe():
        given["chunk_rows"] = pick((1, 3, 16))
    if linear and not split and maybe(0.2):
        given["skip_ignored"] = True
    if split and maybe(0.3):
        given["check"] = True
    if sequence is not None:
        given["sequence_parallel"] = True
    if linear and dtype in DTYPES[1:3] and maybe(0.3):
        given["accumulate_dtype"] = torch.float32
    if with_target and (ignored != -100):
        given["ignore_index"] = ignored

    def tensor(name, dtype, *sizes, scale=1.0):
        lines.append(f"{name} = (torch.randn({sizes}).double() * {scale}).to({dtype}).to({device!r})")

    lines += ["import torch", "", "import xent_ops", "from fuzz_distillation import expect", ""]
    lines.append(f"torch.manual_seed({seed})")
    widths, leaves, teacher = (classes + padding, classes + teacher_padding), ["student"], ["teacher"]
    texts = [f"{option}={value!r}" for option, value in given.items()]
    if with_target:
        lines.append(f"target = torch.tensor({targets}, dtype=torch.int64).view({shape}).to({device!r})")
        texts.append("target=target")
    if linear:
        features, teacher_features = pick((1, 3, 8, 33)), pick((1, 4, 16))
        tensor("student", dtype, *shape, features)
        tensor("teacher", teacher_dtype, *shape, teacher_features)
        tensor("head", dtype, widths[0], features, scale=features**-0.5)
        tensor("teacher_head", teacher_dtype, widths[1], teacher_features, scale=teacher_features**-0.5)
        leaves, teacher = [*leaves, "head"], [*teacher, "teacher_head"]
        if maybe():
            tensor("bias", dtype, widths[0])
            leaves, texts = [*leaves, "bias"], [*texts, "bias_shard=my_bias" if split else "linear_bias=bias"]
        if maybe():
            tensor("teacher_bias", teacher_dtype, widths[1])
            teacher.append("teacher_bias")
            texts.append("teacher_bias_shard=my_teacher_bias" if split else "teacher_bias=teacher_bias")
    else:
        tensor("student", dtype, *shape, widths[0], scale=3.0)
        tensor("teacher", teacher_dtype, *shape, widths[1], scale=3.0)
    if maybe(0.3):
        lines.append(f"token_weight = torch.rand({shape}).to({device!r}) + 0.25")
        texts.append("token_weight=token_weight")
    heads = f"[{', '.join(leaves)}], [{', '.join(teacher)}]"
    if split:
        lines += _parts(random, classes, ranks, sequence, [*leaves, *teacher])
        leaves, teacher = ([f"my_{name}" for name in names] for names in (leaves, teacher))
        texts.append("class_start=start")
    lines += [f"{name}.requires_grad_()" for name in leaves]
    function = f"xent_ops.distributed.{name}" if split else f"xent_ops.{name}"
    if backend is not None:
        function = f"torch.compile({function}, fullgraph=True, backend={backend!r})"
    operands = [*leaves[:2], *teacher[:2]] if linear else [leaves[0], teacher[0]]
    lines.append(f"loss = {function}({', '.join([*operands, *texts])})")
    lines.append("upstream = torch.randn(loss.shape).to(loss)")
    lines.append(f"grads = torch.autograd.grad(loss, [{', '.join(leaves)}], upstream)")
    used = {text.split("=")[0] for text in texts} | {"teacher_input", "teacher_weight", "teacher_weight_shard"}
    unknown = ("linear_bias", "bias_shard", "teacher_bias", "class_start", "sequence_parallel", "check")
    texts = [text for text in texts if not text.startswith(unknown)]
    if split:
        texts += ["shard=(start, stop)", f"part={None if sequence is None else (sequence, ranks)}"]
    lines.append(f"expect(loss, grads, upstream, {heads}, {', '.join(texts)})")
    return Draw(seed, name, "\n".join(lines) + "\n", frozenset(used), ranks, device)


def _parts(random, classes, ranks, sequence, names):
    """Lines that make this rank's parts of the tensors; each head has padding of its own."""
    ends = sorted(random.randint(0, classes) for _ in range(ranks - 1))
    places = list(zip([0, *ends], [*ends, classes], strict=True))
    lines = ["rank = torch.distributed.get_rank()", f"start, stop = {places}[rank]"]
    for side in ("", "teacher_"):
        lines.append(f"{side}padding = {random.choice((0, 1, 2))} if start < stop == {classes} else 0")
    for name in names:
        side = "teacher_" if name.startswith("teacher") else ""
        if name in ("student", "teacher"):
            text = name if sequence is None else f"{name}.chunk({ranks}, {sequence})[rank]"
        else:
            zeros = "0, 0, 0, " if name.endswith("head") else "0, "
            text = f"torch.nn.functional.pad({name}[start:stop], ({zeros}{side}padding), value=7.0)"
        lines.append(f"my_{name} = {text}.clone()")
    return lines


def expect(
    loss, grads, upstream, student, teacher, target=None, token_weight=None, reduction="mean", divisor=1.0,
    chunk_rows=None, skip_ignored=False, accumulate_dtype=None, shard=None, part=None, **options
):  # fmt: skip
    """Of given logits to the budgets of the oracle; through heads to a part of the largest number.

    ``shard``: the classes of this rank, whose gradients these are. ``part``: (dimension, ranks) of the input's.
    """
    own, linear = student[0].dtype, len(student) > 1
    logits, teacher_logits = (
        F.linear(*[tensor.detach().double().cpu() for tensor in head]) if linear else head[0].detach()
        for head in (student, teacher)
    )
    shape = logits.shape[:-1]
    weight = torch.ones(shape).double() if token_weight is None else token_weight.double().cpu()
    if target is not None:
        weight = torch.where(target.cpu() != options.get("ignore_index", -100), weight, 0.0)
    factor = weight / (weight.sum() if reduction == "mean" else divisor if reduction == "sum" else 1.0)
    of_rows = (factor * upstream.detach().double().cpu()).nan_to_num(0.0)
    expected = distillation_oracle(logits, teacher_logits, target, grad_loss=of_rows, **options)
    if not linear and reduction == "none" and token_weight is None:
        assert_distillation(loss, grads[0], expected)
        return
    # Logits of heads are rounded, to the error ``far``; the rest is what sums of rows add.
    unit = max(eps(torch.float64 if own == torch.float64 else torch.float32), eps(own) if linear else 0.0)
    other = max([eps(tensor.dtype) for tensor in teacher]) if linear and own != torch.float64 else unit
    largest = max([tensor.abs().max().item() for tensor in (logits, teacher_logits) if tensor.numel()], default=0.0)
    sizes = sum(tensor.numel() for tensor in (logits,)) ** 0.5
    far = 16 * max(unit, other) * (4 + largest) * 4
    wanted = expected.loss * factor
    bound = expected.loss_bound * factor.abs() + far * (expected.loss_scale * factor.abs())
    if reduction != "none":
        wanted, bound = wanted.sum(), bound.sum()
        if reduction == "mean" and (weight == 0).all():
            wanted = wanted + math.nan
    assert_within("loss", loss, wanted, bound + 1e-300)
    g, scale = (tensor.reshape(-1, logits.shape[-1]) for tensor in (expected.grad, expected.grad_scale))
    tiny = torch.finfo(own).tiny * (1 + sizes)
    if not linear:
        assert_within("grad", grads[0].reshape(g.shape), g, expected.grad_bound.reshape(g.shape) + far * scale + tiny)
        return
    flat, head = (
        tensor.detach().double().cpu() for tensor in (student[0].reshape(len(g), student[0].shape[-1]), student[1])
    )
    wanted = (g @ head, g.t() @ flat, g.sum(0))
    scales = (scale @ head.abs(), scale.t() @ flat.abs(), scale.sum(0))
    if shard is not None:
        mine, number = slice(*shard), shard[1] - shard[0]
        assert all(grad[number:].count_nonzero() == 0 for grad in grads[1:]), "padding got a gradient"
        grads = (grads[0], *(grad[:number] for grad in grads[1:]))
        wanted = (wanted[0], *(of_classes[mine] for of_classes in wanted[1:]))
    if part is not None:
        dim, ranks = part
        of_input = wanted[0].view(*shape, -1).chunk(ranks, dim)[torch.distributed.get_rank()]
        wanted = (of_input, *wanted[1:])
    for name, grad, right, parts in zip(("input", "head", "bias"), grads, wanted, scales, strict=False):
        bound = far * (float(parts.max()) if parts.numel() else 0.0) + tiny
        assert_within(name, grad.reshape(right.shape), right, torch.full_like(right, bound))
