"""What knows only plain tensors or torch's own DTensor refuses ours by name, before anything is sent.

FSDP2 would take a longmesh DTensor for a plain tensor: it asks a parameter for the attributes below first. Collectives
of torch.distributed are refused by their rules (`rules/collectives.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from longmesh._torch import base_of, functorch_level, is_tracing, is_transformed
from longmesh.errors import LongmeshError


def refuse_transformed(caller: str) -> NoReturn:
    """What makes, opens or redistributes DTensors inside torch.func."""
    raise LongmeshError(
        f"{caller} inside a transform of torch.func (grad, vjp, vmap, jacrev): torch wraps tensors in a class of its "
        "own there, which hides whether they are DTensors. Ops on DTensors and modules with a parallel "
        f"style work inside; call {caller} outside, or use torch.autograd.grad"
    )


def refuse_inside_transform(caller: str) -> None:
    """Of what makes tensors: those made inside torch.func's grad and vjp are of torch's class, and have no memory."""
    if functorch_level() is not None and is_transformed(torch.empty(0)):
        refuse_transformed(caller)


def refuse_sparse(caller: str, tensor: torch.Tensor) -> None:
    """Of what makes DTensors of plain tensors: a part must have strides."""
    if tensor.layout is not torch.strided:
        raise LongmeshError(
            f"{caller} takes a strided tensor, got one of layout {tensor.layout}; call to_dense() first"
        )


def refuse_fsdp(tensor: torch.Tensor) -> NoReturn:
    """The getter of what fully_shard asks a parameter for."""
    raise LongmeshError(
        "fully_shard (FSDP2) takes plain parameters or torch's own DTensor, got a longmesh DTensor of shape "
        f"{tuple(tensor.shape)}; convert the module with longmesh.interop.to_torch first, or make data parallelism an "
        "axis of your mesh"
    )


def refuse_memory(name: str) -> Callable[..., NoReturn]:
    """A method that torch carries out on a tensor's own memory, where no op is dispatched. A DTensor has no memory of
    its own: torch would end the process, or say nothing of what to do."""

    def refuse(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise LongmeshError(
            f"{name}() works on a tensor's own memory, and a DTensor has its data in parts on several ranks; call "
            f"full_tensor() first, on every rank, or use this rank's part: x.to_local().{name}()"
        )

    refuse.__name__ = name
    refuse.__doc__ = "Refused: call it on full_tensor() or to_local()."
    return refuse


def refuse_reshape(name: str) -> Callable[..., torch.Tensor]:
    """The method `name`, an in-place view, which a DTensor that needs a gradient and is not a view refuses.

    Every rank answers alike, whatever views are alive there.
    """
    by_torch: Callable[..., torch.Tensor] = getattr(torch.Tensor, name)

    def reshape(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.requires_grad and not is_tracing() and base_of(tensor) is None:
            raise LongmeshError(
                f"{name}() of a DTensor of shape {tuple(tensor.shape)} that needs a gradient: autograd would take its "
                "views, and what it saved of it for a backward, as those of the new shape; use "
                f"{name[:-1]}(), which returns a new tensor"
            )
        return by_torch(tensor, *args, **kwargs)

    reshape.__name__ = name
    reshape.__doc__ = by_torch.__doc__
    return reshape
