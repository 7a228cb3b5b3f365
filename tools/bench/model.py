"""Whole training steps of a Llama of transformers, compiled by layers. They show the effect of the loss on training.

A step is the forward, and the backward to all weights' gradients. It has no optimizer, which would be the same for all.

Compiled as a whole, transformers cannot see that no sequence is packed or padded, and gives attention a mask. Attention
then takes three times as long: 124 ms for 40 of the 280 of a body (H200, torch 2.11, transformers 5.17, 2026-11-29).
Between compiled layers the mask is made in eager, and attention stays causal.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xent_ops import inductor
from xent_ops.bench import check
from xent_ops.bench.arguments import Shape
from xent_ops.bench.check import Options
from xent_ops.bench.contestants import Contestant, Function, Load, Outputs, compiled, linear, partial, unfused_torch
from xent_ops.bench.measure import Result
from xent_ops.bench.problems import Expected, Head, Setting
from xent_ops.bench.run import Table

from .heads import AUTO_CHUNKER, IN_8_BITS, has_auto_chunker, peers, unfused_ours, was_chunked
from .losses import left

BODY = "body alone"
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
    found = {key: int(value) for key, value in (part.split("=") for part in text.split(",") if part)}
    if not set(found) <= set(KEYS) or any(value < 1 for value in found.values()):
        raise ValueError
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


class Step(Head):
    """Random tokens. The targets are the next tokens, and the last position of each sequence is ignored.

    ``ignored``: the fraction of ignored positions, the last ones and random ones; None ignores only the last ones.
    A contestant is a function of (model, tokens (B, S), targets) that returns the loss.

    The reference is the eager body, and head and loss of its hidden states in float64. A body in float64 would show
    only the body's own rounding, which is the same for all. A compiled body rounds less often than an eager one, and
    the noise grows with the layers: in bfloat16 these gradients differed by 0.7 % with 2 layers of 64 and by 1.1 % with
    8 of 256, and float64 was as far from either. The tolerance is about four times that: four roundings, and more with
    depth.
    """

    unit = BODY

    def __init__(self, size: dict[str, int], setting: Setting) -> None:
        batch, length, classes = size["batch"], size["tokens"], size["classes"]
        super().__init__(Shape(batch * length, classes), size["hidden"], setting)
        self.slack = self.loss_slack = math.sqrt(1 + size["layers"] / 8)
        with torch.device(self.device):
            self.model = llama(size).to(self.dtype).train()
        self.tokens = torch.randint(classes, (batch, length), generator=self.generator, device=self.device)
        following = self.tokens.roll(-1, 1)
        following[:, -1] = check.IGNORE_INDEX
        if self.ignored is not None:
            order = torch.rand((batch, length), generator=self.generator, device=self.device)
            order[:, -1] = -1.0
            ignored = order.flatten().argsort()[: round(self.ignored * batch * length)]
            following.view(-1)[ignored] = check.IGNORE_INDEX
        self.targets = (following.flatten(),) * 2
        self.target = self.targets[0].clone()
        self.matrix = self.model.lm_head.weight
        self.early = self.model.model.layers[0].self_attn.q_proj.weight  # its gradient needs the whole backward
        checked = (self.early, self.matrix)
        others = (weight for weight in self.model.parameters() if not any(weight is other for other in checked))
        self.inputs = (*checked, *others)

    def restore(self) -> None:
        for parameter in self.inputs:
            parameter.grad = None

    def bind(self, contestant: Contestant) -> Callable[[], Outputs]:
        """A step leaves its gradients with the parameters, as in training."""
        self.expected({})
        step = contestant.load()(self.model)

        def run() -> Outputs:
            self.restore()
            loss = step(self.tokens, self.target)
            loss.backward()
            grads = (parameter.grad for parameter in self.inputs)
            return Outputs(loss.detach(), tuple(grad for grad in grads if grad is not None))

        return run

    def check(self, outputs: Outputs, contestant: Contestant) -> check.Errors:
        """The gradients of an early weight and of the head, in the 2-norm."""
        loss_limit, limit = self.limits(outputs, contestant)
        if len(outputs.grads) != len(self.inputs):
            return {"gradients": (math.inf, limit)}
        loss, early, matrix = self.expected({})
        return {
            "loss": (check.loss_error(outputs.loss, loss), loss_limit),
            "head": (check.norm_error(outputs.grads[1], matrix), limit),
            "early weight": (check.norm_error(outputs.grads[0], early), limit),
        }

    def expected(self, options: Options) -> Expected:
        """With the gradient of an early weight in place of that of the hidden states."""
        if not self._expected:
            hidden = body(self.model)(self.tokens)
            self.hidden = hidden.detach()
            loss, grad, matrix = super().expected(options)
            hidden.backward(grad.to(hidden.dtype))
            self._expected = dict.fromkeys(self._expected, Expected(loss, self.early.grad.double(), matrix))
            self.restore()
        (found,) = self._expected.values()
        return found

    def finish(self, results: list[Result]) -> None:
        """Add the tokens a second, and the time of head and loss, which is the difference of two steps."""
        body_ms = next((result.ms for result in results if result.variant == BODY), None)
        for result in results:
            if result.ms:
                result.more["tokens/s"] = 1e3 * self.shape.rows / result.ms
                if body_ms and result.variant != BODY:
                    result.more["head + loss ms"] = result.ms - body_ms


def body(model: Any) -> Callable[[Tensor], Tensor]:
    """The model's body: tokens to the hidden states of rows."""
    return lambda tokens: model.model(input_ids=tokens, use_cache=False).last_hidden_state.flatten(0, 1)


