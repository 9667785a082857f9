"""CommDebugMode: which module sends what, forward and backward.

    mode = CommDebugMode()
    with mode:
        model(x).sum().backward()
    print(mode)                                      # a tree: collectives, bytes, time by module
    mode.generate_chrome_trace("trace.json")         # for chrome://tracing or ui.perfetto.dev

Counts are of what this rank did. Collectives of longmesh are counted where it issues them, with their bytes and
axes; collectives of others (DDP, FSDP2, torch.distributed) as they reach torch's dispatcher, with the bytes that a
ring would send.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from longmesh._torch import TorchDispatchMode
from longmesh.comm import AxisGroup, CommEvent, CommObserver, observe_comm
from longmesh.comm.record import is_told
from longmesh.debug import comm_report
from longmesh.debug.foreign import describe_foreign, issued_by_longmesh
from longmesh.debug.module_stack import GLOBAL, ModuleStack, now_us
from longmesh.rules.tree import all_tensors
from longmesh.tensor import DTensor


@dataclass(slots=True)
class CommCall:
    """One collective: what, in which module, when. `end_us` is None for one whose end nobody here waited for."""

    op: Any
    event: CommEvent
    module: str
    is_backward: bool
    start_us: float
    end_us: float | None = None
    waited_us: float = 0.0


@dataclass(frozen=True, slots=True)
class TracedCall:
    """One op: its inputs' shapes and, of DTensors, layouts."""

    name: str
    module: str
    is_backward: bool
    input_shapes: tuple[tuple[int, ...], ...]
    input_layouts: tuple[str, ...]
    mesh: str


class CommCounts(Counter[Any]):
    """How often each op ran, by torch's ops of torch.ops.c10d_functional; found by other names of theirs, too."""

    def __missing__(self, key: Any) -> int:
        packet = getattr(key, "overloadpacket", key)
        name = _FUNCTIONAL.get(packet) if isinstance(packet, str) else getattr(packet, "__name__", None)
        known = None if name is None else getattr(torch.ops.c10d_functional, name, None)
        return self.get(known, 0)


