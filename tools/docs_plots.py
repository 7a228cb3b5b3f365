"""Draws the pictures of the README and the site from the tables of docs/benchmarks.md, for light and dark pages.

    python tools/docs_plots.py

The description in each file has the numbers that it shows, and a test compares them with the tables.
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"

Rows = dict[str, list[str]]  # the first cell of a row -> its other cells


def tables(text: str) -> list[tuple[list[str], Rows]]:
    """(header without its first cell, rows) of every table."""
    found = []
    for lines in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        head, _, *body = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines.splitlines())
        found.append((head[1:], {row[0]: row[1:] for row in body}))
    return found


def number(cell: str) -> float | None:
    match = re.match(r"[\d.]+", cell)
    return float(match[0]) if match else None


def copies(cell: str) -> float | None:
    match = re.search(r"\(([\d.]+)\)", cell)
    return float(match[1]) if match else None


def row(rows: Rows, name: str) -> list[str]:
    """The row of that name, or the row whose name adds a version or a remark to it."""
    return rows[name] if name in rows else next(cells for key, cells in rows.items() if key.startswith(f"{name} "))


# The name in the table -> the name in the picture. Ours come first.
LOSSES = {
    "xent one pass in-place": "xent_ops, one pass, in place",
    "xent eager": "xent_ops",
    "quack-kernels": "quack",
    "F compiled": "F.cross_entropy, compiled",
    "liger-kernel": "Liger-Kernel",
    "F eager": "F.cross_entropy",
    "F eager float32": "F.cross_entropy(logits.float())",
}
HEADS = {
    "ours, compiled": "xent_ops, compiled",
    "all logits, our loss, compiled": "xent_ops, compiled (all logits)",
    "all logits, Liger-Kernel's CuTe kernel": "Liger-Kernel, CuTe (all logits)",
    "all logits, F.cross_entropy, compiled": "F.linear + F.cross_entropy, compiled (all logits)",
    "Liger-Kernel": "Liger-Kernel",
    "cut-cross-entropy": "cut-cross-entropy",
}
# A model's own call, in eager and by the best way of compiling it that the table has.
COMPILED = ("layers compiled", "compiled as a whole")
STEPS = {"`use_xent`, {}": "xent_ops, {}", "untouched, {}": "untouched, {}"}
SHAPE = "8192 x 32000"

# The title of each panel of the overview, and the format of its numbers. Each panel is its own picture: two stand side
# by side, and a phone shows one under the other.
PANELS = {
    "step-time": ("A whole model: time of a step in ms", "{:.0f}"),
    "step-memory": ("A whole model: peak memory in MiB", "{:.0f}"),
    "loss-time": ("The loss: time in ms", "{:.2f}"),
    "loss-memory": ("The loss: peak memory, in sizes of the logits", "{:.0f}"),
    "head-time": ("Head and loss: time in ms", "{:.1f}"),
    "head-memory": ("Head and loss: peak memory in MiB", "{:.0f}"),
}


def figures(text: str) -> dict[str, Any]:
    """The numbers of each picture."""
    found = tables(text)
    shapes, times = next(table for table in found if SHAPE in table[0] and "8192 x 50257" in table[0])
    peaks = {
        name: number(cells[0])
        for header, rows in found
        if header == ["peak"]
        for names, cells in rows.items()
        for name in names.split(", ")
    }
    header, heads = next(table for table in found if "H200, ms" in table[0])
    time, peak = header.index("H200, ms"), header.index("peak MiB")
    column = shapes.index(SHAPE)
    _, steps = next(table for table in found if "`use_xent`, eager" in table[1])
    compiled = next(way for way in COMPILED if f"`use_xent`, {way}" in steps)
    ways = {name.format(way): label.format(way) for way in ("eager", compiled) for name, label in STEPS.items()}
    return {
        "step-time": {label: number(steps[name][0]) for name, label in ways.items()},
        "step-memory": {label: number(steps[name][1]) for name, label in ways.items()},
        "loss-time": {label: number(row(times, name)[column]) for name, label in LOSSES.items()},
        "loss-memory": {label: peaks[name] for name, label in LOSSES.items()},
        "head-time": {label: number(row(heads, name)[time]) for name, label in HEADS.items()},
        "head-memory": {label: number(row(heads, name)[peak]) for name, label in HEADS.items()},
        "vocabulary": {
            "shapes": shapes,
            "copies": {label: [copies(cell) for cell in row(times, name)] for name, label in LOSSES.items()},
        },
    }


# Text, lines, and one colour for each loss; ours are blue. Okabe and Ito's colours, lighter for the dark page.
THEMES = {
    "light": {
        "text": "#1f2328", "faint": "#d0d7de", "ours": "#0072b2", "other": "#9aa3ad",
        "lines": ["#0072b2", "#3fa0db", "#009e73", "#d55e00", "#b8609a", "#6e7781", "#a8b0b8"],
    },
    "dark": {
        "text": "#e6edf3", "faint": "#3d444d", "ours": "#56b4e9", "other": "#767e87",
        "lines": ["#56b4e9", "#9dd4f5", "#2fc79b", "#f0883e", "#dd94c3", "#aab3bd", "#767e87"],
    },
}  # fmt: skip


def panel(plt: Any, theme: dict[str, Any], numbers: dict[str, float], title: str, form: str) -> Any:
    """Draw bars, each under its name, because a phone has no room for the names beside the bars."""
    figure, axes = plt.subplots(figsize=(4.1, 0.5 + 0.4 * len(numbers)), layout="constrained")
    for place, (label, value) in enumerate(numbers.items()):
        ours = label.startswith("xent_ops")
        bars = axes.barh(place + 0.22, value, 0.34, color=theme["ours" if ours else "other"])
        axes.bar_label(bars, [form.format(value)], padding=4, fontsize=9)
        axes.text(0, place - 0.1, label, fontsize=9, fontweight="bold" if ours else "normal")
    axes.set_xlim(0, max(numbers.values()) * 1.12)  # with room for the last number
    axes.set_ylim(len(numbers) - 0.25, -0.5)  # the first bar at the top, and a distance to the next picture
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_axis_off()
    return figure


def vocabulary(plt: Any, theme: dict[str, Any], numbers: dict[str, Any]) -> Any:
    """Draw lines above their legend, as wide as a panel: a phone would shrink a wider picture and its text."""
    figure, axes = plt.subplots(figsize=(4.1, 4.9), layout="constrained")
    classes = [int(shape.split(" x ")[1]) for shape in numbers["shapes"]]
    order = sorted(range(len(classes)), key=classes.__getitem__)
    for (label, values), colour in zip(numbers["copies"].items(), theme["lines"], strict=True):
        points = [(classes[index], values[index]) for index in order if values[index] is not None]
        ours = label.startswith("xent_ops")
        axes.plot(*zip(*points, strict=True), color=colour, marker="o" if ours else "s", markersize=5 if ours else 4,
                  linewidth=2.4 if ours else 1.4, label=label)  # fmt: skip
    axes.axhline(1.5, color=theme["text"], linewidth=0.8, linestyle=":", label="two reads and one write")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([classes[i] for i in order], [numbers["shapes"][i] for i in order], rotation=60)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("Forward and backward: time in copies of the logits", fontsize=10, loc="left")
    axes.grid(axis="y", color=theme["faint"], linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    narrow = {"ncols": 2, "fontsize": 8, "handlelength": 1.2, "handletextpad": 0.5, "columnspacing": 0.8}
    figure.legend(handles[::-1], labels[::-1], loc="outside lower left", frameon=False, **narrow)
    return figure


def description(numbers: dict[str, Any]) -> str:
    return json.dumps(numbers, separators=(",", ":"))


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot as plt

    IMAGES.mkdir(exist_ok=True)
    drawn = figures(BENCHMARKS.read_text(encoding="utf-8"))
    for theme, colours in THEMES.items():
        keys = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
        settings = {key: colours["text"] for key in keys} | {
            "svg.fonttype": "none",  # text, in the reader's font
            "svg.hashsalt": "xent_ops",  # the same file from the same numbers
            "font.family": "sans-serif",
            "font.size": 9,
        }
        with plt.rc_context(settings):
            for name, numbers in drawn.items():
                figure = (
                    vocabulary(plt, colours, numbers)
                    if name == "vocabulary"
                    else panel(plt, colours, numbers, *PANELS[name])
                )
                metadata = {"Date": None, "Description": description(numbers)}
                figure.savefig(IMAGES / f"{name}-{theme}.svg", transparent=True, metadata=metadata)
                plt.close(figure)


if __name__ == "__main__":
    main()
