"""Cycles and heights of a directed graph, without recursion: a chain of imports may be longer than the stack."""

from collections.abc import Iterable, Mapping


def components(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Strongly connected components, each after all that it points to."""
    order = _finished(graph, list(graph))
    reverse: dict[str, list[str]] = {node: [] for node in graph}
    for node, targets in graph.items():
        for target in targets:
            reverse[target].append(node)
    owner: dict[str, int] = {}
    found: list[list[str]] = []
    for start in reversed(order):
        if start in owner:
            continue
        members, stack = [], [start]
        owner[start] = len(found)
        while stack:
            node = stack.pop()
            members.append(node)
            for source in reverse[node]:
                if source not in owner:
                    owner[source] = len(found)
                    stack.append(source)
        found.append(sorted(members))
    return found[::-1]


def cycles(graph: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Node -> the nodes it is in a cycle with, itself among them; only nodes that are in one."""
    return {node: group for group in components(graph) if len(group) > 1 for node in group}


def heights(graph: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """0 for what points to nothing, else one more than the highest it points to; the same all around a cycle."""
    found: dict[str, int] = {}
    for group in components(graph):
        below = [found[target] for node in group for target in graph[node] if target not in group]
        for node in group:
            found[node] = max(below, default=-1) + 1
    return found


def _finished(graph: Mapping[str, Iterable[str]], starts: list[str]) -> list[str]:
    """Nodes in the order in which a depth-first walk leaves them."""
    seen: set[str] = set()
    order: list[str] = []
    for start in starts:
        stack = [] if start in seen else [(start, iter(graph[start]))]
        seen.add(start)
        while stack:
            node, targets = stack[-1]
            target = next((t for t in targets if t not in seen), None)
            if target is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(target)
                stack.append((target, iter(graph[target])))
    return order
