"""A DTensor copied in memory, written to a file as a Python object, and read again."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch.process_wide import allow_unpickling
from longmesh.spec import Layout, MaskPartial, MeshShape, Partial, Replicate, Shard, ShardOrderEntry
from longmesh.tensor.autograd import check_current, current_part
from longmesh.tensor.dtensor import DTensor


def alias_of(tensor: DTensor) -> DTensor:
    """`copy.copy`: another tensor on the same memory. Writes to one count as writes to the other."""
    alias = tensor.detach().requires_grad_(tensor.requires_grad)
    result = nn.Parameter(alias, alias.requires_grad) if isinstance(tensor, nn.Parameter) else alias
    vars(result).update({name: value for name, value in vars(tensor).items() if name not in vars(result)})
    return result  # pyright: ignore[reportReturnType]


def copy_of(tensor: DTensor, memo: dict[int, Any]) -> DTensor:
    """`copy.deepcopy` of a leaf, its gradient with it."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        raise RuntimeError("deepcopy of a DTensor that is not a leaf: detach() it first, as for any tensor")
    local = current_part(tensor).detach()
    # One place in memory for several elements stays one, as in a copy of a plain tensor.
    local = copy.deepcopy(local) if tensor._tensor_layout.is_expanded else local.clone()
    result = rebuild(local, *_described(tensor))
    vars(result).update(vars(tensor), _origin=None)
    result.__class__ = tensor.__class__
    if tensor.grad is not None:
        result.grad = tensor.grad.__deepcopy__(memo)
    memo[id(tensor)] = result
    return result


def state_of(tensor: DTensor) -> tuple[Any, ...]:
    """What pickle writes: a function and its arguments."""
    tensor._apply_lookup_mask()
    check_current(tensor)  # one rank alone may write it
    local = tensor._local_tensor.detach()
    return rebuild, (local, *_described(tensor), isinstance(tensor, nn.Parameter))


def _described(tensor: DTensor) -> tuple[Any, ...]:
    return tensor._mesh, tensor._layout, tensor.shape, tensor.stride(), tensor.requires_grad


def rebuild(
    local: torch.Tensor,
    mesh: DeviceMesh,
    layout: Layout,
    shape: torch.Size,
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool = False,
) -> DTensor:
    result = DTensor(local, mesh, layout, shape, stride, requires_grad)
    return nn.Parameter(result, requires_grad) if is_parameter else result  # pyright: ignore[reportReturnType]


# What torch.load(weights_only=True) may rebuild.
allow_unpickling(
    rebuild, DTensor, DeviceMesh, Layout, MeshShape, Shard, Replicate, Partial, MaskPartial, ShardOrderEntry
)
