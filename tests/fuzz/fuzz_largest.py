"""Random calls of the functions of the k most probable classes, as fuzz_draws.py makes those of the others."""

import inspect

import torch
import torch.nn.functional as F
from fuzz_distillation import _parts as parts_of
from fuzz_program import Draw
from helpers.option_values import drawn

import xent_ops
from xent_ops.testing.rows import assert_within, eps

NAMES = ("top_k", "linear_top_k")
OVER_RANKS = "vocab_parallel_linear_top_k"
DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16", "torch.float64")


def draw(random, seed, device, name, backend, ranks=1):
    linear, given, split, sequence = "linear" in name, {}, ranks > 1, None
    maybe, pick = (lambda share=0.5: random.random() < share), random.choice
    known = inspect.signature(getattr(xent_ops.distributed if split else xent_ops, name)).parameters
    dtype, classes = pick(DTYPES), pick((1, 2, 17, 64, 130, 1003, 5003))
    k = random.randint(1, min(classes, pick((1, 5, 40, classes))))
    shape = pick([(), (0,), (1,), (7,), (33,), (2, 3), (2, 0), (2, 3, 2)])
    with_target = maybe(0.7)
    if split and with_target and maybe(0.3):  # of this dimension each rank has its part of the inputs
        sequence, given["sequence_parallel"] = pick((0, 1)), True
        shape = (2 * ranks, 3) if sequence == 0 else (3, 2 * ranks)
    for option, (_, *choices) in drawn("linear_top_k").items():
        if option in known and option != "label_smoothing" and maybe(0.4):
            given[option] = pick(choices)
    ignored = pick((-100, -1, classes + 9))
    if with_target and ignored != -100:
        given["ignore_index"] = ignored
    for option, share, values in (
        ("chunk_rows", 0.5, (1, 3, 16)),
        ("skip_ignored", 0.2, (True,)),
        ("batch_invariant", 0.2, (True,)),
        ("check", 0.3, (True,)),
        ("logits_dtype", 0.3, (torch.float32,)),
        ("accumulate_dtype", 0.3, (torch.float32,)),
    ):
        narrow = dtype in DTYPES[1:3] or not option.endswith("dtype")
        wide = option == "batch_invariant" and linear and dtype == DTYPES[3]
        refused = (option == "check" and backend is not None) or wide
        if option in known and narrow and not refused and maybe(share):
            given[option] = pick(values)
    lines = ["import torch", "", "import xent_ops", "from fuzz_largest import expect", "", f"torch.manual_seed({seed})"]

    def tensor(name, *sizes, scale=1.0):
        lines.append(f"{name} = (torch.randn({sizes}).double() * {scale}).to({dtype}).to({device!r})")

    texts, leaves = [f"{option}={value!r}" for option, value in given.items()], ["student"]
    if with_target:
        targets = [ignored if maybe(0.2) else random.randrange(classes) for _ in range(torch.Size(shape).numel())]
        index = pick(("torch.int64", "torch.int32"))
        lines.append(f"target = torch.tensor({targets}, dtype={index}).view({shape}).to({device!r})")
        texts.append("target=target")
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
    whole = f"[{', '.join(leaves)}]"
    if split:
        lines += parts_of(random, classes, ranks, sequence, leaves)
        leaves = [f"my_{name}" for name in leaves]
        texts += [f"num_classes={classes}", "class_start=start"]
    else:
        lines += [f"{name}.requires_grad_()" for name in leaves]
    function = f"xent_ops.distributed.{name}" if split else f"xent_ops.{name}"
    if backend is not None:
        function = f"torch.compile({function}, fullgraph=True, backend={backend!r})"
    lines.append(f"top = {function}({', '.join([*leaves[:2], str(k), *texts])})")
    if split:
        lines.append("upstream = grads = None")
    else:
        summed = "[top.log_probs, top.entropy]"
        lines.append(f"upstream = [torch.randn(value.shape).to(value) for value in {summed}]")
        lines.append(f"grads = torch.autograd.grad({summed}, [{', '.join(leaves)}], upstream)")
    judged = [text for text in texts if text.split("=")[0] in ("target", "ignore_index", "softcap", "logit_scale")]
    lines.append(f"expect({', '.join(['top', 'grads', 'upstream', whole, str(k), *judged])})")
    used = frozenset({text.split("=")[0] for text in texts} | {"k"})
    return Draw(seed, name, "\n".join(lines) + "\n", used, ranks, device)


