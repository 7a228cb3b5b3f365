"""Hooks of mkdocs (mkdocs.yml): the differences between the site and the files in the repository."""

import re
from pathlib import Path
from typing import Any

# mkdocs is imported where it is needed: tests read this file without it.
ROOT = Path(__file__).parent.parent
PAGES = sorted(path.name for path in ROOT.glob("*.md"))  # pages in the repository's root; README.md is the home page

PICTURE = re.compile(r'<picture>.*?srcset="([^"]+)".*?<img alt="([^"]*)" src="([^"]+)".*?</picture>', re.DOTALL)
EXAMPLES = [path.relative_to(ROOT) for path in sorted(ROOT.glob("examples/**/*")) if path.suffix in (".py", ".cpp")]
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "xent_ops" / "_version.py").read_text(encoding="utf-8"))

SOURCE = re.compile(
    r"\[([^]]+)\]\((?:\.\./)*(?:examples(?![^)]*\.md\))|xent_ops|tests|tools|csrc_meta|lab|LICENSE|CITATION)[^)]*\)"
)
EXAMPLE = re.compile(r"^\[(examples/[\w/]+\.py)\]\(\.\./\1\)$", re.MULTILINE)  # a paragraph by itself


def on_config(config: Any, **_: Any) -> Any:
    config.site_name += f" {VERSION[1]}" if VERSION else ""
    return config


def on_files(files: Any, config: Any, **_: Any) -> Any:
    from mkdocs.structure.files import File

    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        # These pages are one folder above the others.
        files.append(File.generated(config, name, content=text.replace("](docs/", "](").replace('"docs/', '"')))
    for path in EXAMPLES:
        files.append(File.generated(config, f"{path}.md", content=f"# {path.name}\n\n{_code(path)}"))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for name in PAGES:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    # A link to an example in its own paragraph becomes the file's text, another one leads to the example's page.
    # Other sources and lab notes are not part of the site: of their links the text stays.
    markdown = EXAMPLE.sub(lambda link: _code(Path(link[1])), markdown)
    for path in EXAMPLES:
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(str(path))}\)", f"]({path}.md)", markdown)
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


def _code(path: Path) -> str:
    return f'```{path.suffix[1:]} title="{path}"\n{(ROOT / path).read_text(encoding="utf-8")}```'
