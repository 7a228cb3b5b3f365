"""Random calls of the losses of a teacher's top k, as fuzz_draws.py makes those of the others."""

import inspect
import math

import torch
import torch.nn.functional as F
from fuzz_distillation import _parts as parts_of
from fuzz_program import Draw
from helpers.option_values import drawn

import xent_ops
from xent_ops.testing.rows import assert_within, eps

NAMES = ("top_k_distillation_loss", "linear_top_k_distillation_loss")
OVER_RANKS = "vocab_parallel_linear_top_k_distillation_loss"
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")


def draw(random, seed, device, name, backend, ranks=1):
    linear, given, lines, split, sequence = "linear" in name, {}, [], ranks > 1, None
    maybe, pick = (lambda share=0.5: random.random() < share), random.choice
    known = inspect.signature(getattr(xent_ops.distributed if split else xent_ops, name)).parameters
    dtype, classes, places = pick(DTYPES), pick((1, 2, 17, 64, 130, 1003)), pick((1, 2, 5, 16))
    shape = pick([(), (0,), (1,), (7,), (33,), (2, 3), (2, 0), (2, 3, 2)])
    if split and maybe(0.3):  # of this dimension each rank has its part of the inputs
        sequence, given["sequence_parallel"] = pick((0, 1)), True
        shape = (2 * ranks, 3) if sequence == 0 else (3, 2 * ranks)
    ignored, rows = pick((-100, -1, classes + 9)), torch.Size(shape).numel()
    ids = []
    for _ in range(rows):
        share = pick((0.0, 0.0, 0.3, 1.0))
        ids += [ignored if maybe(share) else random.randrange(classes) for _ in range(places)]
    if ignored != -100:
        given["ignore_index"] = ignored
    for option, (_, *choices) in drawn("linear_cross_entropy").items():
        if option in ("softcap", "logit_scale", "lse_square_scale") and maybe(0.4):
            given[option] = pick(choices)
    if maybe():
        given["tail"] = True
    if maybe(0.8):
        given["reduction"] = pick(("mean", "sum") if split else ("mean", "sum", "none"))
    if given.get("reduction") == "sum" and maybe():
        given["divisor"] = pick((3.0, -2.0))
    for option, share, values in (
        ("chunk_rows", 0.5, (1, 3, 16)),
        ("skip_ignored", 0.2, (True,)),
        ("batch_invariant", 0.2, (True,)),
        ("check", 0.3, (True,)),
        ("logits_dtype", 0.3, (torch.float32,)),
        ("accumulate_dtype", 0.3, (torch.float32,)),
    ):
        narrow = dtype in DTYPES[1:3] or not option.endswith("dtype")
        refused = (option == "check" and backend is not None) or (option == "batch_invariant" and dtype == DTYPES[3])
        if option in known and narrow and not refused and maybe(share):
            given[option] = pick(values)

    def tensor(name, *sizes, scale=1.0):
        lines.append(f"{name} = (torch.randn({sizes}).double() * {scale}).to({dtype}).to({device!r})")

    lines += ["import torch", "", "import xent_ops", "from fuzz_top_k import expect", "", f"torch.manual_seed({seed})"]
    index = pick(("torch.int64", "torch.int32"))
    lines.append(f"ids = torch.tensor({ids}, dtype={index}).view({(*shape, places)}).to({device!r})")
    lines.append(f"probs = (torch.randn({(*shape, places)}).softmax(-1) * 0.9).to({pick(DTYPES[:3])}).to({device!r})")
    texts, leaves = [f"{option}={value!r}" for option, value in given.items()], ["student"]
    if linear:
        features = pick((1, 3, 8, 33))
        tensor("student", *shape, features)
        tensor("head", classes, features, scale=features**-0.5)
        leaves.append("head")
        if maybe():
            tensor("bias", classes)
            leaves, texts = [*leaves, "bias"], [*texts, "bias_shard=my_bias" if split else "linear_bias=bias"]
    else:
        tensor("student", *shape, classes, scale=3.0)
    if maybe(0.3):
        lines.append(f"token_weight = torch.rand({shape}).to({device!r}) + 0.25")
        texts.append("token_weight=token_weight")
    whole = f"[{', '.join(leaves)}]"
    if split:
        lines += parts_of(random, classes, ranks, sequence, leaves)
        leaves = [f"my_{name}" for name in leaves]
        texts += [f"num_classes={classes}", "class_start=start"]
    lines += [f"{name}.requires_grad_()" for name in leaves]
    function = f"xent_ops.distributed.{name}" if split else f"xent_ops.{name}"
    if backend is not None:
        function = f"torch.compile({function}, fullgraph=True, backend={backend!r})"
    lines.append(f"loss = {function}({', '.join([*leaves[:2], 'ids', 'probs', *texts])})")
    lines.append("upstream = torch.randn(loss.shape).to(loss)")
    lines.append(f"grads = torch.autograd.grad(loss, [{', '.join(leaves)}], upstream)")
    used = {text.split("=")[0] for text in texts} | {"ids", "probs"}
    judged = ("ignore_index", "softcap", "logit_scale", "lse_square_scale", "tail", "reduction", "divisor")
    texts = [text for text in texts if text.split("=")[0] in (*judged, "token_weight")]
    if split:
        texts += ["shard=(start, stop)", f"part={None if sequence is None else (sequence, ranks)}"]
    lines.append(f"expect(loss, grads, upstream, {whole}, ids, probs, {', '.join(texts)})")
    return Draw(seed, name, "\n".join(lines) + "\n", frozenset(used), ranks, device)


