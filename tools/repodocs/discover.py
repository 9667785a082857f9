"""The Python files of a directory, as text. Links to directories are not followed, so they cannot form a cycle."""

import hashlib
import io
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED = {"__pycache__", "build", "dist", "node_modules", "site-packages"}


@dataclass(frozen=True)
class Source:
    """One file: `path` from the root with forward slashes, its dotted module name, its text as far as it has one."""

    path: str
    module: str
    digest: str
    text: str
    problem: str = ""


def discover(root: Path) -> list[Source]:
    """All sources under `root`, sorted by path."""
    return [_read(root, path) for path in sorted(_python_files(root), key=lambda p: p.as_posix())]


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [name for name in sorted(folders) if _is_wanted(here / name)]
        yield from (here / name for name in names if name.endswith(".py"))


def _is_wanted(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in SKIPPED
    return not hidden and not (folder / "pyvenv.cfg").exists()


def _read(root: Path, path: Path) -> Source:
    relative, module = path.relative_to(root).as_posix(), module_name(root, path)
    relative = relative.encode("utf-8", "backslashreplace").decode()
    try:
        data = path.read_bytes()
    except OSError as error:
        return Source(relative, module, "", "", f"The file could not be read: {error.strerror or error}.")
    text, problem = decode(data)
    return Source(relative, module, hashlib.sha256(data).hexdigest(), text, problem)


def module_name(root: Path, path: Path) -> str:
    """The dotted name by which other files import this one: it starts at the outermost package.

    >>> module_name(Path("r"), Path("r/scripts/run.py"))
    'run'
    """
    parts = [] if path.name == "__init__.py" else [path.stem]
    folder = path.parent
    while (folder / "__init__.py").exists():
        parts.insert(0, folder.resolve().name if folder == root else folder.name)
        if folder == root:
            break
        folder = folder.parent
    return ".".join(parts)


def decode(data: bytes) -> tuple[str, str]:
    """The text in the encoding that the file declares, and what was wrong with it."""
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
        return data.decode(encoding), ""
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return data.decode(
            "utf-8", "replace"
        ), f"The encoding is wrong, so some characters are lost: {error}."
