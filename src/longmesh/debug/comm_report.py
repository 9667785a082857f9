"""What a CommDebugMode counted: as a tree, as text, as JSON, as a Chrome trace.

A module's numbers include those of the modules it called.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from longmesh.debug.module_stack import GLOBAL
from longmesh.plan.words import format_bytes

if TYPE_CHECKING:
    from longmesh.debug.comm_mode import CommCall, CommDebugMode, TracedCall

_TRIVIAL = frozenset(
    f"aten.{name}"
    for name in (
        "detach.default",
        "t.default",
        "view.default",
        "_to_copy.default",
        "as_strided.default",
        "transpose.int",
        "alias.default",
    )
)


@dataclass(frozen=True, slots=True)
class _Total:
    """The collectives of one module in one direction."""

    counts: dict[str, int]
    sent_bytes: int
    waited_us: float

    def __str__(self) -> str:
        counts = ", ".join(f"{name} x{count}" for name, count in self.counts.items())
        return f"{counts}  {format_bytes(self.sent_bytes)} sent  {self.waited_us / 1000:.2f} ms waited"


def as_text(mode: CommDebugMode, noise_level: int) -> str:
    console = Console(file=io.StringIO(), width=160, color_system=None, legacy_windows=False)
    console.print(as_tree(mode, noise_level), highlight=False, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def as_tree(mode: CommDebugMode, noise_level: int) -> Tree:
    tree = Tree(Text(GLOBAL, style="bold"))
    _grow(tree, mode, GLOBAL, noise_level)
    return tree


def _grow(tree: Tree, mode: CommDebugMode, name: str, noise_level: int) -> None:
    info = mode.modules.modules.get(name)
    for parameter, placements in (info.placements if info else {}).items():
        tree.add(Text(f"{parameter}: {placements}", style="dim"))
    for backward, label, style in ((False, "forward", "green"), (True, "backward", "magenta")):
        total = _total(mode, name, backward)
        operations = _operations(mode, name, backward, noise_level)
        if total.counts or operations:
            branch = tree.add(Text(f"{label}  {total if total.counts else ''}".rstrip(), style=style))
            for op in operations:
                branch.add(Text(_show_op(op), style="dim"))
    for child in mode.modules.children(name):
        kind = mode.modules.modules[child].type_name
        label = child.removeprefix(name + ".")
        _grow(tree.add(Text(f"{label} ({kind})", style="bold")), mode, child, noise_level)


def _calls(mode: CommDebugMode, name: str, backward: bool) -> list[CommCall]:
    return [c for c in mode.calls if c.is_backward == backward and name in mode.modules.path(c.module)]


def _total(mode: CommDebugMode, name: str, backward: bool) -> _Total:
    calls = _calls(mode, name, backward)
    counts = Counter(str(call.op) for call in calls)
    return _Total(dict(counts), sum(c.event.sent_bytes for c in calls), sum(c.waited_us for c in calls))


def _operations(mode: CommDebugMode, name: str, backward: bool, noise_level: int) -> list[TracedCall]:
    if noise_level < 1:
        return []
    return [
        op
        for op in mode.operations
        if op.module == name
        and op.is_backward == backward
        and (noise_level >= 2 or op.input_layouts)
        and (noise_level >= 3 or op.name not in _TRIVIAL)
    ]


def _show_op(op: TracedCall) -> str:
    layouts = f"  {', '.join(op.input_layouts)} on {op.mesh}" if op.input_layouts else ""
    return f"{op.name}  {', '.join(map(str, op.input_shapes))}{layouts}"


def as_json(mode: CommDebugMode, noise_level: int, name: str = GLOBAL) -> dict[str, Any]:
    info = mode.modules.modules.get(name)
    result: dict[str, Any] = {
        "fqn": name,
        "module_type": info.type_name if info else "",
        "parameters": [(k, str(p)) for k, p in info.placements.items()] if info else [],
    }
    for backward, label in ((False, "forward"), (True, "backward")):
        total = _total(mode, name, backward)
        result[f"collectives_{label}"] = list(total.counts.items())
        result[f"bytes_{label}"] = total.sent_bytes
        result[f"waited_us_{label}"] = round(total.waited_us, 1)
        result[f"operations_{label}"] = [
            {
                "name": op.name,
                "input_shape": [str(shape) for shape in op.input_shapes],
                "input_sharding": list(op.input_layouts),
                "device_mesh": op.mesh,
            }
            for op in _operations(mode, name, backward, noise_level)
        ]
    result["children"] = [as_json(mode, noise_level, child) for child in mode.modules.children(name)]
    return result


def as_chrome_trace(mode: CommDebugMode) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "modules, forward"}},
    ]
    for run in mode.modules.runs:
        kind = "recomputed" if run.is_recomputed else "forward"
        events.append(_span(run.name, kind, rank, 0, run.start_us, run.end_us, {}))
    lanes: list[float] = []
    for call in sorted(mode.calls, key=lambda c: c.start_us):
        end = call.start_us if call.end_us is None else call.end_us
        lane = next((i for i, busy in enumerate(lanes) if busy <= call.start_us), len(lanes))
        if lane == len(lanes):
            lanes.append(end)
            label = "collectives" if lane == 0 else f"collectives, overlapping {lane}"
            events.append(
                {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane + 1, "args": {"name": label}}
            )
        lanes[lane] = end
        phase = "backward" if call.is_backward else "forward"
        events.append(_span(call.event.kind, phase, rank, lane + 1, call.start_us, end, _details(call)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _span(
    name: str, category: str, rank: int, lane: int, start_us: float, end_us: float, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": lane,
        "ts": round(start_us, 3),
        "dur": round(end_us - start_us, 3),
        "args": details,
    }


def _details(call: CommCall) -> dict[str, Any]:
    event = call.event
    return {
        "module": call.module,
        "axes": " x ".join(event.axes),
        "group_size": event.group_size,
        "sent_bytes": event.sent_bytes,
        "shape": list(event.shape),
        "dtype": event.dtype,
        "call_site": event.call_site,
        "waited_us": round(call.waited_us, 1),
    }


def write_json(value: dict[str, Any], file_name: str | os.PathLike[str]) -> None:
    with open(file_name, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
