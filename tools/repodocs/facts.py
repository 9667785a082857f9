"""What a file's syntax tree says: purpose, symbols, imports, and where each identifier occurs."""

import ast
import builtins
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

MAX_VALUE = 100  # characters of a constant's value
_BUILTINS = frozenset(dir(builtins))
_NAMED_BY: dict[type[ast.AST], str] = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.FunctionDef: "name",
    ast.AsyncFunctionDef: "name",
    ast.ClassDef: "name",
}
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Symbol:
    """A class, function, method or constant; `name` is qualified inside the file: `Class.method`."""

    name: str
    kind: str
    line: int
    signature: str
    summary: str


@dataclass(frozen=True)
class Import:
    """`from module import name as bound`; without a `name` it is `import module as bound`."""

    module: str
    name: str
    level: int
    bound: str


@dataclass(frozen=True)
class Facts:
    """Everything the pages say about one file on its own. JSON goes in and out without loss."""

    doc: str = ""
    symbols: tuple[Symbol, ...] = ()
    imports: tuple[Import, ...] = ()
    chains: tuple[str, ...] = ()  # dotted names that start at an imported one: masks.documents
    words: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # identifier -> place -> lines
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "symbols": [*map(vars, self.symbols)], "imports": [*map(vars, self.imports)]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Facts":
        symbols = tuple(Symbol(**symbol) for symbol in data["symbols"])
        imports = tuple(Import(**one) for one in data["imports"])
        return Facts(data["doc"], symbols, imports, tuple(data["chains"]), data["words"], data["problem"])


def facts_of(text: str) -> Facts:
    """The facts of a file's text; of one that does not parse, only the problem."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape is the file's business
            tree = ast.parse(text)
        placed = list(_placed(tree))
        imports = tuple(_imports(node for node, _ in placed))
        bound = {one.bound for one in imports}
        return Facts(
            doc=ast.get_docstring(tree) or "",
            symbols=tuple(_symbols(tree.body, "")),
            imports=imports,
            chains=tuple(sorted({chain for chain in _chains(placed) if chain.split(".")[0] in bound})),
            words=_words(placed),
        )
    except SyntaxError as error:
        return Facts(problem=f"The file does not parse: {error.msg} (line {error.lineno or '?'}).")
    except (ValueError, RecursionError, MemoryError) as error:
        return Facts(problem=f"The file does not parse: {str(error) or type(error).__name__}.")


def first_line(doc: str) -> str:
    """The first sentence's line or lines: up to the first blank one."""
    return " ".join(doc.strip().split("\n\n")[0].split())


def _symbols(body: Iterable[ast.stmt], owner: str) -> Iterator[Symbol]:
    for node in body:
        if isinstance(node, _DEFINITIONS):
            yield _definition(node, owner)
            if isinstance(node, ast.ClassDef):
                yield from _symbols(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.If):
            yield from _symbols([*node.body, *node.orelse], owner)
        elif isinstance(node, ast.Try):
            handlers = [child for handler in node.handlers for child in handler.body]
            yield from _symbols([*node.body, *handlers, *node.orelse, *node.finalbody], owner)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from _constants(node, owner)


def _definition(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, owner: str) -> Symbol:
    summary = first_line(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in [*node.bases, *node.keywords])
        signature = f"class {node.name}({bases})" if bases else f"class {node.name}"
        return Symbol(owner + node.name, "class", node.lineno, signature, summary)
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = f"{prefix} {node.name}({ast.unparse(node.args)}){returns}"
    return Symbol(owner + node.name, "method" if owner else "function", node.lineno, signature, summary)


def _constants(node: ast.Assign | ast.AnnAssign, owner: str) -> Iterator[Symbol]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    text = ast.unparse(node)
    signature = text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"
    for target in targets:
        for name in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            if isinstance(name, ast.Name):
                kind = "field" if owner else "constant"
                yield Symbol(owner + name.id, kind, node.lineno, signature, "")


def _placed(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Every node, in the order of the text, with the name of the outermost function (or class) that it stands in."""
    stack: list[tuple[ast.AST, str, bool]] = [(child, "", False) for child in reversed(tree.body)]
    while stack:
        node, place, in_function = stack.pop()
        yield node, place
        if isinstance(node, _DEFINITIONS) and not in_function:
            place = f"{place}.{node.name}" if place else node.name
            in_function = not isinstance(node, ast.ClassDef)
        stack.extend((child, place, in_function) for child in reversed(_children(node)))


def _children(node: ast.AST) -> list[ast.AST]:
    """`ast.iter_child_nodes` without contexts and operators, which are a third of a tree and hold no name."""
    found: list[ast.AST] = []
    for name in node._fields:
        if name != "ctx" and name != "op":
            value = getattr(node, name, None)
            if isinstance(value, list):
                found.extend(item for item in value if isinstance(item, ast.AST))
            elif isinstance(value, ast.AST):
                found.append(value)
    return found


def _imports(nodes: Iterable[ast.AST]) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "", 0, alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(node.module or "", alias.name, node.level, alias.asname or alias.name)


def _chains(placed: list[tuple[ast.AST, str]]) -> Iterator[str]:
    for node, _ in placed:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


def _words(placed: list[tuple[ast.AST, str]]) -> dict[str, dict[str, list[int]]]:
    """Identifier -> the definition it stands in ("" at the top level) -> lines; all sorted."""
    found: dict[str, dict[str, set[int]]] = {}
    for node, place in placed:
        word = _identifier(node)
        if len(word) > 1 and word not in _BUILTINS:
            found.setdefault(word, {}).setdefault(place, set()).add(getattr(node, "lineno", 0))
    return {
        word: {place: sorted(lines) for place, lines in sorted(places.items())}
        for word, places in sorted(found.items(), key=lambda item: (item[0].lower(), item[0]))
    }


def _identifier(node: ast.AST) -> str:
    if isinstance(node, ast.alias):
        return (node.asname or node.name).split(".")[-1]
    attribute = _NAMED_BY.get(type(node))
    return (attribute and getattr(node, attribute)) or ""
