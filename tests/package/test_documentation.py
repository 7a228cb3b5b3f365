"""The documentation is run: Python blocks, commands, schemas, pictures."""

import contextlib
import html
import io
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import docs_plots
import docs_site
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.processes import run_with_torch

import xent_ops
from tools.bench.__main__ import parser
from xent_ops import __main__, _doctor, _extension
from xent_ops.bench import run as bench
from xent_ops.ops.schemas import SCHEMAS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]

# (why it is not run, the code, what the page says that it prints)
BLOCK = re.compile(
    r"^(?:<!-- skip: ([^\n]*) -->\n)?```python\n(.*?)^```$(?:\n\n```\n(.*?)^```)?", re.DOTALL | re.MULTILINE
)
WITH_BLOCKS = [page for page in PAGES if "```python" in page.read_text()]
README = " ".join((ROOT / "README.md").read_text().split())
MEASURED = docs_plots.tables(docs_plots.BENCHMARKS.read_text())


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class CausalLM(torch.nn.Module):
    """Stands in for a model of transformers: its arguments, its output, F.cross_entropy of float32 logits."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = F.cross_entropy(logits.float()[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(loss, logits)


def names_of(page):
    """What a page uses without defining it."""
    if page == "compile.md":
        tokens = torch.randint(64, (2, 9))
        return {"model": CausalLM().to(torch.bfloat16), "input_ids": tokens, "labels": tokens}
    return {}


@contextlib.contextmanager
def one_rank(page):
    """The groups of a page that needs ranks have one; a group that a page makes itself is gone after it."""
    if page == "distributed.md":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def code_of(block):
    """Without prompts and what they print."""
    lines = block.splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith(">>> ")) if block.startswith(">>> ") else block


def without_files(report):
    """The pass's report with lines and functions alone: a page names a file of its reader's."""
    return re.sub(r"^  \S.*:(?=\d+ in )", "  ", report, flags=re.MULTILINE)


# The block of cpp.md is about a process that never imports xent_ops, those of integrations.md are about models of
# transformers (tests/integrations): they have tests of their own.
ELSEWHERE = ("cpp.md", "integrations.md")


@pytest.mark.parametrize(
    "page", [page for page in WITH_BLOCKS if page.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_blocks_run(page):
    namespace, skipped = names_of(page.name), []
    with one_rank(page.name):
        for number, (reason, block, output) in enumerate(BLOCK.findall(page.read_text()), 1):
            if reason:
                skipped.append(reason)
                continue
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(code_of(block), f"{page.name} block {number}", "exec"), namespace)
            if output and page.name != "compile.md":  # which shows what a large model prints, not its stand-in
                assert without_files(printed.getvalue()) == without_files(output)
    xent_ops.inductor.disable()
    if skipped:
        pytest.skip("; ".join(sorted(set(skipped))))


def test_every_block_is_found():
    """As many as a plain search finds: a fence that the pattern misses would never run."""
    for page in WITH_BLOCKS:
        assert len(BLOCK.findall(page.read_text())) == page.read_text().count("```python\n"), page


def test_the_library_is_loaded_without_python_s_package():
    """The block of cpp.md."""
    if not _extension.LIBRARY.exists():
        pytest.skip("libxent_ops.so is not built")
    (block,) = (block for _, block, _ in BLOCK.findall((DOCS / "cpp.md").read_text()))
    run_with_torch(
        f"path = {str(_extension.LIBRARY)!r}\n{block}\nimport sys\nassert 'xent_ops' not in sys.modules and loss > 0"
    )


def commands(page):
    """The lines in code, fenced or indented, that run ``python -m xent_ops`` or ``tools.bench``."""
    text = page.read_text().replace("\\\n", " ")
    launcher = r"^ {0,4}(?:taskset \S+ \S+ )?python -m (?:torch\.distributed\.run --nproc-per-node 2 -m )?"
    return re.findall(launcher + r"((?:xent_ops|tools\.bench) [^#\n]*)", text, re.MULTILINE)


COMMANDS = sorted({command.strip() for page in PAGES for command in commands(page)})


def test_commands_parse(monkeypatch):
    assert len(COMMANDS) > 20
    parsed = []
    for module, name in ((bench, "main"), (_doctor, "main"), (__main__, "_library_path")):
        monkeypatch.setattr(module, name, lambda arguments: parsed.append(arguments) or 0)
    for command in COMMANDS:
        module, *argv = shlex.split(command)
        if module == "xent_ops":
            assert __main__.main(argv) == 0, command
        elif argv != ["--help"]:
            parsed.append(parser().parse_args(argv))
    assert len(parsed) == len(COMMANDS) - ("tools.bench --help" in COMMANDS)


def test_a_checkout_is_built_as_doctor_says():
    """Python that starts in a checkout imports xent_ops from there: only an editable build is found in both places."""
    command = _extension.build_command().rpartition("&& ")[2]
    for path, name in ((shlex.join([sys.executable, "-m", "pip"]), "pip"), (str(ROOT), ".")):
        command = command.replace(path, name)
    assert command == "XENT_OPS_BUILD_CPP=1 pip install --no-build-isolation --no-deps --editable ."
    for page in (ROOT / "README.md", DOCS / "start.md"):
        assert f"{command}\n" in page.read_text(), page


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for page in PAGES for name in re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), re.MULTILINE)
    }
    assert len(named) > 5 and named <= targets


# A page of what holds today names files that are there; lab notes and the changelog may name what is gone.
OURS = "csrc_meta|docs|examples|tests|tools|xent_ops|bench|distributed|inductor|kernels|ops"
PATHS = re.compile(rf"(?<![\w./])(?:{OURS})/[\w/]*\w[\w-]*\.(?:py|cpp|h|inl|md)\b")
FOLDERS = (ROOT, ROOT / "xent_ops")


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "lab"], ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    for path in PATHS.findall(page.read_text()):
        assert any((folder / path).exists() for folder in FOLDERS), path


def test_the_contract_lists_every_schema():
    text = (DOCS / "ops.md").read_text()
    listed = re.search(r"## Schemas\n\n```\n(.*?)```", text, re.DOTALL).group(1).splitlines()
    missing = {name + schema for name, schema in SCHEMAS.items()} - set(listed)
    assert not missing and len(listed) == len(SCHEMAS), "docs/ops.md, under Schemas"
    for name in SCHEMAS:
        assert f"| `{name}` |" in text, "docs/ops.md, in the table of operators"


FENCED = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page):
    """An empty line in a table makes text of the rows below it. (`make docs` looks at the built pages.)"""
    for table in re.findall(r"(?<=\n\n)(?:\|.*\n)+", FENCED.sub("", page.read_text())):
        head, delimiters, *_ = [*table.splitlines(), ""]
        assert re.fullmatch(r"\|( *:?-+:? *\|)+", delimiters), head


def test_the_site_shows_the_recipes():
    page = docs_site.on_page_markdown((DOCS / "integrations.md").read_text())
    for path in (ROOT / "examples" / "integrations").glob("*.py"):
        assert path.read_text() in page, path.name


@pytest.mark.parametrize("theme", docs_plots.THEMES)
@pytest.mark.parametrize("name", [*docs_plots.PANELS, "vocabulary"])
def test_pictures_show_the_tables(name, theme):
    """If this fails: python tools/docs_plots.py."""
    numbers = docs_plots.figures(docs_plots.BENCHMARKS.read_text())[name]
    drawn = (docs_plots.IMAGES / f"{name}-{theme}.svg").read_text()
    shown = re.search(r"<dc:description>(.*?)</dc:description>", drawn, re.DOTALL).group(1)
    assert html.unescape(shown) == docs_plots.description(numbers)


def test_pictures_are_shown_and_fit_on_a_phone():
    """390 px less the site's margins: a wider picture shrinks, and its names with it. One may: the curves."""
    for page in (ROOT / "README.md", DOCS / "benchmarks.md"):
        for path in re.findall(r'(?:srcset|src)="([^"]+)"', page.read_text()):
            width = re.search(r'<svg[^>]* width="([\d.]+)pt"', (page.parent / path).read_text(), re.DOTALL)[1]
            assert float(width) * 96 / 72 < 400 or "vocabulary" in path, path


