"""What torch's own DTensor and its checkpoints are made of. Looked up when asked for: only the bridges import those."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from longmesh._torch.lookup import find, find_class

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import (
        _StorageInfo as StorageInfo,  # noqa: F401 (the type of what storage_info_class gives)
    )


def storage_info_class() -> Any:
    """What a checkpoint's description says of a piece: its file, offset and length. Imported when it is asked for."""
    return find_class("torch.distributed.checkpoint.filesystem:_StorageInfo", "checkpoints in torch's format")


class TorchSpecTypes(NamedTuple):
    """The classes that torch's own DTensor is made of."""

    spec: Any
    meta: Any
    mask_partial: Any
    strided_shard: Any
    # How torch writes an order of mesh axes: as strided shards, and back.
    order_to_strided: Callable[..., Any]
    strided_to_order: Callable[..., Any]


def torch_spec_types() -> TorchSpecTypes:
    """Looked up when called: nothing but the bridge imports torch's own DTensor."""
    theirs, feature = "torch.distributed.tensor", "interop with torch's own DTensor"
    spec = f"{theirs}._dtensor_spec:DTensorSpec"
    return TorchSpecTypes(
        find_class(spec, feature),
        find_class(f"{theirs}._dtensor_spec:TensorMeta", feature),
        find_class(f"{theirs}._ops._embedding_ops:_MaskPartial", feature),
        find_class(f"{theirs}.placement_types:_StridedShard", feature),
        find(f"{spec}._convert_shard_order_to_StridedShard", feature),
        find(f"{spec}._maybe_convert_StridedShard_to_shard_order", feature),
    )