def expect(top, grads, upstream, student, k, target=None, ignore_index=-100, softcap=None, logit_scale=1.0):
    """By autograd in float64 at the ids that were found. Exact logits of given tensors, of heads near ones."""
    own, linear = student[0].dtype, len(student) > 1
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in student]
    logits = F.linear(*exact) if linear else exact[0]
    z = logit_scale * logits
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    sign, shape = 1 if logit_scale > 0 else -1, z.shape[:-1]
    rows = torch.ones(shape, dtype=torch.bool) if target is None else target.cpu().long() != ignore_index
    unit = max(eps(torch.float64 if own == torch.float64 else torch.float32), eps(own) if linear else 0.0)
    size = max([float(value.detach().abs().max()) if value.numel() else 0.0 for value in (logits, z)])
    far = 64 * unit * (1 + size) * (1 + abs(logit_scale))
    ids = top.ids.cpu()
    assert ids.shape == (*shape, k) and (ids[~rows] == -100).all(), "ids of ignored rows"
    place = torch.where(rows.unsqueeze(-1), ids, 0)
    ordered, order = (sign * logits.detach()).sort(dim=-1, descending=True, stable=True)
    chosen = (sign * logits.detach()).gather(-1, place)
    if not linear:
        assert torch.equal(ids[rows], order[rows][..., :k])
    assert (place[rows].sort(dim=-1).values.diff(dim=-1) > 0).all(), "a class twice"
    assert ((chosen - ordered[..., :k]).abs()[rows] <= far).all(), "not the largest"
    log_p = z.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    kept = torch.where(rows.unsqueeze(-1), log_p.gather(-1, place), 0.0)
    for name, found, wanted in (
        ("log_probs", top.log_probs, kept),
        ("entropy", top.entropy, torch.where(rows, entropy, 0.0)),
        ("lse", top.lse, torch.where(rows, z.logsumexp(-1), float("inf"))),
    ):
        budget = far * (1 + (size if name == "entropy" else 0.0))
        assert_within(name, found, wanted.detach(), torch.full_like(wanted, budget, requires_grad=False))
    if target is None:
        assert top.target_ranks is None and top.target_log_probs is None
    else:
        index, ranks = torch.where(rows, target.cpu().long(), 0).unsqueeze(-1), top.target_ranks.cpu()
        own_logit = (sign * logits.detach()).gather(-1, index)
        least = ((sign * logits.detach()) > own_logit + 2 * far).sum(-1)
        most = ((sign * logits.detach()) >= own_logit - 2 * far).sum(-1) - 1
        assert ((ranks >= least) & (ranks <= most))[rows].all() and (ranks[~rows] == -1).all(), "rank"
        hit = rows & (ranks < k)
        assert torch.equal(ids[hit].gather(-1, ranks[hit].unsqueeze(-1)), index[hit])
        at_target = torch.where(rows, log_p.gather(-1, index).squeeze(-1), 0.0).detach()
        assert_within("target_log_probs", top.target_log_probs, at_target, torch.full_like(at_target, far))
    if grads is None:
        return
    total = (kept * upstream[0].double().cpu()).sum() + torch.where(rows, entropy * upstream[1].double().cpu(), 0).sum()
    right = torch.autograd.grad(total, exact, materialize_grads=True)
    slope = abs(logit_scale) * sum(float(value.abs().sum()) for value in upstream) * (2 + size)
    for name, grad, of_oracle, other in zip(("input", "head", "bias"), grads, right, (1, 0, 0), strict=False):
        through = float(student[other].detach().abs().max()) if linear and student[other].numel() else 1.0
        bound = (far + 4 * eps(own)) * slope * (1 + through)
        assert_within(name, grad, of_oracle, torch.full_like(of_oracle, bound + torch.finfo(own).tiny))
