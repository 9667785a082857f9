"""Whole runs on made-up repositories."""

import posixpath
import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from repodocs import build
from repodocs.__main__ import main
from repodocs.cycles import cycles, heights

FILES = {
    "pkg/__init__.py": '"""The package."""\nfrom pkg.low import Thing\nfrom pkg import loop\n',
    "pkg/low.py": '"""Low."""\nclass Thing:\n    """A `thing` with <b>_markup_</b> | and [link](x)."""\n',
    "pkg/high/__init__.py": "",
    "pkg/high/use.py": "from pkg.low import Thing\nfrom ..loop import a\ndef run(t: Thing): return a\n",
    "pkg/loop.py": "from pkg.back import b\na = 1\n",
    "pkg/back.py": "from pkg.loop import a\nb = 2\n",
    "tests/test_thing.py": "import pkg\nfrom pkg.high import use\ndef test_it(): assert pkg.Thing\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def pages(tmp_path) -> Path:
    build(write(tmp_path / "repo", FILES), tmp_path / "out")
    return tmp_path / "out"


def dead_links(out: Path) -> list[str]:
    """Links that lead to no page, or to no anchor of their page."""
    texts = {path.relative_to(out).as_posix(): path.read_text() for path in out.rglob("*.md")}
    dead = []
    for page, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            file, _, fragment = target.partition("#")
            path = (
                posixpath.normpath(posixpath.join(posixpath.dirname(page), unquote(file))) if file else page
            )
            exists = (out / path).is_file()
            if not exists or (fragment and f'<a id="{fragment}"></a>' not in texts[path]):
                dead.append(f"{page} -> {target}")
    return dead


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_links_go_both_ways_and_none_is_dead(pages):
    assert dead_links(pages) == []
    low = (pages / "pkg/low.py.md").read_text()
    use = (pages / "pkg/high/use.py.md").read_text()
    assert "[`pkg/low.py`](../low.py.md)" in section(use, "Imports")
    assert "[`pkg/loop.py`](../loop.py.md)" in section(use, "Imports")
    assert "[`pkg/high/use.py`](high/use.py.md)" in section(low, "Imported by")
    assert "pkg/back.py" in section(low, "Beside it")


def test_a_test_is_found_through_the_facade(pages):
    assert "tests/test_thing.py" in section((pages / "pkg/low.py.md").read_text(), "Tests")
    assert "tests/test_thing.py" in section((pages / "pkg/high/use.py.md").read_text(), "Tests")
    assert "No test names it" in section((pages / "pkg/back.py.md").read_text(), "Tests")


def test_keywords_link_to_their_definition(pages):
    words = section((pages / "pkg/high/use.py.md").read_text(), "Keywords")
    assert "- `Thing`: defined in [`pkg/low.py`](../low.py.md#s-Thing)" in words
    assert "[`run`](#s-run) 3" in words


def test_indexes(pages):
    folder = (pages / "pkg/high/index.md").read_text()
    assert "Imports from: [`pkg`](../index.md)" in folder and "Is imported by: [`tests`]" in folder
    assert "- `Thing`: class in [`pkg/low.py`](pkg/low.py.md#s-Thing)" in (pages / "symbols.md").read_text()
    assert "[All symbols](symbols.md)" in (pages / "index.md").read_text()


def test_the_picture_has_the_real_edges(pages):
    svg = ElementTree.fromstring((pages / "pkg/rooms.svg").read_text())
    titles = {node.text for node in svg.iter("{http://www.w3.org/2000/svg}title")}
    assert {
        "high imports low.py: 1",
        "high imports loop.py: 1",
        "back.py imports loop.py: 1",
        "loop.py imports back.py: 1",
    } <= titles
    assert "**Cycle between rooms:** `back.py`, `loop.py`" in (pages / "pkg/index.md").read_text()


def test_a_cycle_of_imports_is_told(pages):
    assert "**Import cycle.**" in (pages / "pkg/loop.py.md").read_text()
    assert "**Import cycle.**" not in (pages / "pkg/low.py.md").read_text()


def test_text_from_sources_is_escaped(pages):
    line = next(x for x in (pages / "pkg/low.py.md").read_text().splitlines() if "class Thing" in x)
    assert "A `thing` with &#60;b&#62;&#95;markup&#95;&#60;/b&#62; &#124; and &#91;link&#93;(x)." in line


@pytest.mark.parametrize(
    ("name", "source", "says"),
    [
        ("bad.py", "def f(:\n", "does not parse"),
        ("twice.py", "def f(): ...\ndef f(): ...\n", "**Defined more than once:** `f`"),
        ("odd name #1.py", "x = 1\n", "module `odd name #1`"),
        ("ticks.py", 'x = "``"\n', "```x = '``'```"),
        ("comment.py", 'x = "<!-- "\n', "<code>x = '&#60;!-- '</code>"),
        ("surrogate.py", '"""\\ud800"""\ny = 1\n', "    ?"),
        ("again.py", "from again import again\nfrom . import nothing\nfrom .... import far\n", "None."),
        ("empty.py", "", "It has no module docstring."),
    ],
)
def test_odd_files_have_a_page_that_says_so(tmp_path, name, source, says):
    build(write(tmp_path / "repo", {name: source}), tmp_path / "out")
    assert says in (tmp_path / "out" / f"{name}.md").read_text()
    assert dead_links(tmp_path / "out") == []


def test_one_module_name_in_two_files(tmp_path):
    build(
        write(tmp_path / "repo", {"a/same.py": "", "b/same.py": "", "b/use.py": "import same"}),
        tmp_path / "out",
    )
    assert "**Name used twice.**" in (tmp_path / "out/a/same.py.md").read_text()
    assert "b/use.py" in section((tmp_path / "out/b/same.py.md").read_text(), "Imported by")


def test_an_empty_repository(tmp_path):
    (tmp_path / "repo").mkdir()
    outcome = build(tmp_path / "repo", tmp_path / "out")
    assert (outcome.files, outcome.pages) == (0, 2)
    assert "There is no Python file here" in (tmp_path / "out/index.md").read_text()


def test_a_package_as_the_root(tmp_path):
    build(
        write(tmp_path / "pkg", {"__init__.py": "", "a.py": "from pkg.b import x", "b.py": "x = 1"}),
        tmp_path / "o",
    )
    assert "[`b.py`](b.py.md)" in section((tmp_path / "o/a.py.md").read_text(), "Imports")
    assert (tmp_path / "o/rooms.svg").is_file()


def test_only_what_changed_is_done_again(tmp_path):
    root, out = write(tmp_path / "repo", FILES), tmp_path / "out"
    first, again = build(root, out), build(root, out)
    assert first.parsed == len(set(FILES.values())) and (again.parsed, again.written) == (0, 0)
    (root / "pkg/back.py").unlink()
    (root / "pkg/low.py").write_text('"""Other."""\nclass Thing: ...\n')
    third = build(root, out)
    assert third.parsed == 1 and 0 < third.written < third.pages
    assert not (out / "pkg/back.py.md").exists() and dead_links(out) == []
    build(root, tmp_path / "fresh")
    made_anew = {p.relative_to(tmp_path / "fresh"): p.read_text() for p in (tmp_path / "fresh").rglob("*.*")}
    assert made_anew == {p.relative_to(out): p.read_text() for p in out.rglob("*.*")}


@pytest.mark.parametrize("state", ["", "[]", '{"maker": 1, "pages": ["../keep.txt"]}', '{"pages": 3}'])
def test_a_spoilt_state_is_made_anew_and_removes_nothing_outside(tmp_path, state):
    root, out = write(tmp_path / "repo", FILES), tmp_path / "out"
    (tmp_path / "keep.txt").write_text("mine")
    write(out, {".repodocs.json": state})
    assert build(root, out).parsed == len(set(FILES.values()))
    assert (tmp_path / "keep.txt").exists()


def test_the_command(tmp_path, capsys):
    root = write(tmp_path / "repo", {"a.py": "x = 1", "bad.py": "("})
    assert main([str(root), "--out", str(tmp_path / "out")]) == 0
    assert "2 files, 2 parsed anew" in (printed := capsys.readouterr().out) and "problem in bad.py" in printed
    assert main([str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([str(root), "--out", str(tmp_path / "file")]) == 1
    assert "cannot write to" in capsys.readouterr().err


def test_a_chain_of_imports_longer_than_the_stack():
    graph = {str(n): [str(n + 1)] for n in range(5000)} | {"5000": ["4999"]}
    assert heights(graph)["0"] == 4999
    assert cycles(graph) == {"4999": ["4999", "5000"], "5000": ["4999", "5000"]}


def test_longmesh_never_imports_it():
    package = Path(__file__).parents[3] / "src"
    assert not [
        p for p in package.rglob("*.py") if re.search(r"^\s*(import|from) repodocs", p.read_text(), re.M)
    ]


def test_our_own_sources(tmp_path):
    sources = Path(__file__).parents[3] / "src"
    outcome = build(sources, tmp_path)
    assert outcome.problems == () and dead_links(tmp_path) == []
    assert all((tmp_path / f"{path.relative_to(sources)}.md").is_file() for path in sources.rglob("*.py"))
    rooms = (tmp_path / "longmesh/index.md").read_text()
    assert "`tensor` imports `attention`" in rooms and "Cycle between rooms" not in rooms
