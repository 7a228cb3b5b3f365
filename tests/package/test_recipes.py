"""The documentation is run: every Python block of docs/recipes.md, and docs/ops.md against the schemas."""

import re
from pathlib import Path

import torch

from xent_ops.ops.schemas import SCHEMAS

DOCS = Path(__file__).parents[2] / "docs"


def test_recipes_run():
    torch.manual_seed(0)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "recipes.md").read_text(), re.DOTALL)
    assert len(blocks) >= 10
    namespace = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"recipes.md block {number}", "exec"), namespace)


def test_the_contract_lists_every_schema():
    text = (DOCS / "ops.md").read_text()
    listed = re.search(r"## Schemas\n\n```\n(.*?)```", text, re.DOTALL).group(1).splitlines()
    assert sorted(listed) == sorted(name + schema for name, schema in SCHEMAS.items())
    for name in SCHEMAS:
        assert f"| `{name}` |" in text