# A contestant's function takes the model and returns the step. The model is the last argument of these.


def by_layers(model: Any) -> Any:
    """The model, with each layer and the last norm compiled. What is between them, the causal mask too, is eager."""
    for module in (*model.model.layers, model.model.norm):
        if module._compiled_call_impl is None:  # another contestant of the same model was here
            module.compile(fullgraph=True)
    return model


def step_of(load: Load, model: Any) -> Function:
    """The body by layers, and the loss of its hidden states as one more function."""
    loss, hidden = load(), body(by_layers(model))
    return lambda tokens, target: loss(hidden(tokens), model.lm_head.weight, target)


def at_once(loss: Function, model: Any) -> Function:
    """Compile body, head and loss together."""
    hidden, matrix = body(twin_of(model)), model.lm_head.weight
    return compiled(lambda: lambda tokens, target: loss(hidden(tokens), matrix, target))()


def twin_of(model: Any) -> Any:
    """Another model with the same parameters, of which nothing is compiled."""
    with torch.device("meta"):
        twin = type(model)(model.config).train()
    twin.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    twin.model.rotary_emb = model.model.rotary_emb  # its buffers are not in the state
    return twin


def by_transformers(with_xent: bool, layers: bool, compiled_loss: bool, model: Any) -> Function:
    """The model's own call with labels, with ``use_xent`` or untouched."""
    from xent_ops.integrations.transformers import use_xent

    twin = by_layers(twin_of(model)) if layers else twin_of(model)
    if with_xent:
        use_xent(twin)
    if compiled_loss:
        twin.loss_function = torch.compile(twin.loss_function)
    # The model shifts the labels back.
    return lambda tokens, target: twin(input_ids=tokens, labels=target.view(tokens.shape).roll(1, 1)).loss


def steps(dtype: torch.dtype) -> list[Contestant]:
    def step(loss: Function, **options: Any) -> Load:
        return partial(step_of, compiled(lambda: loss, **options))

    with_pass = {head: step(unfused_torch, options=inductor.options(linear=head)) for head in (False, True)}
    known = [
        Contestant(BODY, "unit", step(lambda hidden, matrix, target: hidden.float().mean())),
        Contestant("F compiled", "torch", step(unfused_torch)),
        Contestant("F as a whole", "torch", partial(at_once, unfused_torch)),
        Contestant("xent pass", "ours", with_pass[False], confirm=left),
        Contestant("xent found head", "ours", with_pass[True], confirm=lambda: left(head=True)),
        Contestant("xent compiled", "ours", step(unfused_ours)),
        Contestant("xent linear", "ours", step(linear)),
        Contestant("xent skipping", "ours", step(partial(linear, skip_ignored=True)())),
    ]
    for name, tolerances in IN_8_BITS.items() if dtype == torch.bfloat16 else ():
        known.append(Contestant(f"xent {name}", "ours", step(partial(linear, products=name)()), in_8_bits=tolerances))
    known += [
        Contestant("transformers eager", "torch", partial(by_transformers, False, False, False)),
        Contestant("transformers layers", "torch", partial(by_transformers, False, True, False)),
        Contestant("transformers layers and loss", "torch", partial(by_transformers, False, True, True)),
        Contestant("use_xent eager", "ours", partial(by_transformers, True, False, False)),
        Contestant("use_xent layers", "ours", partial(by_transformers, True, True, False)),
    ]
    if has_auto_chunker():
        # By default it chunks the product whose output is largest against its inputs: the head.
        known.append(
            Contestant("auto_chunker", "torch", step(unfused_torch, options=AUTO_CHUNKER), confirm=was_chunked)
        )
    # Peers that need CUTLASS are excluded: quack-kernels tunes its products in the first call, for minutes.
    others = [one for one in peers() if "cutlass" not in one.needs]
    return known + [replace(peer, load=partial(step_of, peer.load)) for peer in others]


def tables(arguments: argparse.Namespace, setting: Setting) -> list[Table]:
    if setting.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"--dtype {arguments.dtype}: whole steps are in bfloat16 or float32")
    size = DEFAULTS["cpu" if setting.device.type == "cpu" else "cuda"] | arguments.sizes
    name = ", ".join(f"{key}={value}" for key, value in size.items())
    return [Table(name, lambda: Step(size, setting), steps(setting.dtype))]
