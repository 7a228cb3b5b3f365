"""Trains a small GPT with torch.compile(fullgraph=True) three times, with F.cross_entropy, xent_ops.cross_entropy and
xent_ops.linear_cross_entropy, from the same seed on the same batches. Reports losses and their difference, speed, peak
memory and graph breaks, and draws them.

    python examples/train_lm.py                        # on the source files of Python's standard library
    python examples/train_lm.py --data FILE_OR_FOLDER  # on your own text
"""

import argparse
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Column, Table
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor, nn

import xent_ops
from xent_ops.bench import timing

VOCABULARY = 32768
CHARACTERS = 5_000_000  # the demo reads no more text: the tokenizer's training would take longer than the model's
CHUNK = 10  # steps between two readings of the clock and the loss, which wait for the device

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden states, the weight of the head, targets


def of_logits(function: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)  # (batch, length, vocabulary)
        return function(logits.view(-1, VOCABULARY), targets.reshape(-1))

    return loss


TORCH = "F.cross_entropy"
LOSSES: dict[str, Loss] = {
    TORCH: of_logits(F.cross_entropy),
    "xent_ops.cross_entropy": of_logits(xent_ops.cross_entropy),
    "xent_ops.linear_cross_entropy": xent_ops.linear_cross_entropy,  # head and loss as one, by chunks of rows
}

SIZES = {
    "cpu": {"steps": 60, "batch": 8, "length": 128, "width": 128, "layers": 2, "lr": 1e-3},
    "cuda": {"steps": 500, "batch": 32, "length": 512, "width": 512, "layers": 8, "lr": 1e-3},
}


def read_text(source: Path | None, characters: int = CHARACTERS) -> list[str]:
    """So much text of a file, of every UTF-8 file in a folder, or of the standard library."""
    if source is None:
        # Without tests and data tables, which some systems leave out, and without installed packages.
        skip = {"test", "tests", "encodings", "idlelib", "lib2to3", "pydoc_data"}
        skip |= {"site-packages", "dist-packages"}
        root = Path(sysconfig.get_path("stdlib"))
        files = [path for path in root.rglob("*.py") if not skip & {*path.relative_to(root).parts}]
    elif source.is_file():
        files = [source]
    else:
        files = [path for path in source.rglob("*") if path.is_file()]
    texts: list[str] = []
    left = characters
    for path in sorted(files):
        try:
            texts.append(path.read_text(encoding="utf-8")[:left])
        except UnicodeDecodeError:
            continue  # not text
        left -= len(texts[-1])
        if left <= 0:
            break
    return texts


def tokenise(texts: list[str]) -> Tensor:
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=VOCABULARY, show_progress=False)
    return torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads=width // 32) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """The hidden states before the head, whose weight is that of the embedding."""
        return self.norm(self.blocks(self.tokens(ids) + self.positions))


def loss_of(model: GPT, loss_function: Loss, ids: Tensor, targets: Tensor) -> Tensor:
    """The one compiled function: the model, its head, the loss; backward is compiled from it."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        return loss_function(model(ids), model.tokens.weight, targets)


def graph_breaks(loss_function: Loss, device: str) -> int:
    """Dynamo's count of breaks in a model of one layer, without fullgraph=True, which would raise."""
    model = GPT(length=16, width=32, layers=1).to(device)
    ids = torch.zeros(2, 16, dtype=torch.long, device=device)
    return torch._dynamo.explain(loss_of)(model, loss_function, ids, ids).graph_break_count


