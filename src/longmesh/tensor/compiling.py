"""Our functions under torch.compile: one call in its graph, or a call between two graphs.

A compiler that reads our Python would meet layouts and meshes, which are no values of its own. So, while it traces,
what crosses between plain tensors and DTensors is put into the graph as it is (`Traceable`): later stages run it, and
see its local ops and collectives. What compares ranks or keeps count ends the graph (`between_graphs`). Outside of a
compiler nothing here is used, and the compiler is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from longmesh._torch.process_wide import run_while_tracing

P = ParamSpec("P")
R = TypeVar("R")


class Traceable:
    """A function of tensors and constants that a compiler puts into its graph as it is: call `run`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> Traceable:
        return self

    def run(self, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            _allow(self)
        return self.function(*args)


@run_while_tracing
def _allow(traceable: Traceable) -> bool:
    torch.compiler.allow_in_graph(traceable.function)
    return True


def between_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which ends the graph of a compiler that comes to it, and runs as it does otherwise."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        call = function
        if torch.compiler.is_compiling():
            call = cast(Callable[P, R], torch.compiler.disable(function))
        return call(*args, **kwargs)

    return run
