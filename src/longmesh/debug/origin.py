"""Where in the forward pass the running backward op comes from.

Autograd numbers its nodes as the forward pass makes them. What is noted during the forward pass together with
the number of the next node tells, in the backward pass, which part of it the running node belongs to: no hook on
any tensor, and the graph stays as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import _get_sequence_nr  # pyright: ignore[reportAttributeAccessIssue]

Value = TypeVar("Value")


def in_backward() -> bool:
    """Whether this thread is running a backward pass (also if that recomputes a forward)."""
    return torch._C._current_graph_task_id() != -1


def running_node() -> Any:
    """The autograd node this thread is running, or None."""
    return torch._C._current_autograd_node()  # pyright: ignore[reportAttributeAccessIssue]


class Spans(Generic[Value]):
    """Values that hold from one node number until the next value is noted."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._values: list[Value] = []

    def note(self, value: Value) -> None:
        """Nodes that are made from now on belong to `value`."""
        self._starts.append(_get_sequence_nr())
        self._values.append(value)

    def of_running_node(self) -> Value | None:
        node = running_node()
        if node is None:
            return None
        place = bisect_right(self._starts, node._sequence_nr()) - 1
        return self._values[place] if place >= 0 else None


class Makers(Generic[Value]):
    """Values of the ops that made nodes: noted inside an op, found again in its backward."""

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}

    def note(self, value: Value) -> None:
        """The running op, whose node (if it has one) is the last that was made, belongs to `value`."""
        self._values.setdefault(_get_sequence_nr() - 1, value)

    def of_running_node(self) -> Value | None:
        node = running_node()
        return None if node is None else self._values.get(node._sequence_nr())
