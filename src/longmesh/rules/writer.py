"""Writer: the vocabulary in which a rule's program says what an op does. Each call adds a step to the plan.

    def flip(p, func, args, kwargs):
        x = p.linear_or_reduced(args[0])
        local = p.local(torch.flip, x, dims)
        ...
        return p.wrap(p.exchange([local], ...), x)

A program runs once for each kind of call, on `Planned` tensors: they have a global layout and a slot, and no data.
Torch's ops on them are planned in turn, so an op that is made of others (a softmax over a sharded dim) is written as
it would be on plain tensors. What a rank computes is a named function of local tensors and plain values: plans are
compared and explained by them. tensor/ implements the writer, and runs what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import torch

from longmesh._torch import OpOverload
from longmesh.rules.planned import Part, Planned
from longmesh.rules.steps import Interval, Pieces, Rows
from longmesh.spec import Coordinate, Layout, MeshShape


class Writer(Protocol):
    """Writes the steps of one op."""

    # Where tensors are; whether they are traced, so that no value may be looked at; what was noted of the call before.
    device: torch.device
    is_traced: bool
    note: Any
    # Torch divides the first result by a plain tensor of so many lengths.
    lengths: int | None

    @property
    def mesh(self) -> MeshShape:
        """The mesh that the op runs on."""
        ...

    @property
    def coordinate(self) -> Coordinate:
        """The place of the rank that the plan is made for."""
        ...

    def op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op on planned tensors."""
        ...

    def by_lines(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op by the lines of its rule: where its program is not needed after all."""
        ...

    def choose(self, func: OpOverload, args: tuple[Any, ...], extra: Callable[..., Any]) -> tuple[Any, Any]:
        """The cheapest combination of the lines of an op's rule and those of `extra(call)`, and the call."""
        ...

    def decompose(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op by the ops that torch makes it of."""
        ...

    def on_whole_tensors(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Every rank runs the op on whole inputs; what shapes come out, data may decide."""
        ...

    def one_by_one(self, func: OpOverload, run: Callable[..., Any]) -> Part:
        """`run(func, args, kwargs)` on the call's own tensors: its ops are planned as they run, since values decide."""
        ...

    def on_mesh_of(self, x: Planned) -> AbstractContextManager[None]:
        """Ops on tensors of another mesh than the first."""
        ...

    def check_scalar(self, value: Planned, members: Sequence[Planned]) -> None:
        """Raise if a scalar is on a mesh that lacks ranks of a member's."""
        ...

    def refuse_mix(self, func: OpOverload, tensors: Sequence[Any]) -> NoReturn:
        """Raise for a plain tensor among DTensors whose layout is not known."""
        ...

    def redistribute(self, x: Any, layout: Layout, *, remembers: bool = False) -> Planned:
        """The same tensor in another layout; an input may remember the result, as its reduced value."""
        ...

    def replicated(self, x: Any) -> Planned:
        """The tensor whole on every rank."""
        ...

    def reduced(self, x: Any) -> Planned:
        """The tensor without pending reductions."""
        ...

    def linear_or_reduced(self, x: Any) -> Planned:
        """Zeros may be put around a pending sum or average; any other pending reduction is carried out first."""
        ...

    def local(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Part:
        """A computation on local parts, with one result. It sees this rank's parts and never communicates."""
        ...

    def locals(self, count: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Part, ...]:
        """The same with `count` tensors as results."""
        ...

    def gather(
        self, part: Any, like: Planned, axes: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype
    ) -> Part:
        """What the ranks along `axes` have, each a tensor of `shape`, stacked in a new first dim in the order of
        `members`."""
        ...

    def members(self, like: Planned, axes: tuple[int, ...]) -> tuple[Coordinate, ...]:
        """The coordinates of the ranks along `axes`."""
        ...

    def exchange(
        self,
        pieces: Sequence[Any],
        like: Planned,
        shape: Sequence[int],
        dim: int,
        pieces_of: Callable[[Coordinate], Pieces],
        *,
        fill: Any = 0,
        layout: Layout | None = None,
        dtype: torch.dtype | None = None,
    ) -> Planned:
        """A tensor of `shape`, laid out as `like`, whose sharded dim `dim` is put together from all ranks' `pieces`.

        `pieces_of(coordinate)` says where a rank's pieces are along `dim`; the other dims are sharded already.
        """
        ...

    def exchange_into(
        self,
        pieces: Sequence[Any],
        like: Planned,
        dim: int,
        have: Callable[[Coordinate], Pieces],
        want: Callable[[Coordinate], Interval],
        *,
        fill: Any = 0,
        axes: tuple[int, ...] | None = None,
        row: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> Part:
        """The interval of `dim` that each rank of `axes` wants, put together from the pieces that they have; `row`: the
        elements of one row of this rank's pieces. What is not given is as in `like`."""
        ...

    def halo(
        self,
        part: Any,
        dim: int,
        have: tuple[Rows, ...],
        need: tuple[Rows, ...],
        axes: tuple[int, ...],
        row_bytes: int,
        *,
        home: bool = False,
    ) -> Part:
        """The rows of `dim` that a rank needs, fetched from those who have them; with `home`, sent back and added."""
        ...

    def execute(
        self, count: int | None, name: str, options: tuple[Any, ...], *args: Any, axes: tuple[int, ...] = ()
    ) -> Any:
        """What the executor of that name does: one part, or `count` of them. One that communicates does not run while
        tensors are traced."""
        ...

    def wrap(
        self,
        part: Any,
        like: Planned,
        *,
        layout: Layout | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Planned:
        """The tensor whose local parts are in a slot; what is not given is as in `like`. Dense."""
        ...

    def whole(self, part: Part) -> Any:
        """A result whose tensors are in a slot, each rank's its own whole, of a shape that data decides."""
        ...

    def pending_like(self, part: Part, like: Planned) -> Planned:
        """A copy of a pending lookup, which is pending, too."""
        ...

    def call_given(self, lists: Sequence[Any], strides: Sequence[tuple[int, ...]]) -> Any:
        """The op itself on everybody's parts, its arguments as they are; a result for each of `strides`, laid out as
        the members of the first list."""
        ...

    def write(self, target: Planned, value: Planned) -> None:
        """Copy a value into a tensor, in place."""
        ...
