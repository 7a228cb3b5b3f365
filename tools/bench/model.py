"""Whole compiled training steps of a Llama of transformers. They show the effect of the loss on training.

A step is the forward, and the backward to all weights' gradients. It has no optimizer, which would be the same for all.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from xent_ops import inductor
from xent_ops.bench import check
from xent_ops.bench.arguments import Shape
from xent_ops.bench.contestants import (
    LINEAR_PEERS,
    Contestant,
    Function,
    Outputs,
    Peer,
    compiled,
    installed,
    linear,
    unfused_torch,
)
from xent_ops.bench.measure import Result
from xent_ops.bench.problems import Problem
from xent_ops.bench.run import Setting, Table

from .heads import AUTO_CHUNKER, IN_8_BITS, has_auto_chunker, unfused_ours, was_chunked
from .losses import left

BODY, LINEAR = "body alone", "xent linear"
# Logits that the eager step holds at a time, in about five float32 copies of 256 MiB each. All logits at once would
# need more memory than the measured step: 134 GB for 65536 tokens and 128256 classes.
CHUNK = 1 << 26
# Llama 3.2 1B with a head of its own; a tiny one.
DEFAULTS = {
    "cuda": {"batch": 4, "tokens": 4096, "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8,
             "feed_forward": 8192, "classes": 128256},
    "cpu": {"batch": 2, "tokens": 32, "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2,
            "feed_forward": 128, "classes": 512},
}  # fmt: skip
KEYS = tuple(DEFAULTS["cuda"])


def sizes(text: str) -> dict[str, int]:
    """The sizes in ``text``. The defaults of the others depend on the device."""
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(r"(\w+)=0*([1-9]\d*)", part)
        if match is None or match[1] not in KEYS:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a size; expected KEY=NUMBER with a whole number above 0, separated by commas, such "
                f"as layers=4,batch=16; keys are {', '.join(KEYS)}"
            )
        found[match[1]] = int(match[2])
    return found


def llama(size: dict[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size["classes"], hidden_size=size["hidden"], intermediate_size=size["feed_forward"],
        num_hidden_layers=size["layers"], num_attention_heads=size["heads"], num_key_value_heads=size["kv_heads"],
        max_position_embeddings=size["tokens"], use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Step(Problem):
    """Random tokens. The targets are the next tokens, and the last position of each sequence is ignored.

    ``ignored``: the fraction of ignored positions, the last ones and random ones; None ignores only the last ones.
    A contestant is a function of (model, tokens (B, S), targets) that returns the loss.
    """

    def __init__(
        self, size: dict[str, int], dtype: torch.dtype, device: torch.device, ignored: float | None = None
    ) -> None:
        batch, length, classes = size["batch"], size["tokens"], size["classes"]
        super().__init__(Shape(batch * length, classes), dtype, device)
        self.layers = size["layers"]
        with torch.device(device):
            self.model = llama(size).to(dtype).train()
        self.tokens = torch.randint(classes, (batch, length), generator=self.generator, device=device)
        following = self.tokens.roll(-1, 1)
        following[:, -1] = check.IGNORE_INDEX
        if ignored is not None:
            order = torch.rand((batch, length), generator=self.generator, device=device)
            order[:, -1] = -1.0
            following.view(-1)[order.flatten().argsort()[: round(ignored * batch * length)]] = check.IGNORE_INDEX
        self.targets = (following.flatten(),) * 2
        self.target = self.targets[0].clone()
        self.head = self.model.lm_head.weight
        self.early = self.model.model.layers[0].self_attn.q_proj.weight  # its gradient needs the whole backward
        checked = (self.head, self.early)
        others = (weight for weight in self.model.parameters() if not any(weight is other for other in checked))
        self.parameters = (*checked, *others)
        self._expected: tuple[Tensor, Tensor, Tensor] | None = None

    def inputs(self) -> tuple[Tensor, ...]:
        return self.parameters

    def restore(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        """A step leaves its gradients with the parameters, as in training."""
        self.expected()
        step = contestant.load()(self.model)

        def run() -> Outputs:
            self.restore()
            loss = step(self.tokens, self.target)
            loss.backward()
            grads = (parameter.grad for parameter in self.parameters)
            return Outputs(loss.detach(), tuple(grad for grad in grads if grad is not None))

        return run

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Verdict:
        """The loss, and in the 2-norm the gradients of the head and of an early weight, beside the plain eager step's.

        A comparison with float64 would show only the body's own rounding, which is the same for all. A compiled body
        rounds less often than an eager one, and the noise grows with the layers: in bfloat16 these gradients differed
        by 0.7 % with 2 layers of 64 and by 1.1 % with 8 of 256, and float64 was as far from either. The tolerance is
        about four times that: four roundings, and more with depth. The loss is a mean over rows with independent noise.
        Its tolerance is one rounding of a row's loss (36 times the noise that was seen with 128 rows), and four
        roundings to the dtype of the returned loss.
        """
        depth = math.sqrt(1 + self.layers / 8)
        limit = depth * max(check.tolerance(self.dtype), 1e-4)  # 1e-4 for float32: exp enlarges the products' rounding
        loss_limit = max(depth * torch.finfo(self.dtype).eps / math.sqrt(self.shape.rows), 3e-5)
        loss_limit += 4 * torch.finfo(outputs.loss.dtype).eps
        if contestant.in_8_bits is not None:
            limit, loss_limit = limit + contestant.in_8_bits[0], loss_limit + contestant.in_8_bits[1]
        limits = {"loss": loss_limit, "head": limit, "early weight": limit}
        if outputs.loss.shape != () or len(outputs.grads) != len(self.parameters):
            return check.Verdict(dict.fromkeys(limits, math.inf), limits)
        loss, head, early = self.expected()
        errors = {
            "loss": check.worst((outputs.loss.double() - loss).abs() / loss.abs()),
            "head": check.worst(check.relative_error(outputs.grads[0], head)),
            "early weight": check.worst(check.relative_error(outputs.grads[1], early)),
        }
        return check.Verdict(errors, limits)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The eager step on float32 logits. The loss runs by chunks of rows, and sums in float32."""
        if self._expected is not None:
            return self._expected
        self.restore()
        hidden = body(self.model)(self.tokens)
        counted = (self.target != check.IGNORE_INDEX).sum()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        grad_head = torch.zeros(self.head.shape, dtype=torch.float32, device=self.device)
        grad_hidden = torch.empty_like(hidden)
        for part in check.chunks(*self.shape, CHUNK):
            rows = hidden.detach()[part].requires_grad_()
            logits = F.linear(rows, self.head).float()
            loss = F.cross_entropy(logits, self.target[part], reduction="sum") / counted
            row_tensors, of_head = torch.autograd.grad(loss, (rows, self.head))
            total += loss.detach()
            grad_hidden[part] = row_tensors
            grad_head += of_head
        hidden.backward(grad_hidden)
        self._expected = (total, grad_head, self.early.grad.float())
        self.restore()
        return self._expected


