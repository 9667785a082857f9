"""Reads a repository, writes its pages. What has not changed is neither parsed nor written again.

`DIR/.repodocs.json` holds the facts of each file under the hash of its content, and the names of the pages, so that
pages of files that are gone are removed. It is only a cache: lost or spoilt, everything is made anew.
"""

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from repodocs import markdown as md
from repodocs.cycles import cycles
from repodocs.discover import Source, discover
from repodocs.facts import Facts, facts_of
from repodocs.file_page import file_page
from repodocs.index_pages import SYMBOLS, folder_page, symbols_page
from repodocs.repository import File, Repository
from repodocs.rooms import draw, packages, rooms_of

STATE = ".repodocs.json"


@dataclass(frozen=True)
class Outcome:
    """What one run did."""

    files: int
    parsed: int
    pages: int
    written: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        bad = "".join(f"\nproblem in {problem}" for problem in self.problems)
        return f"{self.files} files, {self.parsed} parsed anew; {self.pages} pages, {self.written} written anew{bad}"


def build(root: Path, out: Path) -> Outcome:
    """Write a page for every Python file under `root`, and the indexes and pictures, into `out`."""
    known, old_pages = _load(out / STATE)
    sources = discover(root)
    facts = {source.digest: _facts(source, known) for source in sources}
    name = root.resolve().name
    repository = Repository(name, {s.path: File(s, facts[s.digest]) for s in sources})
    pages = make_pages(repository)
    written = [path for path, text in pages.items() if _write(out / path, text)]
    for path in old_pages - pages.keys():
        _remove(out, path)
    if facts.keys() != known.keys() or old_pages != pages.keys():
        kept = {digest: one.to_json() for digest, one in facts.items() if digest}
        _write(out / STATE, json.dumps({"maker": _maker(), "facts": kept, "pages": sorted(pages)}))
    problems = tuple(f"{f.path}: {md.clean(f.problems[0])}" for f in repository.files.values() if f.problems)
    return Outcome(len(sources), len(facts.keys() - known.keys()), len(pages), len(written), problems)


def make_pages(repository: Repository) -> dict[str, str]:
    """Path of each page, in the output directory -> its text."""
    in_cycle = cycles(repository.imports)
    pages = {
        md.page_of(path): file_page(repository, file, in_cycle.get(path, []))
        for path, file in repository.files.items()
    }
    pictured = {package: rooms_of(repository, package) for package in packages(repository)}
    for folder in repository.folders:
        rooms = pictured.get(folder)
        rooms = rooms if rooms and rooms.edges else None
        pages[md.index_of(folder)] = folder_page(repository, folder, rooms)
        if rooms:
            pages[f"{folder}/rooms.svg".lstrip("/")] = draw(rooms)
    pages[SYMBOLS] = symbols_page(repository)
    return pages


def _facts(source: Source, known: dict[str, Facts]) -> Facts:
    if source.digest in known:
        return known[source.digest]
    return facts_of(source.text) if source.digest else Facts()


def _write(path: Path, text: str) -> bool:
    """Whether the file had to be written."""
    data = text.encode()
    if path.is_file() and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return True


def _remove(out: Path, page: str) -> None:
    """Remove a page of an earlier run; nothing outside `out`, whatever the state says."""
    path = out / page
    if path.is_file() and path.resolve().is_relative_to(out.resolve()):
        path.unlink()


def _load(path: Path) -> tuple[dict[str, Facts], set[str]]:
    """The facts and pages of the last run; no facts if another program made them."""
    try:
        state = json.loads(path.read_text("utf-8"))
        pages = {str(page) for page in state["pages"]}
        if state["maker"] != _maker():
            return {}, pages
        return {digest: Facts.from_json(data) for digest, data in state["facts"].items()}, pages
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, set()


def _maker() -> str:
    """This program and this Python: facts of others may say other things."""
    own = sorted(Path(__file__).parent.glob("*.py"))
    content = b"".join(path.read_bytes() for path in own)
    return hashlib.sha256(content + sys.version.encode()).hexdigest()