class CommDebugMode(TorchDispatchMode):
    """Counts, bytes and time of the collectives inside its `with`, by module. Entering it again resets it.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> with CommDebugMode() as comm:
    ...     whole = x.full_tensor()
    >>> comm.get_total_counts(), comm.get_total_bytes()
    (1, 12)
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[CommCall] = []
        self.operations: list[TracedCall] = []
        self.modules = ModuleStack()
        self._own = _OwnCollectives(self)
        self._scopes = ExitStack()

    # -- what was counted --------------------------------------------------------------------------

    def get_total_counts(self) -> int:
        """The number of collectives."""
        return len(self.calls)

    def get_comm_counts(self) -> dict[Any, int]:
        """The number of collectives by op: torch.ops.c10d_functional's, or torch.ops.c10d's for what has none there.

        A redistribution counts as the collective that it needs, however it is sent (`calls` has both): a reduce-scatter
        is one on gloo, too. Ops of torch.ops._c10d_functional, overloads and our names ("all_reduce") are keys as
        well. An op that did not run counts 0.
        """
        return CommCounts(call.op for call in self.calls)

    @property
    def comm_counts(self) -> dict[Any, int]:
        """The same as `get_comm_counts()`, under the name of torch's attribute."""
        return self.get_comm_counts()

    @property
    def comm_module_counts(self) -> dict[str, dict[str, dict[Any, int]]]:
        """By module, then "forward" or "backward", then op: collectives of the module and of those inside it.

        `Global` is the whole program.
        """
        counts: dict[str, dict[str, dict[Any, int]]] = {
            GLOBAL: {"forward": CommCounts(), "backward": CommCounts()}
        }
        for call in self.calls:
            for name in self.modules.path(call.module):
                found = counts.setdefault(name, {"forward": CommCounts(), "backward": CommCounts()})
                found["backward" if call.is_backward else "forward"][call.op] += 1
        return counts

    def get_total_bytes(self) -> int:
        """What this rank sent."""
        return sum(call.event.sent_bytes for call in self.calls)

    def get_parameter_info(self) -> dict[str, dict[str, Any]]:
        """By module that ran: its own parameters."""
        return {m.name: dict(m.parameters) for m in self.modules.modules.values() if m.parameters}

    def get_sharding_info(self) -> dict[str, Any]:
        """By parameter (`module.parameter`) that is a DTensor: its placements."""
        return {
            f"{m.name}.{name}": placements
            for m in self.modules.modules.values()
            for name, placements in m.placements.items()
        }

    # -- how it is shown ---------------------------------------------------------------------------

    def generate_comm_debug_tracing_table(self, noise_level: int = 3) -> str:
        """The tree of modules with their collectives, as text.

        noise_level 0: collectives only; 1: also ops on DTensors; 2: also ops on plain tensors; 3: also trivial ops
        (views, detach).
        """
        return comm_report.as_text(self, noise_level)

    def log_comm_debug_tracing_table_to_file(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.txt", noise_level: int = 3
    ) -> None:
        """Write `generate_comm_debug_tracing_table(noise_level)` to a file."""
        with open(file_name, "w", encoding="utf-8") as file:
            file.write(comm_report.as_text(self, noise_level))

    def generate_json_dump(
        self, file_name: str | os.PathLike[str] = "comm_mode_log.json", noise_level: int = 3
    ) -> None:
        """Write the tree as JSON, with torch's field names plus `bytes_*` and `waited_us_*`."""
        comm_report.write_json(comm_report.as_json(self, noise_level), file_name)

    def generate_chrome_trace(self, file_name: str | os.PathLike[str] = "comm_mode_trace.json") -> None:
        """Write when modules and collectives ran, for chrome://tracing or ui.perfetto.dev."""
        comm_report.write_json(comm_report.as_chrome_trace(self), file_name)

    def __rich__(self) -> Any:
        return comm_report.as_tree(self, noise_level=0)

    def __repr__(self) -> str:
        return comm_report.as_text(self, noise_level=0)

    # -- what it sees --------------------------------------------------------------------------------

    def __enter__(self) -> CommDebugMode:
        self.calls.clear()
        self.operations.clear()
        self._scopes = ExitStack()
        self._scopes.enter_context(self.modules)
        self._scopes.enter_context(observe_comm(self._own))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._scopes.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        module, backward = self.modules.where()
        found = describe_foreign(func, args)
        if found is None:
            self.operations.append(_describe_op(func, args, kwargs, module, backward))
        elif not (issued_by_longmesh() and is_told(self._own)):
            op, event = found
            call = CommCall(op, event, module, backward, now_us())
            self.calls.append(call)
            result = func(*args, **kwargs)
            call.end_us = now_us()
            call.waited_us = call.end_us - call.start_us
            return result
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs it, with this mode on for what it does
        return func(*args, **kwargs)


class _OwnCollectives(CommObserver):
    def __init__(self, mode: CommDebugMode) -> None:
        self._mode = mode
        self._open: dict[int, CommCall] = {}

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        module, backward = self._mode.modules.where()
        call = CommCall(_op_of(event.carries_out or event.kind), event, module, backward, now_us())
        self._mode.calls.append(call)
        self._open[id(event)] = call

    def on_done(self, event: CommEvent, waited_us: float) -> None:
        call = self._open.pop(id(event), None)
        if call is not None:
            call.end_us, call.waited_us = now_us(), waited_us


def _op_of(kind: str) -> Any:
    """The op of torch that stands for a kind of collective."""
    name = _FUNCTIONAL.get(kind)
    return torch.ops.c10d.send if name is None else getattr(torch.ops.c10d_functional, name)


_FUNCTIONAL = {
    "all_gather": "all_gather_into_tensor",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "broadcast": "broadcast",
}


def _describe_op(func: Any, args: Any, kwargs: Any, module: str, backward: bool) -> TracedCall:
    tensors = all_tensors((args, kwargs))
    parts = [t for t in tensors if isinstance(t, DTensor)]
    return TracedCall(
        name=str(func),
        module=module,
        is_backward=backward,
        input_shapes=tuple(tuple(t.shape) for t in tensors),
        input_layouts=tuple(str(t._layout) for t in parts),
        mesh=str(parts[0]._layout.mesh) if parts else "",
    )
