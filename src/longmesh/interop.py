"""Bridges to torch's own DTensor, for FSDP2, checkpoints and others that know only that class.

    theirs = to_torch(x)          # the same local memory, the same mesh, torch.distributed.tensor.DTensor
    x = from_torch(theirs)        # and back

Nothing is copied and nothing is sent: a write through one is seen through the other. A leaf gives a leaf (a parameter a
parameter) with a gradient of its own; the result of an op stays in the autograd graph. Trees of tensors (a state
dict) and modules are converted tensor by tensor, a module in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor as theirs
from torch import nn

from longmesh._torch import own_buffers, own_parameters, tree_map
from longmesh._torch.bridge import torch_spec_types
from longmesh.errors import LongmeshError
from longmesh.parallel.local_parameters import has_local_parameters
from longmesh.parallel.modules import Styled, is_styled
from longmesh.spec import Layout, Partial, Placement, Replicate, Shard
from longmesh.tensor import DTensor
from longmesh.tensor.autograd import check_current

__all__ = ["from_torch", "to_torch"]

TheirSpec, TheirMeta, TheirMaskPartial, TheirStridedShard, _to_strided, _to_order = torch_spec_types()


def to_torch(value: object) -> Any:
    """`value` with every longmesh DTensor as one of torch's own, on the same memory. Sends nothing.

    `value` is a DTensor, a tree of them, or a module (in place; shared parameters stay shared). A shard order becomes
    torch's strided shard, a pending lookup a pending sum. Modules with a parallel style compute as before, since they
    convert their parameters back at each call; so they run under FSDP2.

    >>> theirs = to_torch(distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]))
    >>> type(theirs).__module__, theirs.full_tensor()
    ('torch.distributed.tensor', tensor([0., 1., 2., 3., 4.]))
    """
    if isinstance(value, nn.Module):
        for name, module in value.named_modules():
            if is_styled(module) and not isinstance(module, Styled):
                raise LongmeshError(
                    f"to_torch: '{name}' is a {type(module).__name__} with a forward of its own, to which a style "
                    "gives longmesh DTensors; its parameters must be longmesh DTensors, too. Convert its state_dict() "
                    "instead"
                )
        _let_adopt(value, adopt)
    return _convert(value, DTensor, _one_to_torch)


def from_torch(value: object) -> Any:
    """`value` with every DTensor of torch as a longmesh DTensor, on the same memory. The inverse of `to_torch`.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> from_torch(to_torch(x)).to_local().data_ptr() == x.to_local().data_ptr()
    True
    """
    if isinstance(value, nn.Module):
        _let_adopt(value, None)
    return _convert(value, theirs.DTensor, _one_from_torch)


def adopt(parameter: Any) -> Any:
    """A parameter of torch's DTensor as ours, in the autograd graph: its gradient goes to the parameter."""
    return _in_graph_from_torch(parameter) if isinstance(parameter, theirs.DTensor) else parameter


def _let_adopt(root: nn.Module, function: Callable[[Any], Any] | None) -> None:
    for module in root.modules():
        if isinstance(module, Styled) or has_local_parameters(module):
            module.__dict__["adopt"] = function


def _convert(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, nn.Module):
        done: dict[int, Any] = {}
        for module in value.modules():
            for tensors in (own_parameters(module), own_buffers(module)):
                for name, tensor in tensors.items():
                    if isinstance(tensor, kind):
                        if id(tensor) not in done:
                            done[id(tensor)] = convert(tensor)
                        tensors[name] = done[id(tensor)]
        return value
    return tree_map(lambda leaf: convert(leaf) if isinstance(leaf, kind) else leaf, value)


# -- one tensor ------------------------------------------------------------------------------------