def body(model: Any) -> Callable[[Tensor], Tensor]:
    """The model's body: tokens to the hidden states of rows."""
    return lambda tokens: model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)


def whole(loss: Function, **options: Any) -> Callable[[], Function]:
    """Compile body, head and loss together."""

    def of_model(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
        hidden, matrix = body(model), model.lm_head.weight

        def step(tokens: Tensor, target: Tensor) -> Tensor:
            value: Tensor = loss(hidden(tokens), matrix, target)
            return value

        return compiled(lambda: step, **options)()

    return lambda: of_model


def after_body(load: Callable[[], Function]) -> Callable[[], Function]:
    """Compile the body, and call the loss after it, because the loss cannot be compiled with it."""

    def of_model(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
        loss, hidden = load(), compiled(lambda: body(model))()
        return lambda tokens, target: loss(hidden(tokens), model.lm_head.weight, target)

    return lambda: of_model


def by_transformers(with_xent: bool, compile_it: bool) -> Callable[[], Function]:
    """The model's own call with labels, with ``use_xent`` or untouched."""

    def of_model(model: Any) -> Callable[[Tensor, Tensor], Tensor]:
        from xent_ops.integrations.transformers import use_xent

        with torch.device("meta"):
            twin = type(model)(model.config).train()
        twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)  # the same parameters
        twin.model.rotary_emb = model.model.rotary_emb  # its buffers are not in the state
        if with_xent:
            use_xent(twin)
        call = torch.compile(twin) if compile_it else twin

        def step(tokens: Tensor, target: Tensor) -> Tensor:
            labels = target.view(tokens.shape).roll(1, 1)  # the model shifts them back
            value: Tensor = call(input_ids=tokens, labels=labels).loss
            return value

        return step

    return lambda: of_model


def no_head(hidden: Tensor, matrix: Tensor, target: Tensor) -> Tensor:
    return hidden.float().mean()


# Peers that need CUTLASS are excluded: quack-kernels tunes its products in the first call, for minutes.
PEERS = tuple(peer for peer in LINEAR_PEERS if not peer.also)


def steps(dtype: torch.dtype) -> list[Contestant]:
    skipping = functools.partial(linear, skip_ignored=True)
    with_pass = {head: inductor.options(linear=head) for head in (False, True)}
    find = Contestant("xent found head", "ours", whole(unfused_torch, options=with_pass[True]))
    found = [
        Contestant(BODY, "torch", whole(no_head), unit=BODY),
        Contestant("F compiled", "torch", whole(unfused_torch)),
        Contestant("xent pass", "ours", whole(unfused_torch, options=with_pass[False]), confirm=left),
        replace(find, confirm=functools.partial(left, head=True)),
        Contestant("xent compiled", "ours", whole(unfused_ours)),
        Contestant(LINEAR, "ours", whole(linear)),
        Contestant("xent skipping", "ours", whole(skipping)),
    ]
    if dtype == torch.bfloat16:
        for name, tolerances in IN_8_BITS.items():
            load = whole(functools.partial(linear, products=name))
            found.append(Contestant(f"xent {name}", "ours", load, in_8_bits=tolerances))
    for name, with_xent, kind in (("transformers", False, "torch"), ("use_xent", True, "ours")):
        for how in ("compiled", "eager"):
            found.append(Contestant(f"{name} {how}", kind, by_transformers(with_xent, how == "compiled")))
    if has_auto_chunker():
        # By default it chunks the product whose output is largest against its inputs: the head.
        chunked = whole(unfused_torch, options=AUTO_CHUNKER)
        found.append(Contestant("auto_chunker", "torch", chunked, confirm=was_chunked))
    return found + [replace(peer, load=after_body(peer.load)) for peer in installed(PEERS, "")]


def finish(rows: int, results: list[Result]) -> None:
    """Add the tokens a second, and the time of head and loss, which is the difference of two steps."""
    of_body = next((result.ms for result in results if result.variant == BODY), None)
    for result in results:
        if result.ms:
            result.more["tokens/s"] = 1e3 * rows / result.ms
            if of_body and result.variant != BODY:
                result.more["head + loss ms"] = result.ms - of_body


def tables(arguments: argparse.Namespace, setting: Setting) -> tuple[list[Table], Sequence[Peer]]:
    if setting.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"--dtype {arguments.dtype}: whole steps are in bfloat16 or float32")
    size = DEFAULTS[setting.place] | arguments.sizes
    arguments.sizes = size  # in the JSON
    name = f"{size['batch']}x{size['tokens']} tokens, {size['layers']} layers of {size['hidden']}, {size['classes']}"
    make = functools.partial(Step, size, setting.dtype, setting.device, setting.ignored)
    rows = size["batch"] * size["tokens"]
    return [Table(f"{name} classes", make, steps(setting.dtype), functools.partial(finish, rows))], PEERS