def expect(
    loss, grads, upstream, student, ids, probs, token_weight=None, reduction="mean", divisor=1.0, ignore_index=-100,
    softcap=None, logit_scale=1.0, lse_square_scale=0.0, tail=False, shard=None, part=None
):  # fmt: skip
    """By autograd in float64, within a part of the sums of magnitudes. ``shard``, ``part``: as in fuzz_distillation."""
    own, linear = student[0].dtype, len(student) > 1
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in student]
    z = logit_scale * (F.linear(*exact) if linear else exact[0])
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    shape, ids = z.shape[:-1], ids.cpu().long()
    counted, rows = ids != ignore_index, (ids != ignore_index).any(-1)
    weight = torch.ones(shape).double() if token_weight is None else token_weight.double().cpu()
    weight = torch.where(rows, weight, 0.0)
    place = torch.where(counted, ids, 0)
    dense = torch.zeros_like(z).detach().scatter_add(-1, place, torch.where(counted, probs.cpu().double(), 0.0))
    named = torch.zeros(z.shape).scatter_add(-1, place, counted.float()) > 0
    lse = z.logsumexp(-1, keepdim=True)
    terms = [-dense * (z - lse), lse_square_scale * lse.square()]
    rest = 1.0 - dense.sum(-1, keepdim=True)
    if tail:
        left = torch.where(named.all(-1, keepdim=True), 0.0, z.masked_fill(named, -math.inf)).logsumexp(
            -1, keepdim=True
        )
        terms.append(torch.where(named.all(-1, keepdim=True), 0.0, -rest * (left - lse)))
    factor = weight / (weight.sum() if reduction == "mean" else divisor if reduction == "sum" else 1.0)
    wanted = sum(term.sum(-1) for term in terms) * factor
    wanted = torch.where(rows, wanted, 0.0) if reduction == "none" else torch.where(rows, wanted, 0.0).sum()
    unit = max(eps(torch.float64 if own == torch.float64 else torch.float32), eps(own) if linear else 0.0)
    far = (4 if unit > 1e-4 else 64) * unit * (4 + (z.detach().abs().max().item() if z.numel() else 0.0))
    bound = far * (1 + sum(term.detach().abs().sum(-1) for term in terms)) * factor.abs().nan_to_num(0.0)
    if reduction != "none":
        bound = bound.sum()
        if reduction == "mean" and (weight == 0).all():
            assert loss.isnan()
            return
    assert_within("loss", loss, wanted.detach(), bound + 1e-300)
    right = torch.autograd.grad(wanted, exact, upstream.double().cpu(), allow_unused=True, materialize_grads=True)
    # Magnitudes of the gradient of the logits, m q + p, and what products make of them.
    slope = (1 + 2 * lse_square_scale * lse.detach().abs()) * z.detach().softmax(-1) + dense
    scale = (slope * (upstream.double().cpu() * factor).abs().unsqueeze(-1) * abs(logit_scale)).reshape(-1, z.shape[-1])
    tiny = torch.finfo(own).tiny * (1 + z.numel() ** 0.5)
    scales = [scale]
    if linear:
        flat, head = exact[0].detach().reshape(len(scale), exact[0].shape[-1]).abs(), exact[1].detach().abs()
        scales = [scale @ head, scale.t() @ flat, scale.sum(0)]
    if shard is not None:
        mine, number = slice(*shard), shard[1] - shard[0]
        assert all(grad[number:].count_nonzero() == 0 for grad in grads[1:]), "padding got a gradient"
        grads = (grads[0], *(grad[:number] for grad in grads[1:]))
        right = (right[0], *(of_classes[mine] for of_classes in right[1:]))
    if part is not None:
        dim, ranks = part
        right = (right[0].chunk(ranks, dim)[torch.distributed.get_rank()], *right[1:])
    for name, grad, of_oracle, magnitudes in zip(("input", "head", "bias"), grads, right, scales, strict=False):
        bound = (far + eps(own)) * (float(magnitudes.max()) if magnitudes.numel() else 0.0) + tiny
        assert_within(name, grad, of_oracle, torch.full_like(of_oracle, bound))
