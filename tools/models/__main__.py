"""``python -m tools.models``: the table of docs/models.md. One child process a class, some minutes in all."""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

import xent_ops.integrations.transformers  # noqa: F401  before the children

from . import page
from .compare import compare

KINDS = {
    "causal": "CAUSAL_LM",
    "image-text": "IMAGE_TEXT_TO_TEXT",
    "masked": "MASKED_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "speech": "SPEECH_SEQ_2_SEQ",
}
MEMORY = 8 << 30


def classes() -> dict[str, str]:
    """The kind of each class of five mappings: the first one that has it."""
    found: dict[str, str] = {}
    for kind, mapping in KINDS.items():
        for names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").values():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                found.setdefault(name, kind)
    return found


def in_child(name: str, kind: str, seconds: int) -> dict[str, Any]:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        signal.alarm(seconds)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        try:
            row = compare(name, kind)
        except BaseException as error:
            row = {"state": "crashed", "why": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(row).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    row = json.loads(data) if data else {"state": "not built", "why": f"it took more than {seconds} s, or 8 GiB"}
    return {"class": name, "kind": kind, **row}


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("python -m tools.models", description=__doc__)
    found.add_argument("--only", metavar="REGEX", help="of the classes' names")
    found.add_argument(
        "--rows", type=Path, metavar="FILE", help="a line of JSON a class; classes in it are not run again"
    )
    found.add_argument("--page", type=Path, metavar="FILE", help="write the table there: docs/models.md")
    found.add_argument("--seconds", type=int, default=120, help="for a class")
    return found


def main() -> int:
    arguments = parser().parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, Any]] = {}
    if arguments.rows is not None and arguments.rows.exists():
        rows = {row["class"]: row for row in map(json.loads, arguments.rows.read_text().splitlines())}
    for name, kind in classes().items():
        if name in rows or not re.search(arguments.only or "", name):
            continue
        begun = time.time()
        row = rows[name] = in_child(name, kind, arguments.seconds)
        print(name, row["state"], row.get("why", ""), f"{time.time() - begun:.1f} s", flush=True)
        if arguments.rows is not None:
            with arguments.rows.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if arguments.page is not None:
        arguments.page.write_text(page.text(list(rows.values())))
    counts = collections.Counter(row["state"] for row in rows.values())
    print(*(f"{count} {state}" for state, count in counts.most_common()), sep=", ")
    return 1 if counts["different"] or counts["crashed"] else 0


if __name__ == "__main__":
    sys.exit(main())
