"""A DTensor as torch.distributed.checkpoint sees it: the box of the global tensor that this rank holds.

Written are the boxes that hold something. An empty box is left out: it may start where another rank's real one
does, and a checkpoint knows boxes by where they start. A tensor without any element is one empty box at the origin.
"""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from longmesh._torch import AsyncCollectiveTensor, increment_version
from longmesh.errors import LongmeshError
from longmesh.tensor.autograd import check_current
from longmesh.tensor.dtensor import DTensor


def chunk_list(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """The box this rank holds, if there is something in it."""
    _check(tensor)
    own = tensor._tensor_layout
    if not own.comm.is_member:
        return []
    where = own.comm.coordinate
    sizes = torch.Size(map(int, own.layout.local_shape(own.shape, where)))
    if sizes.numel():
        offsets = torch.Size(map(int, own.layout.local_offset(own.shape, where)))
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)]
    if torch.Size(own.shape).numel():
        return []
    return [ChunkStorageMetadata(offsets=torch.Size([0] * len(own.shape)), sizes=torch.Size(own.shape))]


def boxes_to_load(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """The same of a tensor that is about to be loaded into: that counts as a write to it, on every rank."""
    if tensor._origin is not None:
        raise LongmeshError(
            f"the tensor of shape {tuple(tensor.shape)} is a view along a sharded dim: its local tensor is a copy, and "
            "what is loaded into that would be lost; load into the tensor that it is a view of"
        )
    boxes = chunk_list(tensor)
    if not tensor.is_inference():
        increment_version([tensor])
    return boxes


def write_items(fqn: str, tensor: DTensor) -> list[WriteItem]:
    """What this rank has to write of `tensor`. Ranks with the same box all list it; one of them writes it."""
    check_current(tensor)
    local = tensor._local_tensor
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties(dtype=local.dtype, requires_grad=tensor.requires_grad),
                size=tensor.shape,
            ),
        )
        for chunk in chunk_list(tensor)
    ]


def tensor_shard(tensor: DTensor, index: MetadataIndex) -> torch.Tensor:
    """The local tensor of the box that starts at `index.offset`."""
    for chunk in chunk_list(tensor):
        if index.offset is None or index.offset == chunk.offsets:
            local = tensor._local_tensor
            if isinstance(
                local, AsyncCollectiveTensor
            ):  # still under way; what it holds is the tensor itself
                local = local.wait()
            return local.detach() if local.numel() else local.new_empty(chunk.sizes)
    raise LongmeshError(f"{index.fqn}: this rank holds no part that starts at {index.offset}")


def _check(tensor: DTensor) -> None:
    if tensor._layout.partial_axes:
        raise LongmeshError(
            f"a tensor of layout {tensor._layout} has a reduction pending: its parts are terms, not pieces, and can't "
            "be saved or loaded; redistribute it to Shard() or Replicate() first"
        )
