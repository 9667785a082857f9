"""The page of a folder, and the one index of all symbols."""

from collections.abc import Iterator

from repodocs import markdown as md
from repodocs.facts import first_line
from repodocs.file_page import GENERATED, anchors, file_link
from repodocs.repository import File, Repository, folder_of
from repodocs.rooms import Rooms

SYMBOLS = "symbols.md"


def folder_page(repository: Repository, folder: str, rooms: Rooms | None) -> str:
    """What lives in a folder and where its imports go; `rooms` is the picture to show, if there is one."""
    here = md.index_of(folder)
    title = md.code(folder or repository.name)
    lines = [f"# {title}", "", GENERATED, ""]
    if folder:
        parent = folder_of(folder)
        lines += [f"In {md.link(md.code(parent or repository.name), md.index_of(parent), here)}", ""]
    else:
        lines += [f"{md.link('All symbols', SYMBOLS, here)}", ""]
    if not repository.files:
        lines += ["> **Problem.** There is no Python file here.", ""]
    lines += [*_folders(repository, folder, here), *_files(repository, folder, here)]
    lines += _direction(repository, folder, here)
    if rooms:
        lines += ["## Rooms", "", *_rooms(rooms), ""]
    return "\n".join(lines) + "\n"


def symbols_page(repository: Repository) -> str:
    """Every symbol that is not in a test, by name. One that is defined in several places is listed with all."""
    found: dict[str, list[str]] = {}
    for file in repository.files.values():
        if not file.is_test:
            for symbol, anchor in anchors(file):
                target = md.link(md.code(file.path), md.page_of(file.path), SYMBOLS, anchor)
                found.setdefault(symbol.name, []).append(f"{symbol.kind} in {target}")
    lines = ["# Symbols", "", GENERATED, "", *([] if found else ["There are none."])]
    letter = ""
    for name in sorted(found, key=lambda n: (n.lstrip("_").lower(), n)):
        first = name.lstrip("_")[:1].upper() or "_"
        if first != letter:
            letter = first
            lines += ["", f"## {md.escape(letter)}", ""]
        several = f" ({len(found[name])} places)" if len(found[name]) > 1 else ""
        lines.append(f"- {md.code(name)}{several}: {', '.join(found[name])}")
    return "\n".join(lines) + "\n"


def _folders(repository: Repository, folder: str, here: str) -> Iterator[str]:
    below = [name for name in repository.folders if name and folder_of(name) == folder]
    if below:
        yield from ("## Folders", "")
        for name in below:
            yield f"- {md.link(md.code(name), md.index_of(name), here)}{_purpose(_package_file(repository, name))}"
        yield ""


def _files(repository: Repository, folder: str, here: str) -> Iterator[str]:
    files = repository.in_folder(folder)
    if files:
        yield from ("## Files", "")
        for path in files:
            yield f"- {file_link(path, here)}{_purpose(repository.files[path])}"
        yield ""


def _package_file(repository: Repository, folder: str) -> File | None:
    return repository.files.get(f"{folder}/__init__.py")


def _purpose(file: File | None) -> str:
    if file is None:
        return ""
    if file.problems:
        return f": **problem**, {md.escape(file.problems[0])}"
    return f": {md.prose(first_line(file.facts.doc))}" if file.facts.doc.strip() else ""


def _direction(repository: Repository, folder: str, here: str) -> list[str]:
    """The folders that files in and under this one import, and those that import them."""
    if not folder:
        return []
    inside = [path for path in repository.files if path.startswith(f"{folder}/")]
    out = _outside_folders(folder, (target for path in inside for target in repository.imports[path]))
    into = _outside_folders(folder, (source for path in inside for source in repository.importers[path]))
    both = sorted(set(out) & set(into))
    lines = ["## Direction of imports", ""]
    for title, folders in (("Imports from", out), ("Is imported by", into), ("Both ways", both)):
        links = [md.link(md.code(name or repository.name), md.index_of(name), here) for name in folders]
        lines.append(f"- {title}: {', '.join(links) or 'none'}")
    return [*lines, ""]


def _outside_folders(folder: str, paths: Iterator[str]) -> list[str]:
    return sorted({folder_of(path) for path in paths if not path.startswith(f"{folder}/")})


def _rooms(rooms: Rooms) -> Iterator[str]:
    yield "![Rooms and the imports between them](rooms.svg)"
    yield ""
    for source, target, count in rooms.edges:
        yield f"- {md.code(source)} imports {md.code(target)} ({count})"
    if rooms.cycles:
        yield ""
        yield f"> **Cycle between rooms:** {', '.join(map(md.code, rooms.cycles))}."
