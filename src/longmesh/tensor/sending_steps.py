"""The steps that send. Each knows how many bytes this rank sends in it before it runs.

Redistribute   an input or an intermediate value goes to another layout
Recall         the reduced value that a pending input remembers, reduced again if it was written to
Exchange       rows of one sharded dim change hands, so that chunking holds again
Gather         every rank of some axes gets every rank's small result
Halo           the rows around the borders of a shard are fetched, or their gradients sent home
Attend         attention over a sharded sequence, by the plan of the attention engine
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from longmesh._torch import write_count
from longmesh.comm import run_plan
from longmesh.comm.collectives import all_gather
from longmesh.comm.groups import AxisGroup
from longmesh.comm.halo import Rows, fetch_rows, is_local, return_rows
from longmesh.comm.intervals import Interval, Pieces, exchange_intervals
from longmesh.comm.sent import halo_rows, interval_rows, redistribute_bytes
from longmesh.plan import RedistributePlan
from longmesh.spec import Layout
from longmesh.tensor.steps import Frame, Step, fill, slots_in
from longmesh.tensor.tensor_layout import TensorLayout


@dataclass(frozen=True, slots=True)
class FromSlot(Step):
    """A step that makes of what is in one slot what goes to another."""

    source: int
    out: int

    @property
    def reads(self) -> Sequence[int]:
        return [self.source]


@dataclass(frozen=True, slots=True)
class Redistribute(FromSlot):
    """A value laid out as `have` goes to `layout`. `input`: the tensor argument that it is; None: it was computed.
    `remembers`: the input keeps the result, as its reduced value."""

    have: TensorLayout
    layout: Layout
    input: int | None
    remembers: bool = False

    @property
    def plan(self) -> RedistributePlan:
        return self.have.route(self.layout)

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
class Recall(Step):
    """The reduced value that an input remembers: what was reduced once is not reduced again, to other last bits."""

    input: int
    out: int
    have: TensorLayout

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


@dataclass(frozen=True, slots=True)
class Exchange(Step):
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
    def reads(self) -> Sequence[int]:
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
class Gather(FromSlot):
    """What the members of a group hold, one shape on all of them, stacked in a new first dim."""

    group: AxisGroup
    num_bytes: int

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
class Halo(FromSlot):
    """The rows `need` of a dim of which this rank has the rows `have`; with `home`, their gradients go back."""

    dim: int
    have: tuple[Rows, ...]
    need: tuple[Rows, ...]
    group: AxisGroup
    home: bool
    row_bytes: int

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
class Attend(Step):
    """Attention over a sharded sequence: `call` runs the plan of the attention engine, in which this rank sends
    `num_bytes`."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    out: int
    count: int
    group: AxisGroup
    num_bytes: int

    @property
    def reads(self) -> Sequence[int]:
        return slots_in(self.args)

    def run(self, frame: Frame) -> None:
        frame.values[self.out : self.out + self.count] = self.call(*fill(self.args, frame.values))

    @property
    def sent_bytes(self) -> int:
        return self.num_bytes

    @property
    def is_collective(self) -> bool:
        return self.group.size > 1

    def __str__(self) -> str:
        return "keys and values, or their gradients, pass from rank to rank"