def _one_to_torch(tensor: DTensor) -> Any:
    tensor._apply_lookup_mask()
    check_current(tensor)
    mesh, placements = tensor.device_mesh, _their_placements(tensor)
    if tensor.requires_grad and not tensor.is_leaf:
        return theirs.DTensor.from_local(
            tensor.to_local(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    meta = TheirMeta(tensor.shape, tensor.stride(), tensor.dtype)
    result = theirs.DTensor(
        tensor._local_tensor.detach(),
        TheirSpec(mesh, placements, tensor_meta=meta),
        requires_grad=tensor.requires_grad,
    )
    return _as_leaf_of(tensor, result)


def _one_from_torch(tensor: Any) -> Any:
    if tensor.requires_grad and not tensor.is_leaf:
        return _in_graph_from_torch(tensor)
    mesh, layout = tensor.device_mesh, _our_layout(tensor)
    local = tensor._local_tensor
    expected = layout.local_shape(tensor.shape, tuple(mesh.get_coordinate() or ()))
    if tuple(local.shape) != expected:
        raise LongmeshError(
            f"from_torch: a tensor of shape {tuple(tensor.shape)} laid out as {layout} has {expected} on this rank, "
            f"and its local part is {tuple(local.shape)}; redistribute it to Shard or Replicate in torch first"
        )
    result = DTensor(local.detach(), mesh, layout, tensor.shape, tensor.stride(), tensor.requires_grad)
    return _as_leaf_of(tensor, result)


def _in_graph_from_torch(tensor: Any) -> DTensor:
    layout = _our_layout(tensor)
    return DTensor.from_local(
        tensor.to_local(),
        tensor.device_mesh,
        layout.placements,
        shape=tensor.shape,
        stride=tensor.stride(),
        shard_order=layout.shard_order,
    )


def _as_leaf_of(original: torch.Tensor, converted: torch.Tensor) -> torch.Tensor:
    if isinstance(original, nn.Parameter):
        return nn.Parameter(converted, requires_grad=original.requires_grad)
    return converted


# -- placements ------------------------------------------------------------------------------------


def _their_placements(tensor: DTensor) -> tuple[Any, ...]:
    layout = tensor._layout
    placements: list[Any] = []
    for placement in layout.placements:
        match placement:
            case Shard(dim):
                placements.append(theirs.Shard(dim))
            case Partial(reduce_op=op):
                placements.append(theirs.Partial(op))
            case _:
                placements.append(theirs.Replicate())
    if layout.is_default_order:
        return tuple(placements)
    for dim, axes in layout.shard_order:
        pieces = torch.Size(layout.mesh.sizes[a] for a in axes).numel()
        if axes != tuple(sorted(axes)) and tensor.shape[dim] % pieces:
            raise LongmeshError(
                f"to_torch: dim {dim} of {tuple(tensor.shape)} is sharded over axes {list(axes)} in this order into "
                f"{pieces} unequal pieces, which torch's strided shards place elsewhere; redistribute to the "
                "default order first"
            )
    return _to_strided(
        layout.shard_order,  # pyright: ignore[reportArgumentType]
        tuple(placements),
        tensor.device_mesh,
    )


def _our_layout(tensor: Any) -> Layout:
    spec = tensor._spec
    placements = [_our_placement(p, tensor) for p in spec.placements]
    order = spec.shard_order
    if any(isinstance(p, TheirStridedShard) for p in spec.placements):
        order = _to_order(spec.placements, tensor.device_mesh)
        if order is None:
            raise LongmeshError(
                f"from_torch: {spec.placements} is not an order of sharding dims over mesh axes; redistribute it to "
                "Shard or Replicate in torch first"
            )
    return Layout(tensor.device_mesh, placements, [(e.tensor_dim, e.mesh_dims) for e in order])


def _our_placement(placement: Any, tensor: Any) -> Placement:
    if type(placement) is theirs.Replicate:
        return Replicate()
    if type(placement) in (theirs.Shard, TheirStridedShard):
        return Shard(placement.dim)
    if type(placement) is theirs.Partial:
        return Partial(placement.reduce_op)
    kind = "a pending lookup" if isinstance(placement, TheirMaskPartial) else type(placement).__name__
    raise LongmeshError(
        f"from_torch: {tensor.placements} has {kind}, which only torch can finish; redistribute it to Shard, Replicate "
        "or Partial in torch first"
    )
