"""The steps that an op's plan is made of. Each reads and writes numbered slots, which hold this rank's local tensors.

    ApplyMask      a pending lookup of an input becomes a plain pending sum
    Recall, Forget the reduced value that a pending input remembers from an earlier op
    Redistribute   an input or an intermediate value goes to another layout
    Exchange       rows of one sharded dim change hands, so that chunking holds again
    Gather         every rank of some axes gets every rank's small result
    Halo           the rows around the borders of a shard are fetched, or their gradients sent home
    Attend         attention over a sharded sequence, by the plan of the attention engine
    GivenCall      a local call with the op's own arguments, local tensors in the places of the DTensors
    LocalCall      any other local computation
    RunOps         ops one by one, each with a plan of its own: what runs depends on values that are computed on the way

Only Redistribute, Exchange, Gather, Halo and Attend send anything, and each knows how many bytes this rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from longmesh._torch import write_count
from longmesh.comm import run_plan
from longmesh.comm.collectives import all_gather
from longmesh.comm.groups import AxisGroup
from longmesh.comm.halo import Rows, fetch_rows, is_local, return_rows
from longmesh.comm.intervals import Interval, Pieces, exchange_intervals
from longmesh.comm.sent import halo_rows, interval_rows, redistribute_bytes
from longmesh.plan import RedistributePlan
from longmesh.spec import Layout
from longmesh.tensor.tensor_layout import TensorLayout
from longmesh.tensor.tree import map_tensors


class Frame:
    """A plan while it runs: local tensors by slot, and the call that it runs for. The first slots are the call's
    tensors, in order."""

    __slots__ = ("args", "kwargs", "tensors", "values")

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any], values: list[Any]
    ) -> None:
        self.args = args
        self.kwargs = kwargs
        self.tensors = tensors
        self.values = values


class Slot(NamedTuple):
    """Stands in the arguments of a local call for what is in a slot."""

    number: int


def fill(value: Any, values: list[Any]) -> Any:
    """`value` with what the slots hold."""
    kind = type(value)
    if kind is Slot:
        return values[value.number]
    if kind is tuple or kind is list:
        return kind([fill(v, values) for v in value])
    if kind is dict:
        return {name: fill(v, values) for name, v in value.items()}
    return value


def slots_in(value: Any) -> list[int]:
    """The numbers of the slots that stand in `value`."""
    kind = type(value)
    if kind is Slot:
        return [value.number]
    if kind is tuple or kind is list:
        return [n for v in value for n in slots_in(v)]
    return [n for v in value.values() for n in slots_in(v)] if kind is dict else []


@dataclass(frozen=True, slots=True)
class ApplyMask:
    """The mask of a pending lookup is applied to the input itself, which stays the same value."""

    input: int
    apply: Callable[[Any], None]

    @property
    def reads(self) -> list[int]:
        return [self.input]

    def run(self, frame: Frame) -> None:
        tensor = frame.tensors[self.input]
        if tensor._lookup is not None:
            self.apply(tensor)
        frame.values[self.input] = tensor._local_tensor

    @property
    def sent_bytes(self) -> int:
        return 0

    @property
    def is_collective(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Redistribute:
    """A value laid out as `have` goes to `layout`. `input`: the tensor argument that it is; None: it was computed.
    `remembers`: the input keeps the result, as its reduced value."""

    source: int
    out: int
    have: TensorLayout
    layout: Layout
    input: int | None
    remembers: bool = False

    @property
    def plan(self) -> RedistributePlan:
        return self.have.route(self.layout)

    @property
    def reads(self) -> list[int]:
        return [self.source]

    def run(self, frame: Frame) -> None:
        local = frame.values[self.out] = run_plan(self.plan, frame.values[self.source], self.have.comm)
        if self.remembers and self.input is not None:
            tensor = frame.tensors[self.input]
            tensor._reduced = Reduced(local, version_of(tensor))
            tensor._tensor_layout = self.have.remembering(self.layout)

    @property
    def sent_bytes(self) -> int:
        return redistribute_bytes(self.plan, self.have.dtype, self.have.comm)

    @property
    def is_collective(self) -> bool:
        return self.plan.num_collectives > 0

    @property
    def is_reduction(self) -> bool:
        """Whether it carries out a reduction that the op itself left pending."""
        return self.input is None and bool(self.have.layout.partial_axes)


class Reduced(NamedTuple):
    """The local part of a pending tensor's value once reduced, and the tensor's version then."""

    local: torch.Tensor
    version: int


def version_of(tensor: Any) -> int:
    """How many writes to a DTensor and its views there were; in inference mode, where torch counts none, those to any
    tensor of the mesh. The same on every rank."""
    return tensor._tensor_layout.comm.num_writes if tensor.is_inference() else write_count(tensor)


@dataclass(frozen=True, slots=True)
class Recall:
    """The reduced value that an input remembers: what was reduced once is not reduced again, to other last bits."""

    input: int
    out: int
    have: TensorLayout

    @property
    def reads(self) -> list[int]:
        return []

    def run(self, frame: Frame) -> None:
        tensor = frame.tensors[self.input]
        known, layout = tensor._reduced, self.have.reduced
        assert layout is not None, "only what is remembered is recalled"
        if known.version != version_of(tensor):  # written to through a view
            known = Reduced(
                run_plan(self.have.route(layout), tensor._local_tensor, self.have.comm), version_of(tensor)
            )
            tensor._reduced = known
        frame.values[self.out] = known.local

    @property
    def sent_bytes(self) -> int:
        return 0

    @property
    def is_collective(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Forget:
    """An input that is written to forgets its reduced value."""

    input: int

    @property
    def reads(self) -> list[int]:
        return []

    def run(self, frame: Frame) -> None:
        tensor = frame.tensors[self.input]
        tensor._reduced = None
        tensor._tensor_layout = tensor._tensor_layout.remembering(None)

    @property
    def sent_bytes(self) -> int:
        return 0

    @property
    def is_collective(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Exchange:
    """From the pieces of a dim that ranks have to the interval that each wants; what none has is `fill`."""

    pieces: tuple[int, ...]
    out: int
    have: tuple[Pieces, ...]
    want: tuple[Interval, ...]
    dim: int
    group: AxisGroup
    fill: Any
    row_bytes: int

    @property
    def reads(self) -> tuple[int, ...]:
        return self.pieces

    def run(self, frame: Frame) -> None:
        pieces = [frame.values[slot] for slot in self.pieces]
        frame.values[self.out] = exchange_intervals(
            pieces, have=self.have, want=self.want, dim=self.dim, group=self.group, fill=self.fill
        )

    @property
    def sent_bytes(self) -> int:
        return interval_rows(self.have, self.want, self.group.rank) * self.row_bytes

    @property
    def is_collective(self) -> bool:
        return any(interval_rows(self.have, self.want, rank) for rank in range(self.group.size))

    def __str__(self) -> str:
        return f"rows of dim {self.dim} change hands, so that chunking holds again"


@dataclass(frozen=True, slots=True)
class Gather:
    """What the members of a group hold, one shape on all of them, stacked in a new first dim."""

    source: int
    out: int
    group: AxisGroup
    num_bytes: int

    @property
    def reads(self) -> list[int]:
        return [self.source]

    def run(self, frame: Frame) -> None:
        local, size = frame.values[self.source], self.group.size
        if local.numel() == 0:
            frame.values[self.out] = local.new_empty((size, *local.shape))
            return
        flat = all_gather(local.contiguous().view(-1), group=self.group)
        frame.values[self.out] = flat.view(size, *local.shape)

    @property
    def sent_bytes(self) -> int:
        return self.num_bytes * (self.group.size - 1)

    @property
    def is_collective(self) -> bool:
        return self.num_bytes > 0

    def __str__(self) -> str:
        return "every rank gets every rank's result"


@dataclass(frozen=True, slots=True)
class Halo:
    """The rows `need` of a dim of which this rank has the rows `have`; with `home`, their gradients go back."""

    source: int
    out: int
    dim: int
    have: tuple[Rows, ...]
    need: tuple[Rows, ...]
    group: AxisGroup
    home: bool
    row_bytes: int

    @property
    def reads(self) -> list[int]:
        return [self.source]

    def run(self, frame: Frame) -> None:
        carry = return_rows if self.home else fetch_rows
        frame.values[self.out] = carry(frame.values[self.source], self.dim, self.have, self.need, self.group)

    @property
    def sent_bytes(self) -> int:
        return halo_rows(self.have, self.need, self.group.rank, home=self.home) * self.row_bytes

    @property
    def is_collective(self) -> bool:
        return not is_local(self.have, self.need)

    def __str__(self) -> str:
        what = (
            "gradients of fetched rows go home"
            if self.home
            else "rows around the shard's borders are fetched"
        )
        return f"{what}, along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class GivenCall:
    """`call` with the op's own arguments, the values of `reads` in the places of its tensors."""

    call: Callable[..., Any]
    reads: tuple[int, ...]
    out: int

    def run(self, frame: Frame) -> None:
        parts = iter([frame.values[slot] for slot in self.reads])
        args, kwargs = map_tensors(lambda _: next(parts), (frame.args, frame.kwargs))
        frame.values[self.out] = self.call(*args, **kwargs)

    @property
    def sent_bytes(self) -> int:
        return 0

    @property
    def is_collective(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class LocalCall:
    """`call` on local tensors; its `count` results go to the slots from `out` on, a single one as it is."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    count: int = 1

    @property
    def reads(self) -> list[int]:
        return slots_in((self.args, self.kwargs))

    def run(self, frame: Frame) -> None:
        values = frame.values
        result = self.call(*fill(self.args, values), **fill(self.kwargs, values))
        if self.count == 1:
            values[self.out] = result
            return
        found: list[Any] = []
        map_tensors(found.append, result)
        values[self.out : self.out + self.count] = found

    @property
    def sent_bytes(self) -> int:
        return 0

    @property
    def is_collective(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Attend:
    """Attention over a sharded sequence: `call` runs the plan of the attention engine, in which this rank sends
    `sent_bytes`."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    out: int
    count: int
    group: AxisGroup
    sent_bytes: int

    @property
    def reads(self) -> list[int]:
        return slots_in(self.args)

    def run(self, frame: Frame) -> None:
        frame.values[self.out : self.out + self.count] = self.call(*fill(self.args, frame.values))

    @property
    def is_collective(self) -> bool:
        return self.group.size > 1

    def __str__(self) -> str:
        return "keys and values, or their gradients, pass from rank to rank"


@dataclass(frozen=True, slots=True)
class RunOps:
    """Ops one by one, on DTensors, each with a plan of its own, since the next depends on values that are computed."""

    func: OpOverload
    call: Callable[..., Any]
    out: int

    @property
    def reads(self) -> list[int]:
        return []

    def run(self, frame: Frame) -> None:
        frame.values[self.out] = self.call(*frame.args, **frame.kwargs)

    @property
    def sent_bytes(self) -> int:
        """None of its own: its ops have plans with theirs."""
        return 0

    @property
    def is_collective(self) -> bool:
        return False


Step = (
    ApplyMask
    | Recall
    | Forget
    | Redistribute
    | Exchange
    | Gather
    | Halo
    | Attend
    | GivenCall
    | LocalCall
    | RunOps
)


def drops(steps: tuple[Step, ...], keep: set[int], num_inputs: int) -> tuple[tuple[int, ...], ...]:
    """For each step the slots that nobody reads after it, so that their memory can go."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        for slot in step.reads:
            last[slot] = number
    found: list[list[int]] = [[] for _ in steps]
    for slot, number in last.items():
        if slot >= num_inputs and slot not in keep:
            found[number].append(slot)
    return tuple(map(tuple, found))
