"""The collectives of programs that torch.compile traces, as ops whose calls stay as they were traced.

Each rank compiles a graph of its own. Graph passes merge calls that look the same, drop calls whose result is not used
and copy others into the backward half. A rank that holds nothing of a tensor has another graph than the others, so a
pass that is sound within one graph leaves the other ranks waiting. An op with an effect is called once, in the order
and in the half (forward or backward) in which it was traced.

They have the signatures of torch's functional collectives, and give results that need no wait.
"""

from types import SimpleNamespace

import torch

from longmesh._torch import functional_collectives as _ops
from longmesh._torch.process_wide import keep_calls


@torch.library.custom_op("longmesh::all_to_all_single", mutates_args=())
def all_to_all_single(
    buffer: torch.Tensor, recv_counts: list[int], send_counts: list[int], group: str
) -> torch.Tensor:
    """See torch's op of this name."""
    return _ops.wait_tensor(_ops.all_to_all_single(buffer.contiguous(), recv_counts, send_counts, group))


@all_to_all_single.register_fake
def _(buffer: torch.Tensor, recv_counts: list[int], send_counts: list[int], group: str) -> torch.Tensor:
    return buffer.new_empty((sum(recv_counts), *buffer.shape[1:]))


@torch.library.custom_op("longmesh::all_gather_into_tensor", mutates_args=())
def all_gather_into_tensor(buffer: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """See torch's op of this name."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(buffer.contiguous(), size, group))


@all_gather_into_tensor.register_fake
def _(buffer: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return buffer.new_empty((buffer.shape[0] * size, *buffer.shape[1:]))


@torch.library.custom_op("longmesh::all_reduce", mutates_args=())
def all_reduce(tensor: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
    """See torch's op of this name."""
    return _ops.wait_tensor(_ops.all_reduce(tensor.contiguous(), reduce_op, group))


@all_reduce.register_fake
def _(tensor: torch.Tensor, reduce_op: str, group: str) -> torch.Tensor:
    return tensor.new_empty(tensor.shape)


@torch.library.custom_op("longmesh::reduce_scatter_tensor", mutates_args=())
def reduce_scatter_tensor(buffer: torch.Tensor, reduce_op: str, size: int, group: str) -> torch.Tensor:
    """See torch's op of this name."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(buffer.contiguous(), reduce_op, size, group))


@reduce_scatter_tensor.register_fake
def _(buffer: torch.Tensor, reduce_op: str, size: int, group: str) -> torch.Tensor:
    return buffer.new_empty((buffer.shape[0] // size, *buffer.shape[1:]))


keep_calls(all_to_all_single, all_gather_into_tensor, all_reduce, reduce_scatter_tensor)

traced_collectives = SimpleNamespace(
    all_to_all_single=all_to_all_single,
    all_gather_into_tensor=all_gather_into_tensor,
    all_reduce=all_reduce,
    reduce_scatter_tensor=reduce_scatter_tensor,
    wait_tensor=lambda result: result,
)
