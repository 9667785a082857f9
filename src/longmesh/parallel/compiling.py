"""Styles under torch.compile: what crosses between plain tensors and DTensors is one call in the graph.

A compiler that reads our Python would meet layouts and meshes, which are no values of its own. So, while it traces,
such a function is put into the graph as it is; the compiler's later stages run it and see its local ops and
collectives. Outside of a compiler nothing here is used, and the compiler is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from longmesh._torch.process_wide import run_while_tracing


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
