"""What an op's plan depends on, as a key: how each tensor is laid out, and the values of the other arguments.

    add.Tensor(x, y)        (add, layout of x, layout of y)
    mul.Tensor(x, 2.5)      (mul, layout of x, float), as for any float: the plan of a pointwise op does not read it
    _softmax(x, 1, False)   (softmax, (1, False)): of an op on one tensor, whose plans its layout holds, the values
    sum.dim_IntList(x, [1]) (sum, (1,), ())
    cat([x, y], 1)          (cat, (1,), layout of x, layout of y)

The op stands in it as its OpTable: when a rule changes, all tables are made anew, and no old key is found again.
"""

from __future__ import annotations

from typing import Any

import torch

from longmesh._torch import OpOverload, increment_version, schema_of
from longmesh.rules.op_facts import is_pointwise
from longmesh.rules.table import rule_of
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.table_notes import Note
from longmesh.tensor.tensor_layout import TensorLayout

# Stands in a key for a plain tensor that is not a scalar.
PLAIN = object()
# Of these the value says all: no two of them that differ are equal.
VALUE_TYPES = frozenset((int, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device))

# Forms of a key: any arguments; a list of tensors and values that hash; one tensor and such values; one tensor, a list
# of integers and such values.
GENERAL, LIST, VALUES, SIZES = range(4)
_HASHED = frozenset(("int", "SymInt", "bool", "str", "float", "Device"))


class OpTable:
    """What is known of one op. `reads_floats`: whether its plans depend on the values of floats. `written_lists`: the
    places of lists that it writes to. `is_mixed`: it takes plain tensors beside DTensors."""

    __slots__ = ("form", "func", "is_mixed", "note", "reads_floats", "writes", "written_lists")

    def __init__(self, func: OpOverload, note: Note | None) -> None:
        schema = schema_of(func)
        self.func = func
        self.note = note
        rule = rule_of(func)
        self.is_mixed = rule is not None and rule.mixed
        self.reads_floats = not is_pointwise(func)
        self.form = _form(schema, self.reads_floats)
        self.writes = schema.is_mutable
        self.written_lists = tuple(
            [
                place
                for place, argument in enumerate(schema.arguments)
                if argument.alias_info is not None
                and argument.alias_info.is_write
                and str(argument.type).startswith("List")
            ]
        )

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """The key of a call; None where it has symbolic sizes, which don't hash."""
        key = None
        if not kwargs and self.form == LIST:
            key = key_of_list(self, args)
        elif not kwargs and self.form != GENERAL:
            key = (self, args[1:]) if self.form == VALUES else key_of_sizes(self, args[1:])
        if key is None:
            key = (self, *exact_key(args, kwargs, self.reads_floats))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def count_writes(self, lead: TensorLayout, args: tuple[Any, ...]) -> None:
        """Count the writes that torch does not: in inference mode, and of subclasses in lists of tensors."""
        if torch.is_inference_mode_enabled():
            lead.comm.num_writes += 1
        for place in self.written_lists:
            if place < len(args):
                increment_version(args[place])


def key_of_sizes(table: OpTable, rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The key of one tensor, and `rest`: a list of integers (None: not given) and values."""
    return (table, *rest) if not rest or rest[0] is None else (table, tuple(rest[0]), rest[1:])


def key_of_list(table: OpTable, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The key of a list of DTensors and values; None where there is a plain tensor in the list."""
    try:
        return (table, args[1:], *[t._tensor_layout for t in args[0]])
    except AttributeError:
        return None


def _form(schema: Any, reads_floats: bool) -> int:
    """What the key of an op may be made of. Where an argument has one type, its value needs no type beside it, though
    1, 1.0 and True are equal."""
    kinds = [str(a.type) for a in schema.arguments if not a.kwarg_only]
    kinds = [
        kind.removeprefix("Optional[").removesuffix("]") if "List" not in kind else kind for kind in kinds
    ]
    hashed = _HASHED if reads_floats else _HASHED - {"float"}
    if kinds[:1] in (["Tensor"], ["List[Tensor]"]) and all(kind in hashed for kind in kinds[1:]):
        return VALUES if kinds[0] == "Tensor" else LIST
    if kinds[:1] != ["Tensor"]:
        return GENERAL
    is_sizes = kinds[1] in ("List[int]", "Optional[List[int]]") and all(kind in hashed for kind in kinds[2:])
    return SIZES if is_sizes else GENERAL


def describe(value: Any, parts: list[Any], reads_floats: bool = True) -> Any:
    """Append to `parts` what a plan depends on: how a tensor is laid out, the value of anything else. Returns the value
    with each DTensor's local part in its place."""
    kind = type(value)
    if kind in VALUE_TYPES:
        parts.append(value)
        return value
    if kind is float:
        parts.append(float)
        if reads_floats:
            parts.append(value)
        return value
    if kind is list or kind is tuple:
        parts.append(list)
        parts.append(len(value))
        head = value[0] if value else None
        first = type(head)
        if first is int:  # sizes, dims: all of them integers, or symbols that don't hash
            parts += value
            return value
        if issubclass(first, DTensor):
            try:
                parts += [v._tensor_layout for v in value]
                return [v._local_tensor for v in value]
            except AttributeError:  # a plain tensor among them
                pass
        if first is bool:
            parts.append(bool)
            parts += value
            return value
        if first is float and set(map(type, value)) == {float}:  # one number for each tensor of a list
            parts.append(float)
            if reads_floats:
                parts += value
            return value
        return [describe(v, parts, reads_floats) for v in value]
    if isinstance(value, DTensor):
        parts.append(value._tensor_layout)
        return value._local_tensor
    if kind is bool or kind is complex:
        parts.append(kind)
        parts.append(value)
    elif kind is slice:
        parts.append(slice)
        describe([value.start, value.stop, value.step], parts)
    elif isinstance(value, torch.Tensor):
        # A number that torch has wrapped, as in x * 2.0: the plan is the same for any.
        parts += (value.dtype,) if value.ndim == 0 else (PLAIN, value.dtype, value.shape)
    else:
        parts.append(value)
    return value


def describe_named(kwargs: dict[str, Any], parts: list[Any], reads_floats: bool = True) -> dict[str, Any]:
    parts.append(tuple(kwargs))
    return {name: describe(value, parts, reads_floats) for name, value in kwargs.items()}


def exact_key(args: tuple[Any, ...], kwargs: dict[str, Any], reads_floats: bool = True) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in args:
        describe(value, parts, reads_floats)
    if kwargs:
        describe_named(kwargs, parts, reads_floats)
    return tuple(parts)