def test_pictures_have_their_numbers():
    """A table that is laid out anew must not leave a picture without numbers."""
    drawn = docs_plots.figures(docs_plots.BENCHMARKS.read_text())
    for panel in docs_plots.PANELS:
        assert all(isinstance(value, float) for value in drawn[panel].values()), panel
    for label, values in drawn["vocabulary"]["copies"].items():
        assert len(values) - values.count(None) >= 5, label


def test_pictures_show_every_rival_that_is_measured():
    tables = docs_plots.tables(docs_plots.BENCHMARKS.read_text())
    measured = next(rows for header, rows in tables if "H200, ms" in header)
    shown = {tuple(docs_plots.row(measured, name)): label for name, label in docs_plots.HEADS.items()}
    for name, cells in measured.items():
        if name != "the three matmuls" and not name.startswith("ours"):
            assert ("all logits" in name) == ("all logits" in shown[tuple(cells)]), name


def test_the_price_of_skipping_is_measured():
    """skip_ignored where no row is ignored: help and recipe have the largest one of the table."""
    costs = next(rows for header, rows in MEASURED if header[0] == "8192 x 256000, 2304")
    pairs = zip(costs["all rows computed"], costs["`skip_ignored=True`"], strict=True)
    price = f"up to {100 * max(float(skipping) / float(all_rows) - 1 for all_rows, skipping in pairs):.0f} %"
    assert price in xent_ops.linear_cross_entropy.__doc__
    assert price in (DOCS / "recipes.md").read_text()


def short(ratio, digits=2):
    """As the page writes it: .93, and 1 for 1.02 in one digit."""
    text = f"{ratio:.{digits}f}"
    return "1" if text == "1.0" else text.removeprefix("0")


