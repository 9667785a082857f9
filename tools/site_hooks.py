"""What the site needs of mkdocs besides its settings.

Pages of files are found by what they define: every page mentions hundreds of names that others define, and in the
search they would hide the page that is looked for. Their keywords, most of all text, go around Markdown, which is slow.
A name of the reference without a docstring is a warning, which ends the build.
"""

import functools
import html
import logging
import re
from pathlib import Path
from typing import Any

import griffe

MENTIONS = ("Imports", "Imported by", "Beside it", "Keywords")
KEYWORDS = "\n## Keywords { data-search-exclude }\n\n"
KEPT = "<!-- keywords -->"
REFERENCED = re.compile(r"^::: (\w+)\.([\w.]+)$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[(<code>.*?</code>)\]\(([^)#]*?)(?:\.md)?(#[^)]*)?\)")

log = logging.getLogger("mkdocs.hooks.site")  # what it warns of, mkdocs counts


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """mkdocs calls this for each page, before it is rendered."""
    if page.file.src_uri.startswith("files/"):
        text, _, keywords = leave_out_mentions(markdown).partition(KEYWORDS)
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


def leave_out_mentions(markdown: str) -> str:
    """The page of a file whose sections that only mention names are left out of the search."""
    for title in MENTIONS:
        markdown = markdown.replace(f"\n## {title}\n", f"\n## {title} {{ data-search-exclude }}\n")
    return markdown


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
