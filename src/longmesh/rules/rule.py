"""What a rule is: which placements of inputs and outputs are valid together on *one* mesh axis.

    mm(a, b):   S(0), R -> S(0)      rows of a
                R, S(1) -> S(1)      columns of b
                S(1), S(0) -> P      a piece of the contraction each
                P, R -> P            linear in a pending sum

A rule is a pure function of the call (`OpCall`: global shapes and static arguments) and returns such
lines as data. It never sees a mesh, a rank or a tensor's values. "Everything replicated" is always
valid and never listed. The dispatcher combines the axes, and a test checks every line numerically.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from longmesh._torch import OpOverload, schema_of
from longmesh.errors import LongmeshError
from longmesh.spec import Partial, Placement, Replicate, Shard
from longmesh.spec.strides import contiguous_stride

Shape = tuple[int, ...]

R = Replicate()
P, AVG, MIN, MAX, PRODUCT = (Partial(op) for op in ("sum", "avg", "min", "max", "product"))


def S(dim: int) -> Shard:
    return Shard(dim)


# Meta, OpCall and OutMeta are values that nobody writes to, made for every new call. They are not `frozen`: making such
# an object takes four times as long.


@dataclass(slots=True, unsafe_hash=True)
class Meta:
    """Global shape, stride and dtype of one tensor argument; stands in its place in `OpCall.args`."""

    index: int
    shape: Shape
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(slots=True)
class OpCall:
    """An op with its arguments, every tensor (also inside lists) replaced by its `Meta`.

    `tensors` are the metas in order of appearance, `outputs` those of the results. `call["dim"]` is an argument by its
    schema name, its default where it was not given.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: tuple[Meta, ...]
    outputs: tuple[OutMeta, ...] = field(default=())

    def __getitem__(self, name: str) -> Any:
        found = _arguments(self.func).get(name)
        if found is None:
            raise KeyError(f"{self.func} has no argument {name!r}")
        position, default = found
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def argument_names(self) -> list[str]:
        return [argument.name for argument in schema_of(self.func).arguments]

    @property
    def num_returns(self) -> int:
        return _num_returns(self.func)

    def changed(self, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments by position, some of them other ones: what a rank calls with."""
        return tuple([changes.get(name, self[name]) for name in self.argument_names]), {}

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def dim(self, name: str = "dim") -> int:
        """An int argument that counts the dims of the first tensor, from 0 on."""
        return self[name] % max(self.tensors[0].ndim, 1)

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """A list-of-dims argument, from 0 on and sorted; None or empty means all dims of the first tensor."""
        ndim = self.tensors[0].ndim
        given: Any = self[name]
        if given is None or given in ([], ()):
            return tuple(range(ndim))
        if isinstance(given, int):
            given = (given,)
        return tuple(sorted(d % max(ndim, 1) for d in given))


@functools.cache
def _arguments(func: OpOverload) -> dict[str, tuple[int, Any]]:
    """Where each argument of an op stands, and its default."""
    arguments = schema_of(func).arguments
    return {argument.name: (i, argument.default_value) for i, argument in enumerate(arguments)}


@functools.cache
def _num_returns(func: OpOverload) -> int:
    return len(schema_of(func).returns)


@dataclass(slots=True, unsafe_hash=True)
class OutMeta:
    """Global shape and stride of one tensor output."""

    shape: Shape
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AxisRule:
    """One valid line: a placement per tensor argument and per tensor output, on one mesh axis.

    `even`: (tensor, dim) pairs that must be sharded in equal pieces for the line to hold: an input's index, or
    -1 - i for output i. With a third number, the pieces must also be multiples of it.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    even: tuple[tuple[int, int] | tuple[int, int, int], ...] = ()

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


RuleFunction = Callable[[OpCall], list[AxisRule]]
LocalArgs = Callable[["OpCall", "LocalView"], tuple[tuple[Any, ...], dict[str, Any]]]
LocalOp = Callable[["OpCall", "LocalView"], "Callable[..., Any] | None"]
Program = Callable[[Any, OpOverload, tuple[Any, ...], dict[str, Any]], Any]
OutFunction = Callable[[OpCall], tuple[OutMeta, ...]]


@dataclass(frozen=True, slots=True)
class LocalView:
    """What a rank knows when it makes its local call: shapes of its parts, and where those of inputs begin."""

    input_shapes: tuple[Shape, ...]
    input_offsets: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """How an op is distributed.

    `axis_rules(call)` lists the valid lines; None: it has only a program. `out_meta(call)` gives the outputs' global
    metas; where it is None the op is run once on meta tensors. `local_args(call, view)` rewrites the static arguments
    for one rank (tensors stay `Meta`s in their places); where it is None they are passed on as they are.
    `local_op(call, view)` gives what a rank calls instead of the op (a mean that counts the whole, a maximum
    of nothing), or None for the op itself; it takes the op's arguments and never communicates.
    `program(writer, func, args, kwargs)` writes the steps of calls that a line and a local call are not enough for
    (`rules/writer.py`); it hands the others to `writer.by_lines`. `mixed`: it takes plain tensors beside DTensors, and
    DTensors of several meshes. `keeps_lookups`: it is for pending lookups only, which it takes as they are, with their
    masks.
    `reads_sizes`: whether the lines depend on more of a size than whether it is 0, 1 or larger; where they don't, a
    new shape is no new search.
    """

    axis_rules: RuleFunction | None = None
    out_meta: OutFunction | None = None
    local_args: LocalArgs | None = None
    local_op: LocalOp | None = None
    reads_sizes: bool = True
    program: Program | None = None
    mixed: bool = False
    keeps_lookups: bool = False


class Fixed(NamedTuple):
    """A function with its first arguments fixed, to be called on local tensors. Equal where both are."""

    function: Callable[..., Any]
    values: tuple[Any, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*self.values, *args, **kwargs)


def arguments_of(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, defaults included."""
    defaults = {name: default for name, (_, default) in _arguments(func).items()}
    return {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}


def refuse_shapes(call: OpCall, allowed: str) -> NoReturn:
    """Of the whole, on every rank: parts of operands that don't fit may well fit on some, which would go on alone."""
    shapes = ", ".join(str(tuple(meta.shape)) for meta in call.tensors)
    raise LongmeshError(f"{call.func}: shapes {shapes} don't fit together; {allowed}")


def line(inputs: Sequence[Placement], outputs: Sequence[Placement] | Placement, **extra: Any) -> AxisRule:
    """A line of a rule; a single output may be given as it is."""
    return AxisRule(tuple(inputs), (outputs,) if isinstance(outputs, Placement) else tuple(outputs), **extra)


def contiguous(shape: Sequence[int]) -> OutMeta:
    """A dense output of `shape`."""
    return OutMeta(tuple(shape), contiguous_stride(shape))


def like(meta: Meta) -> OutMeta:
    """An output shaped as an input."""
    return OutMeta(meta.shape, meta.stride)


def same_shape(call: OpCall) -> tuple[OutMeta, ...]:
    """Dense outputs, each of the first tensor's shape."""
    return (contiguous(call.tensors[0].shape),) * call.num_returns


def no_lines(call: OpCall) -> list[AxisRule]:
    """Nothing may be sharded: the op needs all of its inputs."""
    return []
