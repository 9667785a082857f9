"""A tensor of the made-up device: a CPU tensor with values underneath, or a meta tensor without.

    SimTensor(device="sim:0")
        held: a CPU tensor      valued: results can be compared
        held: a meta tensor     hollow: reading a value raises, so a host that waits for its device is found

An op runs on what is inside. What a GPU does not take is refused: a CPU tensor among the operands, but for what GPUs
take too (a scalar tensor, an index, the other side of a copy). An op with a hollow operand gives hollow results.

Pitfall: the device has an index, `sim:0`; without one autograd has no queue for it and stops at an assertion.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor

from longmesh._torch import make_wrapper, no_torch_function, schema_of, tree_flatten, tree_unflatten
from longmesh.testing.device import attention, experts
from longmesh.testing.device.counts import tell_op
from longmesh.testing.device.group import is_fake_world, run_collective
from longmesh.testing.device.register import DEVICE

STAND_INS = attention.STAND_INS | experts.STAND_INS  # for ops that a GPU has and a CPU lacks
_TAKE_CPU = ("copy_", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_")


class SimTensor(Tensor):
    """A tensor on `sim:0`. Made by torch's own functions with `device="sim"`, by `.to("sim")`, or by `hollow`."""

    held: Tensor
    __slots__ = ("held",)
    __torch_function__ = no_torch_function

    @staticmethod
    def __new__(cls, inner: Tensor) -> SimTensor:
        made = make_wrapper(
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.held = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        super().__init__()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: SimTensor) -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    @property
    def is_hollow(self) -> bool:
        """Whether it has no values."""
        return self.held.is_meta

    def as_subclass(self, cls: Any) -> Any:
        """As torch's, of a tensor that needs no gradient: torch gives no second class to a tensor that has one."""
        if self.requires_grad:
            raise RuntimeError(
                "as_subclass() of a tensor of device sim that needs a gradient: detach it first"
            )
        return cls(self.held) if issubclass(cls, SimTensor) else _joined(cls)(self.held)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimTensor({self.held})"

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()  # by which views of one tensor know each other

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert a tensor of device sim to numpy: use .cpu() first")
        return self.detach().cpu().numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(cls, kind) for kind in types):
            return (
                NotImplemented  # a DTensor among them: it is asked next, as it would be beside a GPU's tensor
            )
        return run_op(func, args, kwargs or {})


@functools.cache
def _joined(cls: type[Tensor]) -> type[Tensor]:
    """Tensors of the device that are of this class."""
    return SimTensor if issubclass(SimTensor, cls) else types.new_class(cls.__name__, (cls, SimTensor))


def hollow(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes, dtype and need of a gradient on the device, without values."""
    inner = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return SimTensor(inner).requires_grad_(tensor.requires_grad)


def run_op(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op of which the device is asked, on what is inside."""
    flat, tree = tree_flatten((args, kwargs))
    name = schema_of(func).name.partition("::")[2]
    tell_op(name, args, kwargs)
    found = [t for t in flat if isinstance(t, SimTensor)]
    is_sent = func.namespace in ("c10d", "_c10d_functional")
    nothing_known = (not found and name != "_to_copy") or is_sent
    empty = any(t.is_hollow for t in found) or (nothing_known and is_fake_world())
    if name not in _TAKE_CPU:
        _refuse_cpu(func, flat)
    if name == "copy_" and not isinstance(args[0], SimTensor) and empty:
        raise RuntimeError("a hollow tensor has no values to copy to the CPU")
    own = {id(t.held): t for t in found}
    args, kwargs = tree_unflatten([_inside(t, empty) for t in flat], tree)
    to_cpu = False
    if kwargs.get("device") is not None:
        to_cpu = torch.device(kwargs["device"]).type == "cpu"
        kwargs["device"] = "meta" if empty else "cpu"
    if to_cpu and empty:
        raise RuntimeError("a hollow tensor has no values to copy to the CPU")
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if is_sent:
        out = run_collective(func, args, kwargs)
    else:
        kernel: Any = STAND_INS.get(func, func)
        out = kernel(*args, **kwargs)
    if empty:
        _empty_written(func, flat)
    return out if to_cpu else _outside(out, own)


def _empty_written(func: Any, flat: list[Any]) -> None:
    """A tensor with values that was written to from one without has none any more."""
    if schema_of(func).is_mutable and isinstance(flat[0], SimTensor) and not flat[0].is_hollow:
        flat[0].held = torch.empty_like(flat[0].held, device="meta")


def _inside(value: Any, empty: bool) -> Any:
    if isinstance(value, SimTensor):
        return value.held.to("meta") if empty and not value.is_hollow else value.held
    return value


def _outside(out: Any, own: dict[int, SimTensor]) -> Any:
    """The results as tensors of the device; a tensor that was given stays itself."""
    flat, tree = tree_flatten(out)
    for t in flat:
        if isinstance(t, Tensor) and id(t) in own and t.shape != own[id(t)].shape:
            own[id(t)].data = SimTensor(t)  # it was resized
    wrapped = [
        (own[id(t)] if id(t) in own else SimTensor(t))
        if isinstance(t, Tensor) and type(t) is not SimTensor
        else t
        for t in flat
    ]
    return tree_unflatten(wrapped, tree)


def _refuse_cpu(func: Any, flat: list[Any]) -> None:
    for value in flat:
        if (
            isinstance(value, Tensor)
            and not isinstance(value, SimTensor)
            and value.ndim
            and not value.is_meta
        ):
            raise RuntimeError(
                f"{func}: expected all tensors to be on the same device, but found one of {tuple(value.shape)} on "
                f"{value.device} besides {DEVICE}:0"
            )
