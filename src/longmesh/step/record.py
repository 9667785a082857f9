"""Recording what a rank does while a model runs without values: ops, storages made and freed, tensors saved.

    recorder = Recorder()
    with recorder.forward():  out = model(...)
    with recorder.backward(): out.loss.backward()
    recorder.ops, recorder.events, recorder.saved

Where an op belongs is said by `Place`: a section (a layer, or outside all) and whether it is inside a block of
attention or MLP. Modules set it by hooks in forward; in backward marks in the graph do, which are identities.

Pitfall: storages are known by their address, which is used again after they were freed; so each gets a number.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longmesh._torch import TorchDispatchMode, schema_of, tree_flatten
from longmesh.attention.execute.watch import watch_attention
from longmesh.attention.plan.attention_plan import AttentionPlan

PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "_grouped_mm"))
_MAKES_ONLY = frozenset(("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"))
# Ops that read a few rows of their first operand.
_LOOKUPS = frozenset(("embedding", "index_select", "gather", "index", "nll_loss_forward", "slice_backward"))


class Place(NamedTuple):
    """Where an op runs: the number of a section (0: outside the layers), and whether inside a block."""

    section: int
    inner: bool


OUTSIDE = Place(0, False)


class Use(NamedTuple):
    """An operand or result: the number of its storage, its bytes, and its shape."""

    storage: int
    num_bytes: int
    shape: tuple[int, ...]


class Dims(NamedTuple):
    """Of a matrix product: (m, k) by (k, n), `batch` of them; `groups`: weights that share the rows between them."""

    m: int
    n: int
    k: int
    batch: int = 1
    groups: int = 1


class Op(NamedTuple):
    """One op. `kind`: product, attention, memory. `dims`: of a product."""

    name: str
    kind: str
    place: Place
    is_backward: bool
    reads: tuple[Use, ...]
    writes: tuple[Use, ...]
    dims: Dims | None = None


class Event(NamedTuple):
    """A storage made (bytes above 0) or freed (below)."""

    storage: int
    num_bytes: int
    place: Place
    is_backward: bool


class Recorder(TorchDispatchMode):
    """What happened, in order. `saved`: storages that autograd kept, with where they were saved first; `calls`: plans
    of attention calls by section; `inputs`: the storage of the hidden states that each section was given."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self.ops: list[Op] = []
        self.events: list[Event] = []
        self.saved: dict[int, Place] = {}
        self.made_by: dict[int, str] = {}
        self.sizes: dict[int, int] = {}
        self.calls: list[tuple[Place, AttentionPlan, str]] = []
        self.inputs: dict[int, int] = {}
        self.place = OUTSIDE
        self.is_backward = False
        self._attending = 0
        self._numbers: dict[int, int] = {}

    # -- running -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Record a forward pass of this thread."""
        self.is_backward = False
        hooks = torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept)
        with self, hooks, watch_attention(self._attend):
            yield

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Record a backward pass."""
        self.is_backward = True
        # On this thread, where whoever watches communication is known.
        with self, torch.autograd.set_multithreading_enabled(False):
            yield

    @property
    def is_attending(self) -> bool:
        """Whether an attention call runs."""
        return self._attending > 0

    @contextlib.contextmanager
    def _attend(self, plan: AttentionPlan, direction: str) -> Iterator[None]:
        self.calls.append((self.place, plan, direction))
        self._attending += 1
        try:
            yield
        finally:
            self._attending -= 1

    def _save(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == self._device and tensor.numel():
            self.saved.setdefault(self.number_of(tensor), self.place)
        return tensor

    # -- ops and storages --------------------------------------------------------------------------

    def number_of(self, tensor: Tensor) -> int:
        """The number of a tensor's storage."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        number = self._numbers.get(address)
        if number is None:
            number = self._numbers[address] = len(self.sizes)
            self.sizes[number] = storage.nbytes()
            place, backward = self.place, self.is_backward
            self.events.append(Event(number, storage.nbytes(), place, backward))
            weakref.finalize(storage, self._freed, address, number).atexit = False
        return number

    def _freed(self, address: int, number: int) -> None:
        del self._numbers[address]
        self.events.append(Event(number, -self.sizes[number], self.place, self.is_backward))

    def note_input(self, place: Place, tree: Any) -> None:
        """Remember which storage a section's input is in."""
        given = [t for t in tree_flatten(tree)[0] if isinstance(t, Tensor) and t.requires_grad]
        if given:
            self.inputs[place.section] = self.number_of(given[0])

    def _use(self, tensor: Tensor) -> Use:
        number = self.number_of(tensor)
        size = min(tensor.numel() * tensor.element_size(), self.sizes[number])
        return Use(number, size, tuple(tensor.shape))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = self._uses((args, kwargs))
        out = func(*args, **(kwargs or {}))
        schema = schema_of(func)
        name = schema.name.partition("::")[2]
        known = {use.storage for use in reads}
        writes = self._uses(out)
        for use in writes:
            if use.storage not in known:
                self.made_by.setdefault(use.storage, "attention" if self._attending else name)
        is_view = not schema.is_mutable and all(use.storage in known for use in writes)
        if is_view or not writes or name in _MAKES_ONLY or schema.name.startswith(("c10d", "_c10d")):
            return out
        if name in _LOOKUPS:
            reads = tuple(use._replace(num_bytes=min(use.num_bytes, writes[0].num_bytes)) for use in reads)
        kind = "attention" if self._attending else "product" if name in PRODUCTS else "memory"
        dims = product_dims(name, args) if kind == "product" else None
        self.ops.append(Op(name, kind, self.place, self.is_backward, reads, writes, dims))
        return out

    def _uses(self, tree: Any) -> tuple[Use, ...]:
        found: dict[int, Use] = {}
        for t in tree_flatten(tree)[0]:
            if isinstance(t, Tensor) and t.device.type == self._device and t.numel():
                use = self._use(t)
                if use.storage not in found or found[use.storage].num_bytes < use.num_bytes:
                    found[use.storage] = use
        return tuple(found.values())


