"""A picture of a run: lines over the vocabulary where at least three sizes were timed, bars where fewer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .measure import Result
from .problems import Shape

MISSING = "--plot needs matplotlib, which is not installed: pip install 'xent-ops[bench]'"
TRAFFIC_LIMIT = 1.5  # copies: two reads by the forward and backward, and one write

_COLOURS = {
    "ours": ("#d62728", "#ff7f0e", "#8c1d1d", "#e377c2", "#b8860b"),
    "torch": ("#555555", "#000000", "#888888", "#aaaaaa", "#666666", "#bbbbbb"),
    "peer": ("#1f77b4", "#2ca02c", "#9467bd", "#17becf", "#bcbd22"),
}
_MARKERS = {"ours": "o", "torch": "s", "peer": "^"}


def draw(path: Path, results: Sequence[Result], title: str, step: int | None) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    timed = [result for result in results if result.copies is not None]
    variants = list(dict.fromkeys((result.variant, result.kind) for result in results))
    shapes = list(dict.fromkeys(result.shape for result in results))
    copies: dict[tuple[str, Shape], float] = {
        (result.variant, result.shape): result.copies for result in timed if result.copies is not None
    }
    colours: dict[str, str] = {}
    for kind, palette in _COLOURS.items():
        names = [name for name, its in variants if its == kind]
        colours.update({name: palette[index % len(palette)] for index, name in enumerate(names)})
    sweep = len({shape.classes for shape in shapes}) == len(shapes) >= 3

    width = 9.0 if sweep else max(7.0, 2.0 + 0.22 * len(variants) * len(shapes))
    figure, axes = plt.subplots(figsize=(min(width, 24.0), 5.0), layout="constrained")
    if sweep:
        ordered = sorted(shapes, key=lambda shape: shape.classes)
        for name, kind in variants:
            points = [(shape.classes, copies[name, shape]) for shape in ordered if (name, shape) in copies]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    label=name,
                    color=colours[name],
                    marker=_MARKERS[kind],
                    linewidth=2.2 if kind == "ours" else 1.2,
                    linestyle="-" if kind == "ours" else "--",
                )
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xscale("log", base=2)
        axes.set_xticks([shape.classes for shape in ordered], [str(shape) for shape in ordered], rotation=30)
        axes.minorticks_off()
        axes.set_xlabel("rows x classes, by the number of classes")
    else:
        bar = 0.8 / max(len(variants), 1)
        for index, (name, _) in enumerate(variants):
            places = [place + index * bar for place, shape in enumerate(shapes) if (name, shape) in copies]
            heights = [copies[name, shape] for shape in shapes if (name, shape) in copies]
            if heights:
                bars = axes.bar(places, heights, bar * 0.9, label=name, color=colours[name])
                axes.bar_label(bars, fmt="%.2f", rotation=90, fontsize=7, padding=2)
        middle = (len(variants) - 1) * bar / 2
        axes.set_xticks([place + middle for place in range(len(shapes))], [str(shape) for shape in shapes])
        axes.set_xlabel("rows x classes")
        axes.margins(y=0.15)
    if step is None:
        axes.axhline(TRAFFIC_LIMIT, color="black", linewidth=0.9, linestyle=":", label="2 reads + 1 write")
        axes.set_ylabel("forward + backward, in copies of the logits")
    else:
        axes.set_ylabel(f"step of hidden size {step}, in copies of the logits")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", alpha=0.3)
    if timed:
        figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
