"""Writes docs/models.md."""

from __future__ import annotations

import collections
import re
from typing import Any

import torch
import transformers

TITLES = {
    "causal": "Causal language models",
    "image-text": "Images and text",
    "masked": "Masked language models",
    "seq2seq": "Encoder and decoder",
    "speech": "Speech",
}


def text(rows: list[dict[str, Any]]) -> str:
    counts = collections.Counter(row["state"] for row in rows)
    tried = len(rows) - counts["not built"]
    equal = [row for row in rows if row["state"] == "equal"]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}"
    lines = [
        "# Models of transformers",
        "",
        f"{counts['equal']} of {tried} classes are equal with [`use_xent`](integrations.md#models-of-transformers) and",
        f"{counts['refused']} are refused. None differs ({versions}, CPU, float32).",
        "",
        "`python -m tools.models --page docs/models.md` prints this page. The classes are those of the mappings of",
        "AutoModelForCausalLM, ImageTextToText, MaskedLM, Seq2SeqLM and SpeechSeq2Seq, each once. Each is built with",
        "a small configuration and random weights. Loss and all gradients of one training step are compared with those",
        "of the untouched model. The two numbers are the loss's difference, as a part of the loss, and the largest",
        "difference of a gradient, as a part of the model's largest gradient. After `remove_xent` both are those",
        f"of the untouched model again. The largest of all are {max(row['loss'] for row in equal):.0e} and "
        f"{max(row['gradient'] for row in equal):.0e}.",
        "",
        f"{counts['not built']} classes were not tried: a small configuration could not be built or called.",
        "",
        "| | equal | refused | not tried |",
        "| --- | ---: | ---: | ---: |",
    ]
    for kind, title in TITLES.items():
        of_kind = collections.Counter(row["state"] for row in rows if row["kind"] == kind)
        lines.append(f"| {title} | {of_kind['equal']} | {of_kind['refused']} | {of_kind['not built']} |")
    for kind, title in TITLES.items():
        lines += ["", f"## {title}", "", "| class | |", "| --- | --- |"]
        lines += [f"| {row['class']} | {_result(row)} |" for row in sorted(rows, key=_name) if row["kind"] == kind]
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    return row["class"].lower()


def _result(row: dict[str, Any]) -> str:
    if row["state"] == "equal":
        return f"equal: {row['loss']:.0e}, {row['gradient']:.0e}"
    why = re.sub(r"(/[^\s/]+)+/", "", re.sub(r"\s+", " ", row["why"])).strip()
    for mark in "\\|<*_[]":
        why = why.replace(mark, f"\\{mark}")
    state = "not tried" if row["state"] == "not built" else row["state"]
    return f"{state}: {why if len(why) <= 200 else why[:197] + '...'}"
