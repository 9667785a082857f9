"""Where a thread is, from its Python frames, and whether it waits for other ranks there.

    File "torch/_ops.py", in __call__                  <- innermost
    File "longmesh/comm/collectives.py", in _wait      <- in a room that waits for others: a collective
    File "longmesh/comm/collectives.py", in all_reduce <- which one
    File "train.py", in step                           <- the call site: neither ours nor torch's

Any collective of torch or longmesh is seen this way, with nothing to pay in the ranks. Pitfall: a wait that torch
does inside C++ has no frame of its own; a thread that sleeps in autograd or at a `.wait()` counts as waiting, too.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Sequence
from itertools import takewhile
from types import FrameType
from typing import Any, NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_WAITING = (
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/rendezvous.py",
    "/torch/distributed/_functional_collectives.py",
    f"{_PACKAGE}/comm/",
)
_ENGINE = "/torch/autograd/graph.py"
_LIBRARY = ("/torch/", "/contextlib.py", "<frozen", f"{_PACKAGE}/")
_CALLERS = (f"{_PACKAGE}/train/", f"{_PACKAGE}/hf/")
_INNERMOST = 5
_KINDS = frozenset(
    (
        "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_to_all",
        "all_to_all_single", "barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "gather",
        "gather_object", "scatter", "scatter_object_list", "reduce", "reduce_scatter", "reduce_scatter_tensor",
        "reduce_scatter_single", "send", "recv", "send_receive", "new_group", "init_process_group",
    )
)  # fmt: skip
_DUMPED = re.compile(r'^\s*File "(.*)", line (\d+) in (.*)$')


class CodePlace(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Wait(NamedTuple):
    """A collective that a thread waits in. `ranks` are those of its group; empty: not known, so all."""

    what: str
    site: str
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"


def read_frames(frame: FrameType | None) -> list[FrameType]:
    """The frames of a stack, innermost first."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def places_of(frames: Sequence[FrameType]) -> list[CodePlace]:
    return [CodePlace(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]


def parse_dump(text: str) -> list[list[CodePlace]]:
    """The stacks that faulthandler wrote, one per thread, innermost places first."""
    stacks: list[list[CodePlace]] = []
    for line in text.splitlines():
        found = _DUMPED.match(line)
        if found:
            stacks[-1].append(CodePlace(found[1], int(found[2]), found[3]))
        elif "(most recent call first)" in line:
            stacks.append([])
    return stacks


def find_wait(places: Sequence[CodePlace], *, sleeps: bool = False) -> Wait | None:
    """The collective that a stack waits in, if it does; `sleeps` where the thread has used no processor for a while."""
    near = places[:_INNERMOST]
    waits = [p for p in near if any(room in p.file for room in _WAITING)]
    if not waits:
        if sleeps and any(p.file.endswith(_ENGINE) for p in near):
            return Wait("a collective of the backward pass", find_site(places))
        if sleeps and near and ".wait(" in linecache.getline(near[0].file, near[0].line):
            return Wait("a transfer that it has started", str(near[0]))
        return None
    inner = list(takewhile(lambda p: not _is_site(p), places))
    outermost = [p for p in inner if any(room in p.file for room in _WAITING)][-1:] or waits
    kind = next((p.function for p in inner if p.function in _KINDS), outermost[-1].function.strip("_"))
    return Wait(kind, find_site(places))


def find_site(places: Sequence[CodePlace]) -> str:
    """The nearest place that is neither torch's nor ours; the trainer and the bridges are callers."""
    return str(next(filter(_is_site, places), places[-1] if places else "<unknown>"))


def _is_site(place: CodePlace) -> bool:
    return any(room in place.file for room in _CALLERS) or not any(room in place.file for room in _LIBRARY)


def describe_wait(frames: Sequence[FrameType], wait: Wait) -> Wait:
    """The wait with what its frames hold: the kind, the tensor and the ranks of the group.

    For a wait that lasts: it keeps what the frames hold alive until they end.
    """
    what, ranks = wait.what, wait.ranks
    for frame in frames[:_INNERMOST]:
        if not any(room in frame.f_code.co_filename for room in _WAITING):
            continue
        held = frame.f_locals
        owner = held.get("self")
        kind = _first_of(held, owner, "kind")
        tensor = _first_of(held, owner, "out", "received", "tensor", "buffer", "input")
        group = _first_of(held, owner, "group")
        if isinstance(kind, str):
            what = kind
        if hasattr(tensor, "shape") and hasattr(tensor, "dtype") and " of " not in what:
            what = f"{what} of {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        ranks = ranks or ranks_of(group)
    return Wait(what, wait.site, ranks)


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of one of our groups or of torch's; empty if it is neither."""
    if hasattr(group, "global_ranks"):
        return tuple(group.global_ranks)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and isinstance(group, getattr(dist, "ProcessGroup", ())):
        return tuple(dist.get_process_group_ranks(group))
    return ()


def _first_of(held: dict[str, Any], owner: Any, *names: str) -> Any:
    for name in names:
        found = held[name] if name in held else getattr(owner, name, None)
        if found is not None:
            return found
    return None


def format_places(places: Sequence[CodePlace]) -> list[str]:
    """A stack in lines, innermost first, down to the script."""
    ends = [i for i, p in enumerate(places) if p.file.startswith("<frozen runpy")]
    return [f'File "{p.file}", line {p.line}, in {p.function}' for p in places[: ends[0] if ends else None]]
