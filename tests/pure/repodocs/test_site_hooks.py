"""Sections that only mention names are left out of the site's search; tests/e2e/test_site.py has the docstrings."""

from types import SimpleNamespace

import pytest

pytest.importorskip("griffe", reason="comes with the extra docs")

from site_hooks import on_page_markdown

TEXT = "# `a.py`\n\n## Symbols\n\n- x\n\n## Keywords\n\n- y\n"


def page(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path))


def test_only_pages_of_files_and_only_mentions():
    changed = on_page_markdown(TEXT, page=page("files/a.py.md"), config=None, files=None)
    assert changed == TEXT.replace("## Keywords", "## Keywords { data-search-exclude }")
    assert on_page_markdown(TEXT, page=page("design.md"), config=None, files=None) == TEXT