def table_of(*names):
    """The first table with these rows. Their cells by the header's names; a row's name may end in a version."""
    for header, rows in MEASURED:
        with contextlib.suppress(StopIteration):
            return [dict(zip(header, docs_plots.row(rows, name), strict=True)) for name in names]
    raise AssertionError(names)


def test_the_readme_s_head_is_measured():
    names = (
        "the three matmuls",
        "ours, compiled",
        "all logits, F.cross_entropy, compiled",
        "ours, `accumulate_dtype=torch.float32`",
    )
    matmuls, ours, theirs, wide, *others = table_of(*names, "Liger-Kernel", "cut-cross-entropy")
    logits, gradients = (2 * numbers / 2**20 for numbers in (8192 * 128256, (8192 + 128256) * 4096))
    assert f'"All logits" are {logits:,.0f} MiB' in README
    assert f"three matrix multiplications alone take {matmuls['H200, ms']} ms" in README
    liger, cut = (short(float(line["ratio"]), 1) for line in others)
    assert f"take {liger} and {cut} times as long" in README
    assert f"its error is {ours['dW error']}, and {theirs['dW error']} with all logits or" in README
    assert wide["dW error"] == theirs["dW error"]
    time, peak = (short(float(ours[name]) / float(theirs[name])) for name in ("H200, ms", "peak MiB"))
    assert f"`F.cross_entropy` of all logits | {time} | {peak} |" in README
    assert float(ours["peak MiB"]) - gradients == pytest.approx(2 * 2048 * 128256 / 2**20, abs=1.1)


def test_the_readme_s_chunks_are_measured():
    chunks = table_of("one chunk, the default", "`chunk_rows=1024`", "`chunk_rows=512`")
    default, half, quarter = (float(line["ratio"]) for line in chunks)
    assert f"half a chunk takes {100 * (half / default - 1):.0f} % longer" in README and quarter > half


def test_the_readme_s_shares_are_measured():
    ours, theirs = table_of("ours, eager", "formulas of speculators, compiled")
    time, peak = (short(float(ours[name]) / float(theirs[name])) for name in ("ms", "peak MiB"))
    assert f"formulas of all logits | {time} | {peak} |" in README
    skipping, all_rows = (float(line["50 %"]) for line in table_of("`skip_ignored=True`", "all rows computed"))
    text = " ".join(docs_plots.BENCHMARKS.read_text().split())
    peaks = re.search(r"Peak memory (\d+) MiB, and (\d+) with `skip_ignored=True`", text)
    assert f"against ours without it | {short(skipping / all_rows)} | {int(peaks[2]) / int(peaks[1]):.2f} |" in README


def test_the_readme_s_head_of_megatron_is_measured():
    unfused, fused = "Megatron, unfused", "Megatron, fused (native)"
    rows, promised = table_of("`use_xent`", unfused, fused), table_of("`use_xent`, `loss_mask=True`")[0]
    times, peaks = ([float(line[f"TP 1, {column}"]) for line in (promised, *rows)] for column in ("ms", "peak MiB"))
    for place, name in ((2, "unfused loss, the default"), (3, "fused loss")):
        shares = [short(found[0] / found[place]) for found in (times, peaks)]
        assert f"against its {name} | {shares[0]} | {shares[1]} |" in README


def test_the_readme_s_step_of_use_xent_is_measured():
    ours, theirs = table_of("`use_xent`, eager", "untouched, eager")
    time, peak = (short(float(ours[name]) / float(theirs[name])) for name in ("ms", "peak MiB"))
    assert f"4 x 4096 tokens, eager | {time} | {peak} |" in README


@pytest.mark.parametrize(
    "way, name, label",
    [
        ("eager", "F eager", "F.cross_entropy` in eager mode"),
        ("compiled", "F compiled", "the same, against compiled `F.cross_entropy`"),
    ],
)
def test_the_readme_s_loss_is_measured(way, name, label):
    shapes, rows = next(table for table in MEASURED if docs_plots.SHAPE in table[0] and "8192 x 50257" in table[0])
    column = shapes.index(docs_plots.SHAPE)
    ours, theirs = (docs_plots.number(rows[line][column]) for line in (f"xent {way}", name))
    peaks = docs_plots.figures(docs_plots.BENCHMARKS.read_text())["loss-memory"]
    peak = peaks["xent_ops"] / peaks["F.cross_entropy" if way == "eager" else "F.cross_entropy, compiled"]
    assert f"{label} | {short(ours / theirs)} | {short(peak)} |" in README


def test_readme_counts_the_models_of_transformers():
    """As the page that `python -m tools.models` prints."""
    counts = re.search(
        r"(\d+) of (\d+) classes are equal with .* and\n(\d+) are refused", (DOCS / "models.md").read_text()
    )
    equal, tried, refused = counts.groups()
    assert f"Of {tried} model classes [tried](docs/models.md), {equal} have the same loss and gradients" in README
    assert f"and {refused} are refused" in README
