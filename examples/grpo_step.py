"""Trains a small policy with GRPO, its loss by xent_ops.linear_token_loss: a function of each token's log-probability
and entropy. Draws the reward, and the time and peak memory of the loss beside two other ways to compute it.

    python examples/grpo_step.py   # half a minute on two cores; the mean reward goes from 1/4 to almost 1

A prompt is a digit, 0 to 3. The reward of a completion is the share of its tokens that leave this digit when they are
divided by four.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import xent_ops
from xent_ops.bench import timing

DIGITS = 4
IGNORED = -100


def grpo(stats: xent_ops.TokenLogProbs, old: Tensor, advantage: Tensor) -> Tensor:
    """The loss of each of n tokens: all arguments are (n,). Shao et al., 2024, with an entropy bonus."""
    ratio = (stats.log_probs - old).exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    return -surrogate - 1e-3 * stats.entropy


class Batch(NamedTuple):
    """Completions of a step, (sequences, length), and what the loss needs beside them."""

    prompts: Tensor  # (sequences,)
    tokens: Tensor  # IGNORED behind the end of a completion
    old: Tensor  # log-probabilities when they were sampled
    advantage: Tensor


Loss = Callable[[Tensor, nn.Linear, Batch], Tensor]  # of hidden states (sequences, length, width), the head, the batch


def by_token_loss(hidden: Tensor, head: nn.Linear, batch: Batch) -> Tensor:
    """Three products of the head's size; the forward makes the gradients, a chunk of rows at a time."""
    return xent_ops.linear_token_loss(
        hidden,
        head.weight,
        batch.tokens,
        grpo,
        rows=(batch.old, batch.advantage),
        linear_bias=head.bias,
        reduction="sum",
        divisor=(batch.tokens != IGNORED).sum(),
    )


def mean_of_tokens(stats: xent_ops.TokenLogProbs, batch: Batch) -> Tensor:
    counted = batch.tokens != IGNORED
    return torch.where(counted, grpo(stats, batch.old, batch.advantage), 0.0).sum() / counted.sum()


def by_log_probs(hidden: Tensor, head: nn.Linear, batch: Batch) -> Tensor:
    """Four products: the backward makes the logits again."""
    stats = xent_ops.linear_token_log_probs(hidden, head.weight, batch.tokens, linear_bias=head.bias)
    return mean_of_tokens(stats, batch)


