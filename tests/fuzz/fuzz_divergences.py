"""Random calls of losses that are a function of a token's divergences, as fuzz_draws.py makes those of the others."""

import inspect
import math

import torch
import torch.nn.functional as F
from fuzz_distillation import _parts as parts_of
from fuzz_program import Draw
from helpers.divergence_oracle import divergences
from helpers.option_values import drawn

import xent_ops
from xent_ops.testing.rows import assert_within, eps

NAMES = ("distillation_token_loss", "linear_distillation_token_loss")
OVER_RANKS = "vocab_parallel_linear_distillation_token_loss"
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")
FIELDS = ("kl", "reverse_kl", "jsd", "overlap", "log_prob")
OPTIONS = ("beta", "temperature", "softcap", "logit_scale", "teacher_softcap", "teacher_logit_scale")


def draw(random, seed, device, name, backend, ranks=1):
    linear, given, lines, split, sequence = "linear" in name, {}, [], ranks > 1, None
    maybe, pick = (lambda share=0.5: random.random() < share), random.choice
    known = inspect.signature(getattr(xent_ops.distributed if split else xent_ops, name)).parameters
    dtype, classes = pick(DTYPES), pick((1, 2, 17, 64, 130, 1003))
    shape = pick([(), (0,), (1,), (7,), (33,), (2, 3), (2, 0), (2, 3, 2)])
    if split and maybe(0.3):  # of this dimension each rank has its part of the inputs
        sequence, given["sequence_parallel"] = pick((0, 1)), True
        shape = (2 * ranks, 3) if sequence == 0 else (3, 2 * ranks)
    draft = not split and maybe(0.4)
    width = classes + pick((0, 1, 50)) if draft else classes
    ignored, rows = pick((-100, -1, classes + 9)), torch.Size(shape).numel()
    targets = [ignored if maybe(0.3) else random.randrange(classes) for _ in range(rows)]
    read = random.sample(FIELDS, pick((1, 1, 2, 3, 5)))
    with_target = "log_prob" in read or maybe(0.7)
    for option, (_, *choices) in drawn("divergences_forward").items():
        if option in OPTIONS and maybe(0.4):
            given[option] = pick(choices)
    if with_target and ignored != -100:
        given["ignore_index"] = ignored
    if maybe():
        given["reduction"] = pick(("mean", "sum"))
    if given.get("reduction") == "sum" and maybe():
        given["divisor"] = pick((3.0, -2.0))
    for option, share, values in (
        ("num_classes", 0.0 if draft else 1.0 if split else 0.2, (classes,)),
        ("chunk_rows", 0.5, (1, 3, 16)),
        ("skip_ignored", 0.2, (True,)),
        ("check", 0.3, (True,)),
        ("logits_dtype", 0.3, (torch.float32,)),
        ("accumulate_dtype", 0.3, (torch.float32,)),
    ):
        narrow = dtype in DTYPES[1:3] or not option.endswith("dtype")
        if option in known and narrow and not (option == "check" and backend is not None) and maybe(share):
            given[option] = pick(values)

    def tensor(name, *sizes, scale=1.0):
        lines.append(f"{name} = (torch.randn({sizes}).double() * {scale}).to({dtype}).to({device!r})")

    lines += ["import torch", "", "import xent_ops", "from fuzz_divergences import expect", ""]
    lines.append(f"torch.manual_seed({seed})")
    texts, leaves, teacher = [f"{option}={value!r}" for option, value in given.items()], ["student"], ["teacher"]
    if with_target:
        lines.append(f"target = torch.tensor({targets}, dtype=torch.int64).view({shape}).to({device!r})")
        texts.append("target=target")
    if draft:
        lines.append(f"classes = torch.randperm({width})[:{classes}].to({device!r})")
        texts.append("classes=classes")
    if linear:
        features, teacher_features = pick((1, 3, 8, 33)), pick((1, 4, 16))
        tensor("student", *shape, features)
        tensor("teacher", *shape, teacher_features)
        tensor("head", classes, features, scale=features**-0.5)
        tensor("teacher_head", width, teacher_features, scale=teacher_features**-0.5)
        leaves, teacher = [*leaves, "head"], [*teacher, "teacher_head"]
        if maybe():
            tensor("bias", classes)
            leaves, texts = [*leaves, "bias"], [*texts, "bias_shard=my_bias" if split else "linear_bias=bias"]
        if maybe():
            tensor("teacher_bias", width)
            teacher.append("teacher_bias")
            texts.append("teacher_bias_shard=my_teacher_bias" if split else "teacher_bias=teacher_bias")
    else:
        tensor("student", *shape, classes, scale=3.0)
        tensor("teacher", *shape, width, scale=3.0)
    lines.append(f"factors = torch.randn({(len(read), *shape)}).double().to({device!r})")
    total = " + ".join(f"rows[{i}] * d.{field}" for i, field in enumerate(read))
    heads = f"[{', '.join(leaves)}], [{', '.join(teacher)}]"
    if split:
        lines += parts_of(random, classes, ranks, sequence, [*leaves, *teacher])
        leaves, teacher = ([f"my_{name}" for name in names] for names in (leaves, teacher))
        texts.append("class_start=start")
    lines += [f"{name}.requires_grad_()" for name in leaves]
    function = f"xent_ops.distributed.{name}" if split else f"xent_ops.{name}"
    if backend is not None:
        function = f"torch.compile({function}, fullgraph=True, backend={backend!r})"
    operands = [*leaves[:2], *teacher[:2]] if linear else [leaves[0], teacher[0]]
    texts.append(f"fn=lambda d, *rows: {total}")
    texts.append("rows=tuple(factors)")
    lines.append(f"loss = {function}({', '.join([*operands, *texts])})")
    lines.append("upstream = torch.randn(loss.shape).to(loss)")
    lines.append(f"grads = torch.autograd.grad(loss, [{', '.join(leaves)}], upstream)")
    used = {text.split("=")[0] for text in texts} | {"teacher_input", "teacher_weight", "teacher_weight_shard"}
    judged = (*OPTIONS, "ignore_index", "reduction", "divisor", "target", "classes")
    texts = [text for text in texts if text.split("=")[0] in judged]
    if split:
        texts += ["shard=(start, stop)", f"part={None if sequence is None else (sequence, ranks)}"]
    lines.append(f"expect(loss, grads, upstream, {heads}, {read!r}, factors, {', '.join(texts)})")
    return Draw(seed, name, "\n".join(lines) + "\n", frozenset(used), ranks, device)


