"""Hooks that mkdocs runs while it builds the site.

They make the pages of source files first, so that a bare `mkdocs build` finds them. The search leaves those pages
out: there are seven of them for each other page, and they mention names that others define. `files/symbols.md` is
searched, and leads to the file that defines a name. Their keywords, most of all text, go around Markdown, which is
slow. A name of the reference without a docstring is a warning, which ends the build.
"""

import functools
import html
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe

KEYWORDS = "\n## Keywords\n\n"
KEPT = "<!-- keywords -->"
SEARCHED = ("files/index.md", "files/symbols.md")
REFERENCED = re.compile(r"^::: (\w+)\.([\w.]+)$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[(<code>.*?</code>)\]\(([^)#]*?)(?:\.md)?(#[^)]*)?\)")

log = logging.getLogger("mkdocs.hooks.site")  # what it warns of, mkdocs counts


def on_config(config: Any) -> None:
    """mkdocs calls this once its settings are read, before it looks for pages."""
    if "files/" in str(config.nav):
        make_file_pages(Path(__file__).resolve().parents[1], Path(config.docs_dir, "files"))


@functools.cache  # `mkdocs serve` reads its settings again and again
def make_file_pages(root: Path, out: Path) -> None:
    """Make a page for each file of the repository, in a process of its own: a problem is a warning."""
    tools = Path(__file__).parent
    command = [sys.executable, "-m", "repodocs", str(root), "--out", str(out)]
    made = subprocess.run(command, cwd=tools, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        log.warning(f"the pages of files could not be made: {made.stdout}{made.stderr}")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """mkdocs calls this for each page, before it is rendered."""
    if page.file.src_uri.startswith("files/"):
        if page.file.src_uri not in SEARCHED:
            page.meta["search"] = {"exclude": True}
        text, _, keywords = markdown.partition(KEYWORDS)
        page.meta["keywords"] = keywords
        return f"{text}{KEYWORDS}{KEPT}\n" if keywords else text
    for package, name in REFERENCED.findall(markdown):
        sources = Path(config.config_file_path).parent / "src"
        if not load(package, sources)[name].has_docstring:
            log.warning(f"{page.file.src_uri}: {package}.{name} has no docstring")
    return markdown


def on_post_page(output: str, *, page: Any, **kwargs: Any) -> str:
    """mkdocs calls this for each page, when it has been rendered and searched for what can be found."""
    return output.replace(KEPT, render_keywords(page.meta.get("keywords", "")))


def render_keywords(markdown: str) -> str:
    """A list as repodocs writes it, of code, links and numbers only, as HTML."""
    items = [line.removeprefix("- ") for line in markdown.splitlines() if line]
    text = "</li>\n<li>".join(items)
    text = CODE.sub(lambda match: f"<code>{html.escape(match.group(1))}</code>", text)
    return f"<ul>\n<li>{LINK.sub(_anchor, text)}</li>\n</ul>"


def _anchor(link: re.Match[str]) -> str:
    text, page, place = link.groups(default="")
    return f'<a href="{page}{".html" if page else ""}{place}">{text}</a>'


@functools.cache
def load(package: str, sources: Path) -> griffe.Object | griffe.Alias:
    """The names of a package, from its syntax trees: nothing is imported."""
    return griffe.load(package, search_paths=[sources], allow_inspection=False, resolve_aliases=True)