def product_dims(name: str, args: tuple[Any, ...]) -> Dims:
    """The sizes of a matrix product."""
    a, b = (args[1], args[2]) if name in ("addmm", "baddbmm") else (args[0], args[1])
    if name != "_grouped_mm":
        return Dims(a.shape[-2], b.shape[-1], a.shape[-1], a.shape[0] if a.ndim == 3 else 1)
    if a.ndim == b.ndim == 2:  # the gradient of every group's weights: rows of the groups are summed over
        return Dims(a.shape[0], b.shape[1], a.shape[1], 1, args[2].shape[0] if len(args) > 2 else 1)
    groups = b.shape[0] if b.ndim == 3 else a.shape[0]
    return Dims(a.shape[-2], b.shape[-1], a.shape[-1], 1, groups)


# -- where modules begin and end -------------------------------------------------------------------


class _Mark(torch.autograd.Function):
    """The identity; in backward ops from here on belong to `place`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, recorder: Recorder, place: Place) -> Tensor:
        ctx.recorder, ctx.place = recorder, place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.recorder.place = ctx.place
        return grad, None, None


def mark_module(recorder: Recorder, module: nn.Module, place: Place) -> contextlib.ExitStack:
    """Have ops of a module recorded at `place`, in both passes. Closing what is returned removes the hooks."""
    around: list[Place] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        around.append(recorder.place)
        if recorder.place.section != place.section:
            recorder.note_input(place, (args, kwargs))
        found = _marked((args, kwargs), recorder, recorder.place)
        recorder.place = place
        return found

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        recorder.place = around.pop()
        return _marked(output, recorder, place)

    undo = contextlib.ExitStack()
    undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    undo.callback(module.register_forward_hook(after, with_kwargs=True).remove)
    return undo


def _marked(tree: Any, recorder: Recorder, place: Place) -> Any:
    """The same with the first tensor that has a gradient marked."""
    done = False

    def visit(value: Any) -> Any:
        nonlocal done
        if done:
            return value
        if isinstance(value, Tensor) and value.requires_grad and value.ndim >= 2:
            done = True
            return _Mark.apply(value, recorder, place)
        if type(value) in (tuple, list):
            return type(value)(visit(part) for part in value)
        if type(value) is dict:
            return {name: visit(part) for name, part in value.items()}
        return value

    return visit(tree)