class Run:
    """One model in training, with its measurements."""

    def __init__(self, loss_function: Loss, tokens: Tensor, windows: Tensor, args: argparse.Namespace) -> None:
        self.loss_function, self.tokens, self.windows = loss_function, tokens, windows
        self.losses: list[float] = []  # one a step
        self.seconds: list[float] = []  # one a chunk; compilation is in the first
        if tokens.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        torch.manual_seed(args.seed)
        self.model = GPT(args.length, args.width, args.layers).to(tokens.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, fused=True)
        self.step = torch.compile(loss_of, fullgraph=True, mode="reduce-overhead" if tokens.is_cuda else None)
        self.peak_memory: int | None = None
        self.train_chunk(measure_last=timing.measures_memory(tokens.device) and not tokens.is_cuda)
        if tokens.is_cuda:
            # CUDA graphs take all their memory while they are captured: later steps only replay them.
            self.peak_memory = torch.cuda.max_memory_allocated() - before

    def train_step(self, window: Tensor) -> Tensor:
        text = self.tokens[window]
        loss = self.step(self.model, self.loss_function, text[:, :-1], text[:, 1:])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach().clone()  # a CUDA graph writes its next loss over this one

    def train_chunk(self, measure_last: bool = False) -> None:
        windows = self.windows[len(self.losses) :][:CHUNK]
        begin = time.perf_counter()
        losses = [self.train_step(window) for window in windows[: CHUNK - measure_last]]
        if measure_last:  # when all that stays, the optimizer's state too, is there
            last, self.peak_memory = timing.peak_bytes(lambda: self.train_step(windows[-1]), windows.device)
            losses.append(last)
        self.losses += torch.stack(losses).tolist()  # waits for the device
        self.seconds.append(time.perf_counter() - begin)

    @property
    def recent_loss(self) -> float:
        return statistics.fmean(self.losses[-CHUNK:])


def difference(run: Run, other: Run) -> list[float]:
    return [abs(loss - wanted) for loss, wanted in zip(run.losses, other.losses, strict=True)]


def tokens_per_second(run: Run, args: argparse.Namespace) -> float:
    """The median: a busy machine slows down some chunks, and the first one compiles."""
    return CHUNK * args.batch * args.length / statistics.median(run.seconds[1:])


def in_two_lines(name: str) -> str:
    """Three full names are wider than a terminal of 80 columns."""
    return name.replace("xent_ops.", "xent_ops.\n")


def memory_is_of(device: str) -> str:
    return "peak memory with the model" if device == "cuda" else "peak memory of a step"


def draw(runs: dict[str, Run], args: argparse.Namespace) -> None:
    figure = Figure(figsize=(11, 6), layout="constrained")  # without pyplot, which looks for a screen
    (curves, speed), (differences, memory) = figure.subplots(2, 2, width_ratios=(3, 2), height_ratios=(3, 2))
    colors = dict(zip(runs, ("#888888", "#1f77b4", "#d95f02"), strict=True))
    steps = range(1, args.steps + 1)
    for (name, run), style, width in zip(runs.items(), ("-", "--", ":"), (4, 2, 2), strict=True):
        curves.plot(steps, run.losses, style, color=colors[name], linewidth=width, label=name)
        if name != TORCH:
            differences.plot(steps, difference(run, runs[TORCH]), color=colors[name], linewidth=1, label=name)
    curves.set(ylabel="loss", title="The same model, seed and batches: the same losses")
    curves.legend()
    differences.set(xlabel="step", ylabel="|difference|", title=f"Difference from {TORCH}")
    differences.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (curves, differences):
        axes.grid(alpha=0.3)

    def bars(axes: Axes, title: str, values: dict[str, float]) -> None:
        shown = axes.barh(list(values), list(values.values()), color=[colors[name] for name in values])
        axes.bar_label(shown, fmt="{:,.0f}", padding=3)
        axes.set(title=title, xlim=(0, 1.2 * max(values.values())))
        axes.set_yticks(range(len(values)), map(in_two_lines, values))
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)

    bars(speed, "tokens/s", {name: tokens_per_second(run, args) for name, run in runs.items()})
    peaks = {name: run.peak_memory / 2**20 for name, run in runs.items() if run.peak_memory is not None}
    if peaks:
        bars(memory, f"MiB, {memory_is_of(args.device)}", peaks)
    else:
        memory.set_axis_off()
    figure.savefig(args.plot, dpi=120)


