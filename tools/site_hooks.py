"""What the site needs of mkdocs besides its settings.

Pages of files are found by what they define: every page mentions hundreds of names that others define, and in the
search they would hide the page that is looked for. A name of the reference without a docstring is a warning, which ends
the build.
"""

import functools
import logging
import re
from pathlib import Path
from typing import Any

import griffe

MENTIONS = ("Imports", "Imported by", "Beside it", "Keywords")
REFERENCED = re.compile(r"^::: (\w+)\.([\w.]+)$", re.MULTILINE)

log = logging.getLogger("mkdocs.hooks.site")  # what it warns of, mkdocs counts


def on_page_markdown(markdown: str, *, page: Any, config: Any, **kwargs: Any) -> str:
    """mkdocs calls this for each page."""
    if page.file.src_uri.startswith("files/"):
        return leave_out_mentions(markdown)
    for package, name in REFERENCED.findall(markdown):
        sources = Path(config.config_file_path).parent / "src"
        if not load(package, sources)[name].has_docstring:
            log.warning(f"{page.file.src_uri}: {package}.{name} has no docstring")
    return markdown


def leave_out_mentions(markdown: str) -> str:
    """The page of a file whose sections that only mention names are left out of the search."""
    for title in MENTIONS:
        markdown = markdown.replace(f"\n## {title}\n", f"\n## {title} {{ data-search-exclude }}\n")
    return markdown


@functools.cache
def load(package: str, sources: Path) -> griffe.Object | griffe.Alias:
    """The names of a package, from its syntax trees: nothing is imported."""
    return griffe.load(package, search_paths=[sources], allow_inspection=False, resolve_aliases=True)
