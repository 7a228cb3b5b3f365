"""Hooks of mkdocs (mkdocs.yml): what the site shows differently from a viewer of the repository's files."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in ROOT.glob("*.md"))  # of the repository's root; README.md is the home page

PICTURE = re.compile(r'<picture>.*?srcset="([^"]+)".*?<img alt="([^"]*)" src="([^"]+)".*?</picture>', re.DOTALL)
SOURCE = re.compile(r"\[([^]]+)\]\((?:\.\./)*(?:examples|xent_ops|tests|tools|csrc_meta|LICENSE|CITATION)[^)]*\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        # They stand one folder above the others.
        files.append(File.generated(config, name, content=text.replace("](docs/", "](").replace('"docs/', '"')))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for name in PAGES:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    # The sources are not part of the site: the link's text stays.
    markdown = SOURCE.sub(r"\1", markdown)
    # A reader of the site sees pages, not files.
    markdown = re.sub(r"\[(?:docs/)?([\w/-]+)\.md\]\(", r"[\1](", markdown)
    # The theme has a switch of its own, which <picture> does not see.
    return PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)
