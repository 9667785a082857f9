"""The rooms of a package, its folders and single files, with the imports between them; drawn as SVG.

A room stands above all that it imports, so an arrow goes down; one inside a cycle is red.
"""

from collections import Counter
from dataclasses import dataclass
from html import escape

from repodocs.cycles import cycles, heights
from repodocs.markdown import clean
from repodocs.repository import Repository

WIDTH, HEIGHT, GAP_X, GAP_Y, MARGIN = 132, 34, 22, 62, 20
COLORS = ("#3366aa", "#aa5522", "#338855", "#7744aa", "#997700", "#227788")


@dataclass(frozen=True)
class Rooms:
    """Names, and edges (from, to, number of importing statements' files)."""

    names: tuple[str, ...]
    edges: tuple[tuple[str, str, int], ...]

    @property
    def graph(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {name: [] for name in self.names}
        for source, target, _ in self.edges:
            found[source].append(target)
        return found

    @property
    def cycles(self) -> list[str]:
        return sorted(cycles(self.graph))


def packages(repository: Repository) -> list[str]:
    """Folders that are packages and lie in none."""
    folders = [f for f in repository.folders if f"{f}/__init__.py".lstrip("/") in repository.files]
    return [f for f in folders if not any(f != other and _is_under(f, other) for other in folders)]


def rooms_of(repository: Repository, package: str) -> Rooms:
    inside = {path: _room(path, package) for path in repository.files if _is_under(path, package)}
    counts: Counter[tuple[str, str]] = Counter()
    for path, room in inside.items():
        for target in repository.imports[path]:
            if target in inside and inside[target] != room:
                counts[room, inside[target]] += 1
    edges = tuple((source, target, count) for (source, target), count in sorted(counts.items()))
    return Rooms(tuple(sorted(set(inside.values()))), edges)


def draw(rooms: Rooms) -> str:
    """The picture: a row for each height."""
    height = heights(rooms.graph)
    rows = [
        [n for n in rooms.names if height[n] == level] for level in sorted(set(height.values()), reverse=True)
    ]
    width = max((len(row) for row in rows), default=0) * (WIDTH + GAP_X) - GAP_X + 2 * MARGIN
    total = len(rows) * (HEIGHT + GAP_Y) - GAP_Y + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        left = (width - len(row) * (WIDTH + GAP_X) + GAP_X) / 2
        for place, name in enumerate(row):
            at[name] = (left + place * (WIDTH + GAP_X), MARGIN + number * (HEIGHT + GAP_Y))
    shapes = [*_arrows(rooms, at), *(_box(name, *where) for name, where in at.items())]
    size = f'viewBox="0 0 {max(width, 1):.0f} {max(total, 1):.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    marker = (
        '<marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    )
    tip = f'<defs>{marker}<path d="M0 0 6 3 0 6z" fill="#555"/></marker></defs>'
    return "\n".join([head, tip, *shapes, "</svg>"]) + "\n"


def _arrows(rooms: Rooms, at: dict[str, tuple[float, float]]) -> list[str]:
    group = cycles(rooms.graph)
    shapes = []
    for source, target, count in rooms.edges:
        (x1, y1), (x2, y2) = at[source], at[target]
        in_cycle = target in group.get(source, [])
        color = "#cc0000" if in_cycle else COLORS[rooms.names.index(source) % len(COLORS)]
        start, end = (y1 + HEIGHT, y2) if y1 <= y2 - HEIGHT else (y1, y2 + HEIGHT)
        x1, x2, bend = x1 + WIDTH / 2, x2 + WIDTH / 2, (end - start) / 2
        path = (
            f"M{x1:.0f} {start:.0f}C{x1:.0f} {start + bend:.0f} {x2:.0f} {end - bend:.0f} {x2:.0f} {end:.0f}"
        )
        title = f"<title>{_text(source)} imports {_text(target)}: {count}</title>"
        shapes.append(
            f'<path d="{path}" fill="none" stroke="{color}" opacity="0.6" marker-end="url(#tip)">{title}</path>'
        )
    return shapes


def _box(name: str, x: float, y: float) -> str:
    label = name if len(name) <= 20 else name[:19] + "…"
    box = f'<rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="#f4f6fa" stroke="#556"/>'
    where = f'x="{x + WIDTH / 2:.0f}" y="{y + HEIGHT / 2 + 4:.0f}" text-anchor="middle"'
    return f"<g>{box}<text {where}>{_text(label)}</text></g>"


def _text(text: str) -> str:
    return escape(clean(text))


def _is_under(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def _room(path: str, package: str) -> str:
    """The first name below the package; the package's own `__init__` stands for its front door."""
    rest = path[len(package) + 1 :] if package else path
    return rest.split("/")[0] if "/" in rest else rest
