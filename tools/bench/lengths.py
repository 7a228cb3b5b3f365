"""How long a sequence fits: the most tokens of a training step of a Llama, by the memory of a card.

A step is forward and backward of one sequence in bfloat16, with gradient checkpointing. The parameters, their gradients
and the two states of AdamW are in memory. A smaller card is this one with a limit on what torch's allocator may take.

The peak grows by as many bytes for each token, so a line through two short sequences predicts the longest one. It is
then tried, and lengths around it, until two are less than 4 % apart, of which one fits and the other does not. The time
of attention grows with the square of the length: a length that would take longer than --seconds is not tried.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xent_ops import _environment
from xent_ops.bench import report, timing
from xent_ops.bench.check import IGNORE_INDEX
from xent_ops.bench.contestants import imported

from . import model as whole
from . import peers

GIB = 2**30
FIRST = 2048  # tokens of the shortest sequence
GRAIN = 256  # lengths are multiples of it
CLOSE = 1 / 28  # a fit and a failure that are so close end the search


class Probe(NamedTuple):
    tokens: int
    peak: int | None  # bytes; None: out of memory
    seconds: float


class Found(NamedTuple):
    tokens: int
    tried: bool  # or the line's


def line(fits: list[Probe]) -> tuple[float, float]:
    """(bytes of no token, bytes of each token), from the two longest."""
    (x, y, _), (x2, y2, _) = sorted(fits)[-2:]
    assert y is not None and y2 is not None
    slope = (y2 - y) / (x2 - x)
    return y - slope * x, slope


def longest(probe: Callable[[int], Probe], fits: list[Probe], limit: float, seconds: float) -> Found:
    """The most tokens within ``limit`` bytes. ``fits``: at least two probes, to which it adds its own that fit."""

    def rounded(tokens: float) -> int:
        return max(int(tokens) // GRAIN * GRAIN, GRAIN)

    low, high, failures = max((one.tokens for one in fits if (one.peak or 0) <= limit), default=0), 0, 0
    while not high or high - low > max(CLOSE * low, GRAIN):
        base, slope = line(fits)
        predicted, last = rounded((limit - base) / slope), max(fits)
        guess = predicted
        if high and not low < guess < high:  # memory in pieces: less fits than the line says
            guess = max(rounded(high * (1 - CLOSE * 2**failures)), rounded((low + high) / 2))
        elif guess <= low:
            guess = rounded((1 + CLOSE) * low) + GRAIN
        if last.seconds * (guess / last.tokens) ** 2 > seconds:
            guess = 2 * last.tokens  # a shorter one tells how long it would take
            if guess >= predicted or 4 * last.seconds > seconds:
                return Found(predicted, False)
        found = probe(guess)
        if found.peak is not None:
            fits.append(found)
            low = guess
        elif guess == GRAIN:
            return Found(0, True)
        else:
            high, failures = guess, failures + 1
    return Found(low, True)


def following(tokens: Tensor) -> Tensor:
    target = tokens.flatten().roll(-1)
    target[-1] = IGNORE_INDEX
    return target


def untouched(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(input_ids=tokens, labels=tokens, use_cache=False).loss


def with_xent(model: Any) -> Callable[[Tensor], Tensor]:
    from xent_ops.integrations.transformers import use_xent

    use_xent(model)
    return untouched(model)


def trl(model: Any) -> Callable[[Tensor], Tensor]:
    head, hidden = peers.trl_log_probs(entropy=False), whole.body(model)

    def step(tokens: Tensor) -> Tensor:
        target = following(tokens)
        log_probs, _ = head(hidden(tokens), model.lm_head.weight, target)
        return -torch.where(target == IGNORE_INDEX, 0.0, log_probs).sum() / (tokens.numel() - 1)

    return step


def liger(model: Any) -> Callable[[Tensor], Tensor]:
    loss = imported("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy")()
    hidden = whole.body(model)
    return lambda tokens: loss(hidden(tokens), model.lm_head.weight, following(tokens))


WAYS = {"untouched": untouched, "TRL": trl, "liger-kernel": liger, "use_xent": with_xent}


def probe(step: Callable[[Tensor], Tensor], model: Any, device: torch.device, tokens: int) -> Probe:
    """Forward and backward of so many tokens."""
    generator = torch.Generator(device).manual_seed(tokens)
    batch = torch.randint(model.config.vocab_size, (1, tokens), generator=generator, device=device)
    model.zero_grad()
    timing.collect(device)
    torch.cuda.reset_peak_memory_stats(device)
    start, peak = time.perf_counter(), None
    try:
        step(batch).backward()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    except torch.OutOfMemoryError:
        pass  # the tensors that its traceback holds are freed with it
    seconds = time.perf_counter() - start
    model.zero_grad()
    timing.collect(device)
    return Probe(tokens, peak, seconds)


def make(size: dict[str, int], device: torch.device) -> Any:
    """The model with the states of an optimizer that has taken a step."""
    with torch.device(device):
        model = whole.llama(size).to(torch.bfloat16).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), fused=device.type == "cuda")
    untouched(model)(torch.zeros(1, 64, dtype=torch.int64, device=device)).backward()
    optimizer.step()
    model.states = optimizer.state  # kept
    return model


def measured(way: Any, model: Any, device: torch.device, memory: list[float], seconds: float) -> dict[str, str]:
    """A line of the table."""
    total = torch.cuda.get_device_properties(device).total_memory
    run = functools.partial(probe, way(model), model, device)
    run(GRAIN)  # what is compiled or loaded once
    fits = [run(FIRST), run(2 * FIRST)]
    base, slope = line(fits)
    row = {"MiB of no token": f"{base / 2**20:.0f}", "KiB a token": f"{slope / 2**10:.1f}"}
    for gib in sorted(memory):
        limit = min(gib * GIB, total)
        torch.cuda.set_per_process_memory_fraction(limit / total, device)
        found = longest(run, fits, limit, seconds)
        row[f"{gib:g} GiB"] = f"{'' if found.tried else '~'}{found.tokens}"
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    longest_fit = max(fits)
    row |= {"longest run": str(longest_fit.tokens), "its s": f"{longest_fit.seconds:.1f}"}
    return row | {"its peak, MiB": f"{(longest_fit.peak or 0) / 2**20:.0f}"}


def main(arguments: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        arguments.parser.error("lengths needs a GPU, whose memory torch counts")
    device, failed, tables = torch.device("cuda", torch.cuda.current_device()), False, {}
    versions = _environment.versions() | {"transformers": importlib.metadata.version("transformers")}
    print(torch.cuda.get_device_name(device), *(f"{name} {versions[name]}" for name in ("torch", "transformers")), "\n")
    for classes in arguments.classes:
        size = whole.DEFAULTS["cuda"] | arguments.sizes | {"batch": 1, "classes": classes}
        model = make(size, device)
        parameters = sum(weight.numel() for weight in model.parameters())
        title = (
            f"{parameters / 1e9:.2f} B parameters, {classes} classes, bfloat16, gradient checkpointing, AdamW's states"
        )
        rows = []
        for name, way in WAYS.items():  # use_xent last: it changes the model
            row = {"variant": name}
            try:
                row |= measured(way, model, device, arguments.memory, arguments.seconds) | {"status": "ok"}
            except Exception as error:
                row["status"] = f"{'NOT RUN' if isinstance(error, ImportError) else 'ERROR'}; {timing.reason(error)}"
                failed |= name in ("untouched", "use_xent")
            rows.append(row)
        print(f"{title}\n\n{report.as_markdown(rows)}", flush=True)
        tables[title] = rows
        del model
        timing.collect(device)
    print("~ by the line: it was not tried, for it would take too long\n")
    if arguments.json:
        arguments.json.write_text(json.dumps({"versions": versions, "tables": tables}, indent=2) + "\n")
    return int(failed)
