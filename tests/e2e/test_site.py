"""The site as `make docs` builds it: without a warning, without a dead link, and as a reader's browser shows it."""

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.chromium import Chromium
from support.site import ROOT, dead_links, lay_out, run_mkdocs

pytest.importorskip("mkdocstrings", reason="the site needs the extra docs")

CHROMIUM = shutil.which("chromium")
SYMBOL = "zigzag_parts"
DEFINED_IN = "files/src/longmesh/attention/layout/zigzag.py.html"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site."""
    folder = tmp_path_factory.mktemp("site")
    lay_out(folder, ROOT / "docs", ROOT / "src")
    built = run_mkdocs(folder)  # as it is: a hook makes the pages of files
    assert is_clean(built), built.stdout
    return folder / "build" / "site"


@pytest.fixture(scope="module")
def address(site) -> Iterator[str]:
    """Where a server on this machine has the site."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def is_clean(built: subprocess.CompletedProcess[str]) -> bool:
    """Whether the site was built, and nothing was said but how it went on."""
    return built.returncode == 0 and all(line.startswith("INFO ") for line in built.stdout.splitlines())


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_search_has_the_pages_that_people_write(site):
    """Seven of eight entries were pages that are made of sources."""
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    made = {
        entry["location"].partition("#")[0] for entry in entries if entry["location"].startswith("files/")
    }
    assert made == {"files/index.html", "files/symbols.html"}
    assert len(entries) > 300


def test_no_link_is_dead(site):
    assert dead_links(site) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">x</a> <a class="y" href="b.html#there"> <img src="no.svg">'
    )
    (tmp_path / "b.html").write_text(
        '<h2 id="here"></h2> <a href="https://elsewhere.test/">z</a> <a href="#here">'
    )
    assert dead_links(tmp_path) == ["a.html -> b.html#there", "a.html -> no.svg"]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
def test_a_symbol_is_searched_and_followed_to_its_file_and_to_a_test(address, tmp_path):
    assert CHROMIUM
    with Chromium(CHROMIUM, tmp_path / "profile") as browser:
        browser.open(address + "index.html")
        browser.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
        browser.type(SYMBOL)
        result = "document.querySelector('.md-search-result__link[href*=\"files/symbols.html\"]')"
        browser.wait_for(f"{result} !== null")
        browser.evaluate(f"{result}.click()")
        browser.wait_for("location.pathname === '/files/symbols.html' && document.readyState === 'complete'")
        entry = f"[...document.querySelectorAll('li')].find(li => li.querySelector('code')?.textContent === '{SYMBOL}')"
        browser.evaluate(f"{entry}.querySelector('a').click()")
        browser.wait_for(f"location.pathname === '/{DEFINED_IN}' && document.readyState === 'complete'")
        assert browser.evaluate("document.querySelector('h1').textContent").startswith(
            "src/longmesh/attention/layout/zigzag.py"
        )

        test = "[...document.querySelectorAll('#tests ~ ul a')].find(a => a.textContent.startsWith('tests/'))"
        name = browser.evaluate(f"{test}.textContent")
        browser.evaluate(f"{test}.click()")
        browser.wait_for(f"location.pathname === '/files/{name}.html' && document.readyState === 'complete'")
        assert browser.evaluate("document.querySelector('h1').textContent").startswith(name)
        assert SYMBOL in (ROOT / name).read_text() or "longmesh.attention" in (ROOT / name).read_text()

        assert browser.errors == []
        assert [url for url in browser.requested if not url.startswith((address, "data:", "blob:"))] == []


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
@pytest.mark.parametrize("page", ["tutorial", "reference/attention", "design"])
def test_no_line_of_code_is_cut_off(site, tmp_path, page):
    assert CHROMIUM
    with Chromium(CHROMIUM, tmp_path / "profile") as browser:
        browser.open((site / f"{page}.html").as_uri())
        hidden = "[...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert browser.evaluate("document.querySelectorAll('pre > code').length") > 3
        assert browser.evaluate(hidden) == 0


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
def test_what_is_wrong_in_a_page_is_noticed(tmp_path):
    assert CHROMIUM
    (tmp_path / "bad.html").write_text(
        "<script src='none.js'></script><script>console.error('oh'); missing()</script>"
    )
    with Chromium(CHROMIUM, tmp_path / "profile") as browser:
        browser.open((tmp_path / "bad.html").as_uri())
        found = " ".join(browser.errors)
        assert "oh" in found and "missing is not defined" in found and "ERR_FILE_NOT_FOUND" in found


# -- what ends a build ----------------------------------------------------------------------------

# Four things are wrong here: two links, a page that is in no menu, and a function without a docstring.
UNSOUND = {
    "docs/index.md": "# A\n\n[b](b.md#c) [none](none.md) [no place](b.md#none)\n",
    "docs/b.md": "# B\n\n## C\n\n::: longmesh.f\n\n::: longmesh.g\n",
    "docs/lost.md": "# Lost\n",
    "src/longmesh/__init__.py": '"""P."""\ndef f(): ...\ndef g():\n    """Told.\n\n    >>> g()\n    """\n',
}


def test_whatever_is_wrong_ends_the_build(tmp_path):
    made, folder = tmp_path / "made", tmp_path / "site"
    for name, text in UNSOUND.items():
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text(text)
    folder.mkdir()
    lay_out(folder, made / "docs", made / "src")
    settings = (folder / "mkdocs.yml").read_text().split("\nnav:\n")[0]
    (folder / "mkdocs.yml").write_text(settings + "\nnav: [index.md, b.md]\n")

    built = run_mkdocs(folder)
    assert built.returncode == 1
    assert "b.md: longmesh.f has no docstring" in built.stdout
    assert "'none.md', but the target is not found" in built.stdout
    assert "does not contain an anchor '#none'" in built.stdout
    assert 'not included in the "nav" configuration:\n  - lost.md' in built.stdout
    assert "Aborted with 4 warnings in strict mode" in built.stdout