def by_torch(hidden: Tensor, head: nn.Linear, batch: Batch) -> Tensor:
    """All logits, and several tensors of their size."""
    logits = head(hidden)
    log_p = logits.log_softmax(-1)
    chosen = log_p.gather(-1, batch.tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return mean_of_tokens(xent_ops.TokenLogProbs(chosen, entropy, logits.logsumexp(-1)), batch)


WAYS: dict[str, Loss] = {
    "plain torch": by_torch,
    "linear_token_log_probs": by_log_probs,
    "linear_token_loss": by_token_loss,
}


class Policy(nn.Module):
    """A GRU over the prompt and the tokens so far."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.prompts, self.tokens = nn.Embedding(DIGITS, width), nn.Embedding(vocabulary, width)
        self.gru, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, vocabulary)

    def forward(self, batch: Batch) -> Tensor:
        """The hidden state before each token of the completions."""
        before = self.tokens(batch.tokens[:, :-1].clamp(min=0))
        hidden: Tensor = self.gru(torch.cat([self.prompts(batch.prompts).unsqueeze(1), before], 1))[0]
        return hidden

    @torch.no_grad()
    def sample(self, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """(tokens, their log-probabilities)."""
        x, state = self.prompts(prompts).unsqueeze(1), None
        tokens, log_probs = [], []
        for _ in range(length):
            out, state = self.gru(x, state)
            log_p = self.head(out[:, 0]).log_softmax(-1)
            # The largest of log p plus Gumbel noise is a sample of p.
            token = (log_p - torch.empty_like(log_p).exponential_().log()).argmax(-1, keepdim=True)
            tokens.append(token)
            log_probs.append(log_p.gather(-1, token))
            x = self.tokens(token)
        return torch.cat(tokens, 1), torch.cat(log_probs, 1)


def collect(policy: Policy, args: argparse.Namespace) -> tuple[Batch, float]:
    """A batch of completions, a group of them for each prompt, and their mean reward."""
    device = args.device
    prompts = torch.randint(DIGITS, (args.prompts,), device=device).repeat_interleave(args.group)
    tokens, old = policy.sample(prompts, args.length)
    lengths = torch.randint(args.length // 2, args.length + 1, (len(prompts), 1), device=device)
    counted = torch.arange(args.length, device=device) < lengths
    right = (tokens % DIGITS == prompts.unsqueeze(1)) & counted
    reward = right.sum(1) / lengths.squeeze(1)
    groups = reward.view(-1, args.group)
    centred = groups - groups.mean(1, keepdim=True)
    advantage = (centred / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1).expand_as(tokens)
    return Batch(prompts, tokens.masked_fill(~counted, IGNORED), old, advantage), float(reward.mean())


def train_step(policy: Policy, optimizer: torch.optim.Optimizer, batch: Batch, args: argparse.Namespace) -> None:
    for _ in range(args.updates):  # after the first the ratio is not one
        by_token_loss(policy(batch), policy.head, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


class Measured(NamedTuple):
    """Forward and backward of the loss of one batch, from its hidden states."""

    loss: float
    grad_hidden: Tensor
    ms: float  # the median
    peak: int | None  # bytes


def measure(policy: Policy, batch: Batch, rounds: int) -> dict[str, Measured]:
    hidden = policy(batch).detach().requires_grad_()
    leaves, device = (hidden, *policy.head.parameters()), hidden.device

    def step(way: Loss) -> tuple[float, Tensor]:
        loss = way(hidden, policy.head, batch)
        grad_hidden, *_ = torch.autograd.grad(loss, leaves)
        return loss.item(), grad_hidden

    def milliseconds(way: Loss) -> float:
        begin = time.perf_counter()
        step(way)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return 1e3 * (time.perf_counter() - begin)

    made = {name: step(way) for name, way in WAYS.items()}
    peaks: dict[str, int | None] = dict.fromkeys(WAYS)
    if timing.measures_memory(device):
        peaks = {name: timing.peak_bytes(partial(step, way), device)[1] for name, way in WAYS.items()}
    # In turns, so that other load on the machine slows down all equally.
    times = [[milliseconds(way) for way in WAYS.values()] for _ in range(rounds)]
    medians = map(statistics.median, zip(*times, strict=True))
    return {name: Measured(*made[name], ms, peaks[name]) for name, ms in zip(WAYS, medians, strict=True)}


def report(console: Console, found: dict[str, Measured]) -> None:
    table = Table("", *(name.replace("_token", "\n_token") for name in found))  # for a terminal of 80 columns
    wanted = found["plain torch"]
    largest = wanted.grad_hidden.abs().max()
    table.add_row("loss", *(f"{way.loss:.6f}" for way in found.values()))
    differences = [(way.grad_hidden - wanted.grad_hidden).abs().max() / largest for way in found.values()]
    table.add_row("difference of gradients", *(f"{float(value):.1e}" for value in differences))
    table.add_row("forward and backward", *(f"{way.ms:,.1f} ms" for way in found.values()))
    if peaks := [way.peak / 2**20 for way in found.values() if way.peak is not None]:
        table.add_row("peak memory", *(f"{peak:,.0f} MiB" for peak in peaks))
    console.print(table)


def draw(rewards: list[float], found: dict[str, Measured], path: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")  # without pyplot, which looks for a screen
    curve, speed, memory = figure.subplots(1, 3, width_ratios=(3, 2, 2))
    curve.plot(range(1, len(rewards) + 1), rewards)
    curve.set(xlabel="step", title="mean reward", ylim=(0, 1))
    curve.grid(alpha=0.3)

    def bars(axes: Axes, title: str, values: list[float]) -> None:
        shown = axes.barh(list(found), values, color=("#888888", "#1f77b4", "#d95f02"))
        axes.bar_label(shown, fmt="{:,.0f}", padding=3)
        axes.set(title=title, xlim=(0, 1.2 * max(values)))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)

    bars(speed, "ms, forward and backward of the loss", [way.ms for way in found.values()])
    peaks = [way.peak / 2**20 for way in found.values() if way.peak is not None]
    if peaks:
        bars(memory, "MiB, its peak memory", peaks)
        memory.set_yticks([])
    else:
        memory.set_axis_off()
    figure.savefig(path, dpi=120)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """``tell(what, done)``: a bar on a terminal, elsewhere a line now and then."""
    if not console.is_terminal:
        begin = time.perf_counter()

        def line(what: str, done: int) -> None:
            if done % max(total // 10, 1) == 0:
                print(f"{time.perf_counter() - begin:4.0f} s, {done}/{total}: {what}", flush=True)

        yield line
        return
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console) as shown:
        bar = shown.add_task("", total=total)
        yield lambda what, done: shown.update(bar, description=what, completed=done)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="batches of completions")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps a batch")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a batch")
    parser.add_argument("--group", type=int, default=8, help="completions a prompt")
    parser.add_argument("--length", type=int, default=16, help="tokens a completion, at most")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--rounds", type=int, default=15, help="how often each way is timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("grpo_step.png"), help="where the picture goes")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    console = Console()
    torch.manual_seed(args.seed)
    policy = Policy(args.vocabulary, args.width).to(args.device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr, weight_decay=0.0)
    batch, first = collect(policy, args)
    train_step(policy, optimizer, batch, args)
    console.print(f"the loss of {batch.tokens.numel()} tokens, {args.vocabulary} classes, on {args.device}:")
    found = measure(policy, batch, args.rounds)
    report(console, found)
    rewards = [first]
    with progress(console, args.steps) as tell:
        for done in range(1, args.steps + 1):
            batch, reward = collect(policy, args)
            rewards.append(reward)
            tell(f"mean reward {reward:.3f}", done)
            train_step(policy, optimizer, batch, args)
    console.print(f"mean reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} after {args.steps} steps")
    draw(rewards, found, args.plot)
    console.print(f"reward, speed and memory as a picture: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
