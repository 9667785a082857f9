"""Where in the forward pass the running backward op comes from.

Autograd numbers its nodes as the forward pass makes them. What is noted during the forward pass together with
the number of the next node tells, in the backward pass, which part of it the running node belongs to: no hook on
any tensor, and the graph stays as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

from longmesh._torch import in_backward, next_node_number, node_number, running_node

__all__ = ["Makers", "Spans", "in_backward", "running_node"]

Value = TypeVar("Value")


class Spans(Generic[Value]):
    """Values that hold from one node number until the next value is noted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[Value] = []

    def note(self, value: Value) -> None:
        """Nodes that are made from now on belong to `value`."""
        self._starts.append(next_node_number())
        self._values.append(value)

    def of_running_node(self) -> Value | None:
        node = running_node()
        if node is None:
            return None
        place = bisect_right(self._starts, node_number(node)) - 1
        return self._values[place] if place >= 0 else None


class Makers(Generic[Value]):
    """Values of the ops that made nodes: noted inside an op, found again in its backward."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}

    def note(self, value: Value) -> None:
        """The running op, whose node (if it has one) is the last that was made, belongs to `value`."""
        self._values.setdefault(next_node_number() - 1, value)

    def of_running_node(self) -> Value | None:
        node = running_node()
        return None if node is None else self._values.get(node_number(node))
