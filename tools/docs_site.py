"""Hooks of mkdocs (mkdocs.yml): the differences between the site and the files in the repository."""

import re
from pathlib import Path
from typing import Any

# mkdocs is imported where it is needed: tests read this file without it.
ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in ROOT.glob("*.md"))  # pages in the repository's root; README.md is the home page

PICTURE = re.compile(r'<picture>.*?srcset="([^"]+)".*?<img alt="([^"]*)" src="([^"]+)".*?</picture>', re.DOTALL)
SOURCE = re.compile(r"\[([^]]+)\]\((?:\.\./)*(?:examples|xent_ops|tests|tools|csrc_meta|lab|LICENSE|CITATION)[^)]*\)")
EXAMPLE = re.compile(r"^\[(examples/[\w/]+\.py)\]\(\.\./\1\)$", re.MULTILINE)  # a paragraph by itself


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        # These pages are one folder above the others.
        files.append(File.generated(config, name, content=text.replace("](docs/", "](").replace('"docs/', '"')))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for name in PAGES:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    # Sources and lab notes are not part of the site. A link to an example in its own paragraph becomes the file's text.
    # Of other links the text stays.
    markdown = EXAMPLE.sub(_code, markdown)
    markdown = SOURCE.sub(r"\1", markdown)
    # A reader of the site sees pages, not files.
    markdown = re.sub(r"\[(?:docs/)?([\w/-]+)\.md\]\(", r"[\1](", markdown)
    # The theme has a switch of its own, which <picture> does not see.
    return PICTURE.sub(r"![\2](\3#only-light)\n![\2](\1#only-dark)", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> None:
    """Raise for a table that an empty line cuts in two. mkdocs shows it as text, even with --strict."""
    from mkdocs.exceptions import PluginError

    if "<p>|" in html:
        row = html.partition("<p>|")[2].partition("\n")[0]
        raise PluginError(f"{page.file.src_path}: a row of a table became text: |{row}")


def _code(link: re.Match[str]) -> str:
    return f'```py title="{link[1]}"\n{(ROOT / link[1]).read_text(encoding="utf-8")}```'
