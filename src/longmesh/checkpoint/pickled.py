"""A pickle as plain values: nothing in it is imported, made or called.

    pickle of Point(1, 2)   ->   Record("shapes.Point", args=(), state={"x": 1, "y": 2})

A reader takes the records it knows by name and builds its own values from them. `names` are all classes and functions
that the pickle mentions, so that one that is not known can be refused by its name.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

_MOST_SHARED = 1000  # values for each byte of a pickle: honest ones share a few small tuples


class NotPlain(ValueError):
    """Bytes that are not a pickle, or one that does what no plain description needs."""


class Name(str):
    """A class or function that a pickle mentions, as `module.name`."""

    __slots__ = ()


class Record:
    """An object of a pickle: what would be called, with which arguments, and the state it would get."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


class Decoded(NamedTuple):
    """The value of a pickle and the names it mentions, in the order of the file."""

    value: Any
    names: list[str]


Check = Callable[[str, tuple[Any, ...]], None]


def decode(data: bytes, check: Check | None = None) -> Decoded:
    """The value of a pickle of protocol 2 or later, with a `Record` for each object.

    With `check`, which gets the name and arguments of every call before those after it, for pickles of objects: states
    and items may go to anything, and are left out.
    """
    machine = _PickleMachine(check, _MOST_SHARED * len(data))
    try:
        for opcode, argument, _ in pickletools.genops(data):
            step = _STEPS.get(opcode.name)
            if step is not None:
                step(machine, argument)
            elif opcode.name in _CONSTANTS:
                machine.stack.append(_CONSTANTS[opcode.name])
            elif opcode.name in _VALUES:
                machine.stack.append(argument)
            elif opcode.name not in _NOTHING:
                raise NotPlain(f"it has the instruction {opcode.name}")
        (value,) = machine.stack
    except NotPlain:
        raise
    except Exception as error:  # bytes that are not a pickle raise anything
        raise NotPlain(f"it is not a pickle of plain values ({type(error).__name__}: {error})") from error
    return Decoded(value, machine.names)


def list_names(data: bytes) -> list[str]:
    """The classes and functions that any pickle mentions, for a message: each once, in the order of the file."""
    names: dict[str, None] = {}
    strings: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in ("GLOBAL", "INST"):
                names[str(argument).replace(" ", ".", 1)] = None
            elif opcode.name == "STACK_GLOBAL" and len(strings) > 1:
                names[".".join(strings[-2:])] = None
            elif isinstance(argument, str):
                strings.append(argument)
    except ValueError:
        pass  # cut off: what was found until here
    return list(names)


class _PickleMachine:
    def __init__(self, check: Check | None, most: int) -> None:
        self.check = check
        self.most = most
        self.tuples: dict[
            int, tuple[tuple[Any, ...], int]
        ] = {}  # by id, with how many values each has inside
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.names: list[str] = []

    def push_name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise NotPlain("it makes up the name of a class")
        found = Name(f"{module}.{name}")
        self.names.append(str(found))
        self.stack.append(found)

    def push_tuple(self, items: tuple[Any, ...]) -> None:
        """A tuple of itself twice, of that twice, ...: its hash would take for ever."""
        size = 1 + sum(self.tuples[id(item)][1] if id(item) in self.tuples else 1 for item in items)
        if size > self.most:
            raise NotPlain("it has a tuple in itself again and again")
        self.tuples[id(items)] = items, size
        self.stack.append(items)

    def since_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items


def _mark(machine: _PickleMachine, _: Any) -> None:
    machine.marks.append(machine.stack)
    machine.stack = []


def _call(machine: _PickleMachine, _: Any) -> None:
    args = machine.stack.pop()
    name = machine.stack.pop()
    if not isinstance(name, Name) or not isinstance(args, tuple):
        raise NotPlain("it calls what is not named")
    if machine.check is not None:
        machine.check(str(name), args)
    ordered = name == "collections.OrderedDict" and not args
    machine.stack.append({} if ordered else Record(str(name), args))


def _build(machine: _PickleMachine, _: Any) -> None:
    state = machine.stack.pop()
    if isinstance(machine.stack[-1], Record):
        machine.stack[-1].state = state
    elif machine.check is None:
        raise NotPlain("it gives a state to what is not an object")


def _append(machine: _PickleMachine, items: list[Any]) -> None:
    if type(machine.stack[-1]) is list:
        machine.stack[-1].extend(items)
    elif machine.check is None:
        raise NotPlain("it appends to what is not a list")


def _set_items(machine: _PickleMachine, items: list[Any]) -> None:
    if machine.check is not None:  # keys may be objects, whose records have no hashes of their values
        return
    if type(machine.stack[-1]) is not dict:
        raise NotPlain("it sets items of what is not a dict")
    machine.stack[-1].update(zip(items[::2], items[1::2], strict=True))


def _tuple(machine: _PickleMachine, size: int) -> None:
    items = tuple(machine.stack[len(machine.stack) - size :])
    del machine.stack[len(machine.stack) - size :]
    machine.push_tuple(items)


def _get(machine: _PickleMachine, index: int) -> None:
    machine.stack.append(machine.memo[index])


def _put(machine: _PickleMachine, index: int | None) -> None:
    machine.memo[len(machine.memo) if index is None else index] = machine.stack[-1]


def _pair(machine: _PickleMachine) -> list[Any]:
    value, key = machine.stack.pop(), machine.stack.pop()
    return [key, value]


def _stack_global(machine: _PickleMachine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.push_name(module, name)


def _persistent(machine: _PickleMachine, _: Any) -> None:
    if machine.check is None:
        raise NotPlain("it has the instruction BINPERSID")
    machine.stack.append(Record("", (machine.stack.pop(),)))


_Step = Callable[[_PickleMachine, Any], None]
_STEPS: dict[str, _Step] = {
    "MARK": _mark,
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "TUPLE": lambda m, _: m.push_tuple(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: _tuple(m, 1),
    "TUPLE2": lambda m, _: _tuple(m, 2),
    "TUPLE3": lambda m, _: _tuple(m, 3),
    "APPEND": lambda m, _: _append(m, [m.stack.pop()]),
    "APPENDS": lambda m, _: _append(m, m.since_mark()),
    "SETITEM": lambda m, _: _set_items(m, _pair(m)),
    "SETITEMS": lambda m, _: _set_items(m, m.since_mark()),
    "GLOBAL": lambda m, argument: m.push_name(*argument.split(" ", 1)),
    "STACK_GLOBAL": _stack_global,
    "EMPTY_SET": lambda m, _: m.stack.append([]),
    "BINPERSID": _persistent,
    "REDUCE": _call,
    "NEWOBJ": _call,
    "BUILD": _build,
    "BINPUT": _put,
    "LONG_BINPUT": _put,
    "MEMOIZE": _put,
    "BINGET": _get,
    "LONG_BINGET": _get,
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = frozenset(
    [
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "LONG4",
        "BINFLOAT",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "SHORT_BINSTRING",
        "BINUNICODE8",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
    ]
)
_NOTHING = frozenset(("PROTO", "FRAME", "STOP"))
