"""Text from sources as Markdown that shows it and does nothing else; links between pages."""

import posixpath
import re
from urllib.parse import quote

_SPECIAL = re.compile(r"[\\`*_{}\[\]#|~^$<>&]")
_SPAN = re.compile(r"`([^`\n]+)`")


def clean(text: str) -> str:
    """On one line, without control characters and lone surrogates."""
    return text if text.isidentifier() else " ".join(_printable(text).split())


def escape(text: str) -> str:
    """Plain text. No character of it is markup any more."""
    return _entities(clean(text))


def code(text: str) -> str:
    """A code span: its fence is longer than any run of backticks inside.

    Text with tags is written as HTML: Markdown's own parsers may take a comment or a tag for one even between fences.
    """
    text = clean(text)
    if "<" in text:
        return f"<code>{_entities(text)}</code>"
    if "`" not in text:
        return f"`{text}`" if text else ""
    fence = "`" * (max(map(len, re.findall("`+", text))) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def prose(text: str) -> str:
    """A sentence of a docstring: its code spans stay code, all else is plain text."""
    parts = _SPAN.split(clean(text))
    return "".join(code(part) if index % 2 else _entities(part) for index, part in enumerate(parts))


def paragraphs(doc: str) -> list[str]:
    """A docstring, as written, in an indented block: its pictures keep their columns."""
    return ["    " + _printable(line) if line else "" for line in doc.expandtabs(4).splitlines()]


def page_of(path: str) -> str:
    """The page of a file."""
    return f"{path}.md"


def index_of(folder: str) -> str:
    """The page of a folder; that of the root for ""."""
    return posixpath.join(folder, "index.md")


def anchor(symbol: str) -> str:
    if symbol.isidentifier():
        return f"s-{symbol}"
    return "s-" + re.sub(r"[^A-Za-z0-9_.-]", lambda m: f"-{ord(m.group()):x}-", symbol)


def link(text: str, target: str, here: str, fragment: str = "") -> str:
    """A link from page `here` to page `target`; `text` is Markdown already."""
    if target == here:
        return f"[{text}](#{fragment})"
    relative = quote(posixpath.relpath(f"/{target}", posixpath.dirname(f"/{here}")))
    return f"[{text}]({relative}{'#' + fragment if fragment else ''})"


def _entities(text: str) -> str:
    return _SPECIAL.sub(lambda match: f"&#{ord(match.group())};", text)


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    text = text.encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in text)