def report(console: Console, runs: dict[str, Run], breaks: dict[str, int], args: argparse.Namespace) -> None:
    table = Table("", *(Column(in_two_lines(name), no_wrap=True) for name in runs))

    def row(title: str, text: Callable[[Run], str]) -> None:
        table.add_row(title, *map(text, runs.values()))

    row("first loss", lambda run: f"{run.losses[0]:.4f}")
    row(f"final loss (mean of {CHUNK} steps)", lambda run: f"{run.recent_loss:.4f}")
    row("largest difference of a loss", lambda run: f"{max(difference(run, runs[TORCH])):.1e}")
    row("tokens/s", lambda run: f"{tokens_per_second(run, args):,.0f}")
    if runs[TORCH].peak_memory is not None:
        row(memory_is_of(args.device), lambda run: f"{run.peak_memory / 2**20:,.0f} MiB")
    table.add_row("graph breaks", *(str(breaks[name]) for name in runs))
    console.print(table)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    """``tell(what, done)``: a bar on a terminal, elsewhere a line."""
    if not console.is_terminal:
        begin = time.perf_counter()

        def line(what: str, done: int) -> None:
            print(f"{time.perf_counter() - begin:4.0f} s, {done}/{total}: {what}", flush=True)

        yield line
        return
    columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=console) as shown:
        bar = shown.add_task("", total=total)
        yield lambda what, done: shown.update(bar, description=what, completed=done)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a file or a folder of text; else Python's standard library")
    parser.add_argument("--plot", type=Path, default=Path("train_lm.png"), help="where the picture goes")
    parser.add_argument("--device", choices=SIZES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    for name in SIZES["cpu"]:
        values = ", ".join(f"{size[name]} on {where}" for where, size in SIZES.items())
        parser.add_argument(f"--{name}", type=type(SIZES["cpu"][name]), help=values)
    args = parser.parse_args()
    for name, value in SIZES[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.steps % CHUNK or args.steps < 2 * CHUNK:
        parser.error(f"--steps must be a multiple of {CHUNK} and at least {2 * CHUNK}, not {args.steps}")
    if args.data and not args.data.exists():
        parser.error(f"--data {args.data} is not there")
    return args


def main() -> int:
    args = arguments()
    console = Console()
    console.print("reading text, and training a tokenizer on it")
    texts = read_text(args.data)
    tokens = tokenise(texts).to(args.device)
    console.print(f"{len(texts)} files, {sum(map(len, texts)):,} characters, {len(tokens):,} tokens")
    if len(tokens) <= args.length:
        console.print(f"That is too little text: one sample takes {args.length + 1} tokens.")
        return 2

    starts = torch.randint(
        len(tokens) - args.length,
        (args.steps, args.batch, 1),
        generator=torch.Generator().manual_seed(args.seed),
    )
    windows = (starts + torch.arange(args.length + 1)).to(args.device)  # the same batches for all

    breaks = {name: graph_breaks(function, args.device) for name, function in LOSSES.items()}
    if any(breaks.values()):
        console.print(f"graph breaks, of which there must be none: {breaks}")
        return 1

    with progress(console, args.steps * len(LOSSES)) as tell:
        runs: dict[str, Run] = {}
        for name, function in LOSSES.items():
            tell(f"compiling, and the first {CHUNK} steps, with {name}", CHUNK * len(runs))
            runs[name] = Run(function, tokens, windows, args)
        # In turns, so that other load on the machine slows down all equally.
        with torch._dynamo.config.patch(error_on_recompile=True):
            for done in range(CHUNK, args.steps, CHUNK):
                values = ", ".join(f"{run.recent_loss:.3f}" for run in runs.values())
                tell(f"training, losses {values}", done * len(runs))
                for run in runs.values():
                    run.train_chunk()

    report(console, runs, breaks, args)
    draw(runs, args)
    console.print(f"losses, speed and memory as a picture: {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
