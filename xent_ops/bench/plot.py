"""A picture of a run: lines over the vocabulary where at least three sizes were timed, bars where fewer.

Times above; below, where it was measured, the peak memory as bars. Unsteady times have a hollow marker or a hatched
bar.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .measure import Result
from .sizes import HeadShape, ModelShape, Shape

MISSING = "--plot needs matplotlib, which is not installed: pip install matplotlib"
FORMATS = (".png", ".pdf", ".svg")

_AnyShape = Shape | HeadShape | ModelShape
_Values = Mapping[tuple[str, _AnyShape], float]
_Unsteady = Collection[tuple[str, _AnyShape]]


@dataclass(frozen=True)
class Figures:
    """Which fields of a result are drawn, and what they are."""

    times: str
    times_label: str
    memory: str
    memory_label: str
    limit: tuple[float, str] | None = None  # a line across the times
    memory_format: str = "%.2f"
    times_format: str = "%.2f"


def of_loss(step: int | None) -> Figures:
    what = "forward + backward" if step is None else f"step of hidden size {step}"
    # 1.5 copies: two reads by the forward and backward, and one write.
    limit = (1.5, "2 reads + 1 write") if step is None else None
    return Figures(
        "copies", f"{what}, in copies of the logits", "peak_logits", "peak memory beyond the inputs, in logits", limit
    )


OF_LINEAR = Figures(
    "ratio",
    "forward + backward, in times of the three products",
    "peak_mib",
    "peak memory beyond the inputs, MiB",
    (1.0, "the products alone"),
    "%.0f",
)

_COLOURS = {
    "ours": ("#d62728", "#ff7f0e", "#8c1d1d", "#e377c2", "#b8860b", "#c71585", "#ffb07c", "#5c3317"),
    "torch": ("#555555", "#000000", "#888888", "#aaaaaa", "#6a7b8c", "#c0c0c0"),
    "peer": ("#1f77b4", "#2ca02c", "#9467bd", "#17becf", "#bcbd22"),
}
_MARKERS = {"ours": "o", "torch": "s", "peer": "^"}
_LINES = {"ours": "-", "torch": "--", "peer": "--"}
_AGAIN = (":", "-.")  # the lines of those for whom no colour is left
_UNSTEADY = "///"


def title(environment: Mapping[str, Any], dtype: str) -> str:
    return f"{environment.get('gpu') or environment['cpu']}, {dtype}, torch {environment['torch']}"


def _styles(variants: Sequence[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """No two alike."""
    styles = {}
    for kind, palette in _COLOURS.items():
        lines = (_LINES[kind], *_AGAIN)
        for index, name in enumerate(name for name, its in variants if its == kind):
            round_, colour = divmod(index, len(palette))
            styles[name] = {
                "color": palette[colour],
                "marker": _MARKERS[kind],
                "linewidth": 2.2 if kind == "ours" else 1.2,
                "linestyle": lines[round_ % len(lines)],
            }
    return styles


def _lines(
    axes: Any,
    shapes: Sequence[_AnyShape],
    styles: Mapping[str, dict[str, Any]],
    values: _Values,
    label: str,
    unsteady: _Unsteady,
) -> None:
    for name, style in styles.items():
        points = [(shape.classes, values[name, shape]) for shape in shapes if (name, shape) in values]
        if points:
            axes.plot(*zip(*points, strict=True), label=name, **style)
        hollow = [(shape.classes, values[name, shape]) for shape in shapes if (name, shape) in unsteady]
        if hollow:
            look = {**style, "linestyle": "none", "markerfacecolor": "white", "zorder": 3}
            axes.plot(*zip(*hollow, strict=True), **look)
    axes.set_xscale("log", base=2)
    axes.set_xticks([shape.classes for shape in shapes], [str(shape) for shape in shapes], rotation=30, ha="right")
    axes.minorticks_off()
    axes.set_xlabel(f"{_axis(shapes)}, by the number of classes")


def _bars(
    axes: Any,
    shapes: Sequence[_AnyShape],
    styles: Mapping[str, dict[str, Any]],
    values: _Values,
    label: str,
    unsteady: _Unsteady = (),
) -> None:
    width = 0.8 / max(len(styles), 1)
    for index, (name, style) in enumerate(styles.items()):
        places = [place + index * width for place, shape in enumerate(shapes) if (name, shape) in values]
        heights = [values[name, shape] for shape in shapes if (name, shape) in values]
        doubted = [(name, shape) in unsteady for shape in shapes if (name, shape) in values]
        if heights:
            bars = axes.bar(places, heights, width * 0.9, label=name, color=style["color"])
            for bar in itertools.compress(bars, doubted):
                bar.set(hatch=_UNSTEADY, edgecolor="white")
            texts = ["~" * doubt + label % height for height, doubt in zip(heights, doubted, strict=True)]
            axes.bar_label(bars, texts, rotation=90, fontsize=7 if len(shapes) < 4 else 5, padding=2)
    middle = (len(styles) - 1) * width / 2
    axes.set_xticks([place + middle for place in range(len(shapes))], [str(shape) for shape in shapes])
    axes.set_xlabel(_axis(shapes))
    axes.margins(y=0.15)


def _axis(shapes: Sequence[_AnyShape]) -> str:
    return " x ".join(shapes[0]._fields)


def draw(path: Path, results: Sequence[Result], title: str, figures: Figures) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import lines, patches
    from matplotlib import pyplot as plt

    variants = list(dict.fromkeys((result.variant, result.kind) for result in results))
    shapes = list(dict.fromkeys(result.shape for result in results))
    styles = _styles(variants)

    def values(name: str) -> _Values:
        found = {(result.variant, result.shape): getattr(result, name) for result in results}
        return {key: value for key, value in found.items() if value is not None}

    copies, peaks = values(figures.times), values(figures.memory)
    unsteady = {
        (result.variant, result.shape)
        for result in results
        if figures.times in result.unsteady and (result.variant, result.shape) in copies
    }
    sweep = len({shape.classes for shape in shapes}) == len(shapes) >= 3
    width = 9.0 if sweep else max(7.0, 2.0 + 0.22 * len(variants) * len(shapes))
    panels = 2 if peaks else 1
    figure, grid = plt.subplots(
        panels, 1, figsize=(min(width, 24.0), 1.0 + 4.0 * panels), layout="constrained", squeeze=False
    )
    times, *memory = grid[:, 0]
    if sweep:
        shapes.sort(key=lambda shape: shape.classes)
    show = _lines if sweep else _bars
    show(times, shapes, styles, copies, figures.times_format, unsteady)
    if sweep:
        times.set_yscale("log", base=2)
        times.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if figures.limit is not None:
        height, text = figures.limit
        times.axhline(height, color="black", linewidth=0.9, linestyle=":", label=text)
    times.set_ylabel(figures.times_label)
    for axes in memory:  # as bars: most are 1 or 0, and lines would hide one another
        _bars(axes, shapes, styles, peaks, figures.memory_format)
        axes.set_ylabel(figures.memory_label)
    times.set_title(title, fontsize=10)
    for axes in (times, *memory):
        axes.grid(axis="y", alpha=0.3)
    # Of both panels: what was not timed may have a bar in the lower one.
    handles = {
        label: handle
        for axes in (*memory, times)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if unsteady:
        hollow = lines.Line2D([], [], color="black", linestyle="none", marker="o", markerfacecolor="white")
        hatched = patches.Patch(facecolor="grey", edgecolor="white", hatch=_UNSTEADY)
        handles["unsteady: measure it again"] = hollow if sweep else hatched
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
