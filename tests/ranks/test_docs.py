"""The Python blocks of every page run, one after another, on as many ranks as the page says; what they print is there.

A block that a fence of ```output follows prints exactly that on rank 0, and any other block prints nothing there. The
pictures of a page are those that its blocks draw.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from longmesh.testing import RankPool
from support.bridges import of_code
from support.folders import in_folder

DOCS = Path(__file__).parents[2] / "docs"
GENERATED = DOCS / "files"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n*```output\n(.*?)^```$)?", re.DOTALL | re.MULTILINE)
ANY_PYTHON = re.compile(r"^\s*(```|~~~)\s*(python|py)\b", re.MULTILINE)
RANKS = re.compile(r"--ranks (\d+)")
PICTURE = re.compile(r"\]\((?:\.\./)?pictures/([\w-]+\.svg)\)")


def pages() -> list[Path]:
    return [path for path in sorted(DOCS.rglob("*.md")) if GENERATED not in path.parents]


def with_blocks() -> list[str]:
    return [str(path.relative_to(DOCS)) for path in pages() if ANY_PYTHON.search(path.read_text())]


def run_page(page: str, folder: str) -> list[tuple[str, str]]:
    """(what each block printed, what the page says), block by block."""
    text = (DOCS / page).read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    found = []
    with in_folder(folder):
        for block in BLOCK.finditer(text):
            above = text.count("\n", 0, block.start(1))
            code = compile("\n" * above + block.group(1), page, "exec")
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)
            found.append((printed.getvalue(), block.group(2) or ""))
    return found


@pytest.mark.parametrize("page", [of_code(page, (DOCS / page).read_text()) for page in with_blocks()])
def test_page(pool, page, tmp_path):
    text = (DOCS / page).read_text()
    said = RANKS.search(text)
    results = pool.run(run_page, page, str(tmp_path), ranks=int(said.group(1)) if said else 2, timeout=120.0)
    assert len(results[0]) == len(ANY_PYTHON.findall(text)), (
        "a block that is not run: fence it with ```python"
    )
    for printed, shown in results[0]:
        lines = [line.rstrip() for line in printed.splitlines()]
        assert lines == shown.splitlines(), printed
    for name in PICTURE.findall(text):
        drawn, shown = tmp_path / name, DOCS / "pictures" / name
        assert shown.read_text() == drawn.read_text(), f"{shown} is out of date: copy {drawn} there"


def test_every_picture_is_shown_by_a_page_that_draws_it():
    shown = {name for page in with_blocks() for name in PICTURE.findall((DOCS / page).read_text())}
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}
    assert {"op-product.svg", "move-2.svg", "attention.svg"} <= shown


def test_the_test_that_contributing_shows(tmp_path, monkeypatch):
    (block,) = BLOCK.findall((DOCS.parent / "CONTRIBUTING.md").read_text())
    (tmp_path / "shown_in_contributing.py").write_text(block[0])
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("shown_in_contributing")  # before the fork, so that ranks have it too
    with RankPool(2) as pool:
        module.test_sum(pool)
    del sys.modules["shown_in_contributing"]


def test_the_readme_has_the_one_block_that_its_own_test_runs():
    assert len(ANY_PYTHON.findall((DOCS.parent / "README.md").read_text())) == 1


def test_the_pages_with_code_are_found():
    assert {"tutorial.md", "how-to/add-a-mask.md", "checkpoints.md"} <= set(with_blocks())