def expect(
    loss, grads, upstream, student, teacher, read, factors, target=None, classes=None, reduction="mean", divisor=1.0,
    ignore_index=-100, shard=None, part=None, **options
):  # fmt: skip
    """By autograd in float64, within a part of the sums of magnitudes. ``shard``, ``part``: as in fuzz_distillation.

    A class whose s and t are as near as rounding may be on the other side of the overlap: it may have its whole s.
    """
    own, linear = student[0].dtype, len(student) > 1
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in student]
    wide = [tensor.detach().double().cpu() for tensor in teacher]
    z, y = (F.linear(*head) if linear else head[0] for head in (exact, wide))
    target, classes = (None if tensor is None else tensor.cpu() for tensor in (target, classes))
    found = divergences(z, y, target, classes, ignore_index=ignore_index, **options)
    factors = factors.cpu()
    values = sum(factor * getattr(found, field) for factor, field in zip(factors, read, strict=True))
    counted = torch.ones_like(values, dtype=torch.bool) if target is None else target != ignore_index
    number = counted.sum() if reduction == "mean" else divisor
    wanted = torch.where(counted, values, 0.0).sum() / number
    if reduction == "mean" and not counted.any():
        assert loss.isnan()
        return
    right = torch.autograd.grad(wanted, exact, upstream.double().cpu(), allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        temperature, scale = options.get("temperature", 1.0), options.get("logit_scale", 1.0)

        def log_probabilities(z, softcap, scale):
            z = scale * z
            return ((z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature).log_softmax(-1)

        log_s = log_probabilities(z, options.get("softcap"), scale)
        log_all = log_probabilities(y, options.get("teacher_softcap"), options.get("teacher_logit_scale", 1.0))
        log_t = log_all if classes is None else log_all[..., classes]
        s, t = log_s.exp(), log_t.log_softmax(-1).exp()
        unit = max(eps(torch.float64 if own == torch.float64 else torch.float32), eps(own) if linear else 0.0)
        steep = max(1.0, 1 / temperature) * max(1.0, abs(scale), abs(options.get("teacher_logit_scale", 1.0)))
        largest = max([one.abs().max().item() for one in (z, y) if one.numel()], default=0.0)
        far = 64 * unit * (4 + largest) * steep
        distance = log_s.abs() + log_t.abs()
        sizes = ((s + t) * distance).sum(-1, keepdim=True) + found.log_prob.abs().unsqueeze(-1) + 4
        weight = torch.where(counted, factors.abs().sum(0), 0.0).unsqueeze(-1) / abs(number)
        bound = far * (weight * sizes).sum()
        assert_within("loss", loss, wanted, bound + 1e-300)
        parts = s * (1 + distance + sizes) + t + (0.0 if "log_prob" not in read else steep)
        flips = torch.where((log_s - log_t).abs() < far * steep, s, 0.0) if "overlap" in read else 0.0
        slope = abs(scale) * max(1.0, 1 / temperature) * upstream.double().cpu().abs()
        bounds = (weight * slope * ((far + eps(own)) * parts + flips)).reshape(-1, z.shape[-1])
        tiny = torch.finfo(own).tiny * (1 + z.numel() ** 0.5)
        limits = [bounds]
        if linear:
            flat, head = exact[0].reshape(len(bounds), exact[0].shape[-1]).abs(), exact[1].abs()
            limits = [bounds @ head, bounds.t() @ flat, bounds.sum(0)]
    if shard is not None:
        mine, size = slice(*shard), shard[1] - shard[0]
        assert all(grad[size:].count_nonzero() == 0 for grad in grads[1:]), "padding got a gradient"
        grads = (grads[0], *(grad[:size] for grad in grads[1:]))
        right = (right[0], *(of_classes[mine] for of_classes in right[1:]))
    if part is not None:
        dim, ranks = part
        right = (right[0].chunk(ranks, dim)[torch.distributed.get_rank()], *right[1:])
    for name, grad, of_oracle, limit in zip(("input", "head", "bias"), grads, right, limits, strict=False):
        most = float(limit.max()) if limit.numel() else 0.0
        assert math.isfinite(most)
        assert_within(name, grad.reshape(of_oracle.shape), of_oracle, torch.full_like(of_oracle, most + tiny))
