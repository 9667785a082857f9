"""The documentation site in a directory of its own, built as `make docs` builds it, and its links."""

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parents[2]
LINK = re.compile(r'<(?:a|link|img|script)\b[^>]*?\s(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\s(?:id|name)="([^"]*)"')


def lay_out(folder: Path, docs: Path, sources: Path) -> None:
    """What mkdocs needs in `folder`: our settings and hooks, with these pages and these sources."""
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(docs, folder / "docs", ignore=shutil.ignore_patterns("files"))
    (folder / "src").symlink_to(sources, target_is_directory=True)
    (folder / "tools").symlink_to(ROOT / "tools", target_is_directory=True)


def run_mkdocs(folder: Path) -> subprocess.CompletedProcess[str]:
    """`mkdocs build` in `folder`, with what it says on standard output and error in one text.

    Not --quiet: what is not shown is not counted either, so warnings would not end the build.
    """
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )


def dead_links(site: Path) -> list[str]:
    """Links of the pages of a built site that lead to no file of it, or to no place of that file."""
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    anchors = {name: {unquote(one) for one in ANCHOR.findall(text)} for name, text in pages.items()}
    dead = []
    for name, text in pages.items():
        for target in dict.fromkeys(LINK.findall(text)):
            if re.match(r"[a-z]+:|//", target):
                continue
            file, _, fragment = target.partition("#")
            base = "" if file.startswith("/") else posixpath.dirname(name)
            path = posixpath.normpath(posixpath.join(base, unquote(file).lstrip("/"))) if file else name
            exists = (site / path).is_file()
            if not exists or (fragment and unquote(fragment) not in anchors.get(path, ())):
                dead.append(f"{name} -> {target}")
    return dead
