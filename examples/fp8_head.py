"""Does a model train as well with a head of 8-bit products? Trains a GPT from several seeds with each kind of products,
and compares the losses of text that it has not seen with how far seeds are apart.

    python examples/fp8_head.py                        # on the source files of Python's standard library
    python examples/fp8_head.py --data FILE_OR_FOLDER  # on your own text

On a GPU 124 M parameters, three kinds and three seeds: ten minutes on an H100. On a CPU a small model, to try it.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_lm import GPT, progress, read_text, tokenise

import xent_ops

KINDS = {"bf16": None, "fp8_gradients": "fp8_gradients", "fp8": "fp8"}
SIZES = {
    "cpu": {"steps": 40, "batch": 4, "length": 64, "width": 64, "layers": 2, "characters": 1_000_000},
    "cuda": {"steps": 500, "batch": 32, "length": 1024, "width": 768, "layers": 12, "characters": 50_000_000},
}
LEARNING_RATE = 6e-4
HELD_OUT = 8  # batches


class Trained(NamedTuple):
    losses: list[float]  # of each step
    held_out: float
    step_ms: float  # the median, of the steps after those that compile


def loss_of(model: GPT, ids: Tensor, targets: Tensor, products: str | None) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):
        return xent_ops.linear_cross_entropy(model(ids), model.tokens.weight, targets, products=products)


def rate(step: int, steps: int) -> float:
    """A tenth of the steps upwards, then down along a cosine to a tenth."""
    warm = max(steps // 10, 1)
    return min(1.0, (step + 1) / warm) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(kind: str, seed: int, tokens: Tensor, args: argparse.Namespace) -> Trained:
    """The same seed starts from the same model and sees the same batches with every kind of products."""
    torch.manual_seed(seed)
    model = GPT(args.length, args.width, args.layers).to(tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(rate, steps=args.steps))
    step = torch.compile(loss_of, fullgraph=True)
    held_out = HELD_OUT * args.batch * args.length + 1
    seen, unseen = tokens[:-held_out], tokens[-held_out:]
    starts = torch.randint(
        len(seen) - args.length, (args.steps, args.batch, 1), generator=torch.Generator().manual_seed(seed)
    )
    windows = (starts + torch.arange(args.length + 1)).to(tokens.device)
    losses, clock = [], []
    for window in windows:
        text = seen[window]
        loss = step(model, text[:, :-1], text[:, 1:], KINDS[kind])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())  # waits for the device
        clock.append(time.perf_counter())
    parts = unseen[:-1].view(HELD_OUT, args.batch, args.length), unseen[1:].view(HELD_OUT, args.batch, args.length)
    with torch.no_grad():  # by 16-bit products, whichever it was trained with
        values = [loss_of(model, ids, targets, None).item() for ids, targets in zip(*parts, strict=True)]
    times = [1e3 * (after - before) for before, after in itertools.pairwise(clock[5:])]
    return Trained(losses, statistics.fmean(values), statistics.median(times))


def report(console: Console, runs: dict[str, list[Trained]], seeds: int) -> None:
    table = Table("held-out loss", *(f"seed {seed}" for seed in range(seeds)), "mean", "from bf16", "ms a step")
    plain = runs["bf16"]
    for kind, trained in runs.items():
        values = [run.held_out for run in trained]
        apart = statistics.fmean(run.held_out - other.held_out for run, other in zip(trained, plain, strict=True))
        cells = [f"{value:.4f}" for value in (*values, statistics.fmean(values))]
        table.add_row(
            kind,
            *cells,
            "" if trained is plain else f"{apart:+.4f}",
            f"{statistics.median(run.step_ms for run in trained):.1f}",
        )
    console.print(table)
    spread = max(run.held_out for run in plain) - min(run.held_out for run in plain)
    console.print(f"seeds of bf16 are {spread:.4f} apart; a third of that is {spread / 3:.4f}")


def draw(runs: dict[str, list[Trained]], path: Path) -> None:
    """How far training losses are from those of bf16, each a mean over seeds and twenty steps."""
    figure = Figure(figsize=(9, 4), layout="constrained")  # without pyplot, which looks for a screen
    axes = figure.subplots()
    plain = torch.tensor([run.losses for run in runs["bf16"]])
    for kind, trained in runs.items():
        apart = (torch.tensor([run.losses for run in trained]) - plain).mean(0)
        smooth = apart.unfold(0, min(20, len(apart)), 1).mean(1)
        axes.plot(range(1, 1 + len(smooth)), smooth, label=kind)
    axes.set(xlabel="step", ylabel="training loss above bf16's", title="The same seeds and batches")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file or a folder of text; else Python's standard library")
    parser.add_argument("--plot", type=Path, default=Path("fp8_head.png"), help="where the picture goes")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    for name in SIZES["cpu"]:
        values = ", ".join(f"{size[name]} on {where}" for where, size in SIZES.items())
        parser.add_argument(f"--{name}", type=int, help=values)
    args = parser.parse_args()
    for name, value in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.seeds < 1 or args.steps < 10:
        parser.error("--seeds must be at least 1 and --steps at least 10")
    if args.data and not args.data.exists():
        parser.error(f"--data {args.data} is not there")
    return args


def main() -> int:
    args = arguments()
    console = Console()
    console.print("reading text, and training a tokenizer on it")
    texts = read_text(args.data, args.characters)
    tokens = tokenise(texts).to(args.device)
    trained_on = args.steps * args.batch * args.length
    console.print(f"{len(texts)} files, {len(tokens):,} tokens; {trained_on:,} are trained on")
    if len(tokens) <= (HELD_OUT * args.batch + 2) * args.length:
        console.print(f"That is too little text: {HELD_OUT} batches are held out.")
        return 2
    runs: dict[str, list[Trained]] = {kind: [] for kind in KINDS}
    with progress(console, args.seeds * len(KINDS)) as tell:
        for seed in range(args.seeds):
            for kind in KINDS:
                tell(f"seed {seed}, {kind}", seed * len(KINDS) + sum(len(done) > seed for done in runs.values()))
                runs[kind].append(train(kind, seed, tokens, args))
    report(console, runs, args.seeds)
    draw(runs, args.plot)
    console.print(f"how far losses are apart as a picture: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
