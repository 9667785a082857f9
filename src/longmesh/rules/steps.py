"""The steps that an op's plan is made of, as values: what is done to which slots, and who sends what to whom.

    ApplyMask      a pending lookup of an input becomes a plain pending sum
    Forget         an input that is written to forgets its reduced value
    GivenCall      a local call with the op's own arguments, local tensors in the places of the DTensors
    LocalCall      any other local computation
    RunOps         ops one by one, each with a plan of its own: what runs depends on values that are computed on the way
    Redistribute   an input or an intermediate value goes to another layout
    Recall         the reduced value that a pending input remembers, reduced again if it was written to
    Exchange       rows of one sharded dim change hands, so that chunking holds again
    Gather         every rank of some axes gets every rank's small result
    Halo           the rows around the borders of a shard are fetched, or their gradients sent home
    Execute        anything else that tensor/ knows by name: attention over a sharded sequence, random numbers

Slots hold this rank's local tensors; the first ones are the call's tensors, in order. A step names mesh axes, never
process groups: what it lists for each rank of some axes is in the order of `MeshShape.members`. `mesh` is the number
of the mesh among those of the call's tensors. So a plan can be made, compared and costed with no process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from longmesh._torch import OpOverload
from longmesh.spec import Layout

Interval = tuple[int, int]
"""Start and length."""
Pieces = tuple[Interval, ...]
Rows = tuple[int, int]
"""First row, and the row after the last."""


class Slot(NamedTuple):
    """Stands in the arguments of a local call for what is in a slot."""

    number: int


def fill(value: Any, values: list[Any]) -> Any:
    """`value` with what the slots hold."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is Slot:
        return values[value.number]
    if kind is tuple or kind is list:
        return kind([values[v.number] if type(v) is Slot else fill(v, values) for v in value])  # pyright: ignore[reportUnknownVariableType]
    if kind is dict:
        return {name: fill(v, values) for name, v in value.items()}
    return value


def slots_in(value: Any) -> list[int]:
    """The numbers of the slots that stand in `value`."""
    kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is Slot:
        return [value.number]
    if kind is tuple or kind is list:
        return [n for v in value for n in slots_in(v)]
    return [n for v in value.values() for n in slots_in(v)] if kind is dict else []


class Step:
    """One step; `reads` are the slots that it needs."""

    __slots__ = ()

    @property
    def reads(self) -> Sequence[int]:
        return ()


@dataclass(frozen=True, slots=True)
class FromSlot(Step):
    """A step that makes of what is in one slot what goes to another."""

    source: int
    out: int

    @property
    def reads(self) -> Sequence[int]:
        return [self.source]


@dataclass(frozen=True, slots=True)
class ApplyMask(Step):
    """The mask of a pending lookup is applied to the input itself, which stays the same value."""

    input: int

    @property
    def reads(self) -> Sequence[int]:
        return [self.input]


@dataclass(frozen=True, slots=True)
class Forget(Step):
    """An input that is written to forgets its reduced value."""

    input: int


@dataclass(frozen=True, slots=True)
class GivenCall(Step):
    """`call` with the op's own arguments, the values of `slots` in the places of its tensors."""

    call: Callable[..., Any]
    slots: tuple[int, ...]
    out: int

    @property
    def reads(self) -> Sequence[int]:
        return self.slots


@dataclass(frozen=True, slots=True)
class LocalCall(Step):
    """`call` on local tensors; its `count` tensors go to the slots from `out` on. No count: the result as it is."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    count: int | None = None

    @property
    def reads(self) -> Sequence[int]:
        return slots_in((self.args, self.kwargs))


@dataclass(frozen=True, slots=True)
class RunOps(Step):
    """`run(func, args, kwargs)` on the call's own tensors: its ops have plans of their own, made as they run."""

    func: OpOverload
    run: Callable[..., Any]
    out: int


@dataclass(frozen=True, slots=True)
class Redistribute(FromSlot):
    """A tensor of `shape` goes from one layout to another. `input`: the tensor argument that it is; None: it was
    computed. `remembers`: the input keeps the result, as its reduced value."""

    have: Layout
    want: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    input: int | None = None
    remembers: bool = False
    mesh: int = 0

    @property
    def is_reduction(self) -> bool:
        """Whether it carries out a reduction that the op itself left pending."""
        return self.input is None and bool(self.have.partial_axes)


@dataclass(frozen=True, slots=True)
class Recall(Step):
    """The reduced value that an input remembers: what was reduced once is not reduced again, to other last bits."""

    input: int
    out: int


@dataclass(frozen=True, slots=True)
class Exchange(Step):
    """From the pieces of a dim that ranks have to the interval that each wants; what none has is `fill`."""

    pieces: tuple[int, ...]
    out: int
    have: tuple[Pieces, ...]
    want: tuple[Interval, ...]
    dim: int
    axes: tuple[int, ...]
    fill: Any
    row_bytes: int
    mesh: int = 0

    @property
    def reads(self) -> Sequence[int]:
        return self.pieces

    def __str__(self) -> str:
        return f"rows of dim {self.dim} change hands, so that chunking holds again"


@dataclass(frozen=True, slots=True)
class Gather(FromSlot):
    """What the ranks along some axes hold, one shape on all of them, stacked in a new first dim."""

    axes: tuple[int, ...]
    num_bytes: int
    mesh: int = 0

    def __str__(self) -> str:
        return "every rank gets every rank's result"


@dataclass(frozen=True, slots=True)
class Halo(FromSlot):
    """The rows `need` of a dim of which each rank has the rows `have`; with `home`, their gradients go back."""

    dim: int
    have: tuple[Rows, ...]
    need: tuple[Rows, ...]
    axes: tuple[int, ...]
    home: bool
    row_bytes: int
    mesh: int = 0

    def __str__(self) -> str:
        what = (
            "gradients of fetched rows go home"
            if self.home
            else "rows around the shard's borders are fetched"
        )
        return f"{what}, along dim {self.dim}"


@dataclass(frozen=True, slots=True)
class Execute(Step):
    """What the executor `name` does with `args` and its `options`; its `count` tensors go to the slots from `out` on.
    `axes`: over which it communicates."""

    name: str
    args: tuple[Any, ...]
    options: tuple[Any, ...]
    out: int
    count: int | None = None
    axes: tuple[int, ...] = ()
    mesh: int = 0

    @property
    def reads(self) -> Sequence[int]:
        return slots_in(self.args)

    def __str__(self) -> str:
        return "keys and values, or their gradients, pass from rank to rank" if self.axes else self.name


class AttendOptions(NamedTuple):
    """Of attention over a sharded sequence: how dim `dim` of all operands is sharded, and what a rank holds. `row`: the
    elements of a token's key and value, of all batch rows and heads that are there."""

    layout: Layout
    dim: int
    seq_len: int
    is_causal: bool
    scale: float | None
    heads: int
    head_dim: int
    row: int
    dtype: torch.dtype


class DrawOptions(NamedTuple):
    """Of a random tensor: its distribution, by the name and the arguments of what makes it, and its global layout."""

    maker: str
    numbers: tuple[Any, ...]
    layout: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    generator: torch.Generator | None


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
