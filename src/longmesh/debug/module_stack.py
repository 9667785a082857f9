"""Which module is running, forward or backward, by its path from the outermost module that was called.

    Transformer                    called by the user: named by its class
    Transformer.layers.0.mlp       its submodules: by their path

Needs no change of the model: torch's global module hooks are there while the stack is entered. What the backward pass
runs belongs to the module that made it in the forward pass; what a backward pass recomputes (activation
checkpointing) to the module that recomputes it.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from longmesh._torch.process_wide import watch_modules
from longmesh.debug.op_watch import Spans, in_backward
from longmesh.tensor import DTensor

GLOBAL = "Global"


@dataclass(slots=True)
class ModuleInfo:
    """A module that has run: its class, the module that called it first, its own parameters."""

    name: str
    type_name: str
    parent: str
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def placements(self) -> dict[str, tuple[Any, ...]]:
        """Of the parameters that are DTensors."""
        return {k: p.placements for k, p in self.parameters.items() if isinstance(p, DTensor)}


@dataclass(frozen=True, slots=True)
class ModuleRun:
    """One forward call of a module, in microseconds of the process's clock."""

    name: str
    start_us: float
    end_us: float
    is_recomputed: bool


class ModuleStack:
    """The modules that are running. A context manager; entering it forgets what was seen before."""

    def __init__(self) -> None:
        self.modules: dict[str, ModuleInfo] = {}
        self.runs: list[ModuleRun] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._running: list[tuple[str, bool, float]] = []
        self._made_by: Spans[str] = Spans()
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> ModuleStack:
        self.__init__()
        self._hooks.callback(watch_modules(self._enter_module, self._leave_module))
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def where(self) -> tuple[str, bool]:
        """The module that is running, and whether in a backward pass."""
        backward = in_backward()
        if self._running and self._running[-1][1] == backward:
            return self._running[-1][0], backward
        return (self._made_by.of_running_node() or GLOBAL if backward else GLOBAL), backward

    def path(self, name: str) -> list[str]:
        """`name`, its parent, ..., up to `Global`."""
        found = [name]
        while found[-1] != GLOBAL:
            found.append(self.modules[found[-1]].parent)
        return found

    def children(self, name: str) -> list[str]:
        return [m.name for m in self.modules.values() if m.parent == name]

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        parent = self._running[-1][0] if self._running else GLOBAL
        name = self._name(module)
        if name not in self.modules:
            parameters = {k: p.data for k, p in module.named_parameters(recurse=False)}
            self.modules[name] = ModuleInfo(name, type(module).__name__, parent, parameters)
        self._running.append((name, in_backward(), now_us()))
        self._made_by.note(name)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._running:  # entered before this stack was
            return
        name, backward, start = self._running.pop()
        self.runs.append(ModuleRun(name, start, now_us(), backward))
        self._made_by.note(self._running[-1][0] if self._running else GLOBAL)

    def _name(self, module: nn.Module) -> str:
        if module not in self._names:
            root = _unused(type(module).__name__, set(self._names.values()))
            for path, part in module.named_modules():
                self._names.setdefault(part, f"{root}.{path}" if path else root)
        return self._names[module]


def _unused(name: str, taken: set[str]) -> str:
    number, candidate = 0, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def now_us() -> float:
    """The process's clock."""
    return time.perf_counter() * 1e6
