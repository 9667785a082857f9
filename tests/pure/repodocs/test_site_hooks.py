"""Pages of source files are left out of the site's search, and keywords are rendered without Markdown.

tests/e2e/test_site.py has the rest: names without docstrings, and that every link of a built site leads somewhere.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("griffe", reason="comes with the extra docs")

from site_hooks import on_page_markdown, on_post_page

TEXT = """# `a.py`

## Symbols

- x

## Imports

- [`b.py`](b.py.md)

## Keywords

- `x`: defined in [`b.py`](../b.py.md#s-x) · [`f`](#s-f) 3, 4 · top level 1
- `y`: defined in [`b<c>.py`](b%3Cc%3E.py.md)
"""


def page(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})


def test_pages_of_files_are_not_searched_and_keywords_go_around_markdown():
    this = page("files/a.py.md")
    changed = on_page_markdown(TEXT, page=this, config=None, files=None)
    assert this.meta["search"] == {"exclude": True}
    assert "## Imports\n" in changed and changed.endswith("## Keywords\n\n<!-- keywords -->\n")
    rendered = on_post_page("<h2>Keywords</h2>\n<!-- keywords -->", page=this, config=None)
    keywords = rendered.removeprefix("<h2>Keywords</h2>\n<ul>\n<li>").removesuffix("</li>\n</ul>")
    first, second = keywords.split("</li>\n<li>")
    assert first == (
        '<code>x</code>: defined in <a href="../b.py.html#s-x"><code>b.py</code></a> · '
        '<a href="#s-f"><code>f</code></a> 3, 4 · top level 1'
    )
    assert second == '<code>y</code>: defined in <a href="b%3Cc%3E.py.html"><code>b&lt;c&gt;.py</code></a>'


def test_other_pages_stay_as_they_are():
    this = page("design.md")
    assert on_page_markdown(TEXT, page=this, config=None, files=None) == TEXT and "search" not in this.meta
    assert on_post_page("<p>x</p>", page=this, config=None) == "<p>x</p>"


@pytest.mark.parametrize("name", ["files/index.md", "files/symbols.md"])
def test_an_index_is_searched_and_has_no_keywords(name):
    this = page(name)
    assert on_page_markdown("# Files\n", page=this, config=None, files=None) == "# Files\n"
    assert "search" not in this.meta
