"""The steps that an op's plan is made of, and those that a rank does by itself. Each reads and writes numbered slots,
which hold this rank's local tensors.

    ApplyMask      a pending lookup of an input becomes a plain pending sum
    Forget         an input that is written to forgets its reduced value
    GivenCall      a local call with the op's own arguments, local tensors in the places of the DTensors
    LocalCall      any other local computation
    RunOps         ops one by one, each with a plan of its own: what runs depends on values that are computed on the way

Steps that send are in sending_steps.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from longmesh._torch import OpOverload
from longmesh.tensor.tree import all_tensors, map_tensors


@dataclass(slots=True, eq=False)
class Frame:
    """A plan while it runs: local tensors by slot, and the call that it runs for. The first slots are the call's
    tensors, in order."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Any]
    values: list[Any]


class Slot(NamedTuple):
    """Stands in the arguments of a local call for what is in a slot."""

    number: int


def fill(value: Any, values: list[Any]) -> Any:
    """`value` with what the slots hold."""
    kind = type(value)
    if kind is Slot:
        return values[value.number]
    if kind is tuple or kind is list:
        return kind([values[v.number] if type(v) is Slot else fill(v, values) for v in value])
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


class Step:
    """One step: what it reads, what it does, and what this rank sends in it, exactly."""

    __slots__ = ()

    @property
    def reads(self) -> Sequence[int]:
        """The slots that it needs."""
        return ()

    def run(self, frame: Frame) -> None:
        raise NotImplementedError(f"{type(self).__name__} does not say what it does")

    @property
    def sent_bytes(self) -> int:
        return 0

    @property
    def is_collective(self) -> bool:
        """Whether some rank sends something."""
        return False


@dataclass(frozen=True, slots=True)
class ApplyMask(Step):
    """The mask of a pending lookup is applied to the input itself, which stays the same value."""

    input: int
    apply: Callable[[Any], None]

    @property
    def reads(self) -> Sequence[int]:
        return [self.input]

    def run(self, frame: Frame) -> None:
        tensor = frame.tensors[self.input]
        if tensor._lookup is not None:
            self.apply(tensor)
        frame.values[self.input] = tensor._local_tensor


@dataclass(frozen=True, slots=True)
class Forget(Step):
    """An input that is written to forgets its reduced value."""

    input: int

    def run(self, frame: Frame) -> None:
        tensor = frame.tensors[self.input]
        tensor._reduced = None
        tensor._tensor_layout = tensor._tensor_layout.remembering(None)


@dataclass(frozen=True, slots=True)
class GivenCall(Step):
    """`call` with the op's own arguments, the values of `slots` in the places of its tensors."""

    call: Callable[..., Any]
    slots: tuple[int, ...]
    out: int

    @property
    def reads(self) -> Sequence[int]:
        return self.slots

    def run(self, frame: Frame) -> None:
        parts = iter([frame.values[slot] for slot in self.slots])
        args, kwargs = map_tensors(lambda _: next(parts), (frame.args, frame.kwargs))
        frame.values[self.out] = self.call(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class LocalCall(Step):
    """`call` on local tensors; its `count` results go to the slots from `out` on, a single one as it is."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: int
    count: int = 1

    @property
    def reads(self) -> Sequence[int]:
        return slots_in((self.args, self.kwargs))

    def run(self, frame: Frame) -> None:
        values = frame.values
        args = fill(self.args, values)
        result = self.call(*args, **fill(self.kwargs, values)) if self.kwargs else self.call(*args)
        if self.count == 1:
            values[self.out] = result
            return
        values[self.out : self.out + self.count] = all_tensors(result)


@dataclass(frozen=True, slots=True)
class RunOps(Step):
    """Ops one by one, on DTensors, each with a plan of its own that has its bytes: the next depends on values that are
    computed."""

    func: OpOverload
    call: Callable[..., Any]
    out: int

    def run(self, frame: Frame) -> None:
        frame.values[self.out] = self.call(*frame.args, **frame.kwargs)


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
