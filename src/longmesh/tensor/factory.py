"""Factories: every rank makes its own part of a DTensor. They send nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import comm_anywhere
from longmesh.comm.local import identity_of
from longmesh.errors import LongmeshError
from longmesh.rules.random import keeps_value, std_of_parts
from longmesh.spec import Layout, Partial, Placement, Replicate
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor import distributions
from longmesh.tensor.arguments import normalize_placements, resolve_mesh
from longmesh.tensor.compiling import between_graphs
from longmesh.tensor.dtensor import DTensor, ShardOrderLike
from longmesh.tensor.foreign import refuse_inside_transform
from longmesh.tensor.meta import check_averages
from longmesh.tensor.random import next_key, sample


def zeros(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    shard_order: ShardOrderLike | None = None,
) -> DTensor:
    """A DTensor of zeros: `zeros(4, 6, device_mesh=mesh, placements=[Shard(0)])`.

    >>> zeros(5, 4, device_mesh=mesh, placements=[Shard(1)]).to_local().shape
    torch.Size([5, 2])
    """
    return _make("zeros", size, 0, dtype, layout, requires_grad, device_mesh, placements, shard_order)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    shard_order: ShardOrderLike | None = None,
) -> DTensor:
    """A DTensor of ones.

    >>> ones(5, device_mesh=mesh, placements=[Shard(0)]).sum().item()
    5.0
    """
    return _make("ones", size, 1, dtype, layout, requires_grad, device_mesh, placements, shard_order)


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    shard_order: ShardOrderLike | None = None,
) -> DTensor:
    """A DTensor whose values are whatever memory held.

    >>> x = empty(5, 4, device_mesh=mesh, placements=[Shard(0)])
    >>> tuple(x.shape), tuple(x.to_local().shape)
    ((5, 4), (3, 4))
    """
    return _make("empty", size, None, dtype, layout, requires_grad, device_mesh, placements, shard_order)


def full(
    size: Any,
    fill_value: float | int | bool | complex,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    shard_order: ShardOrderLike | None = None,
) -> DTensor:
    """A DTensor filled with `fill_value`.

    >>> full((5,), 7.0, device_mesh=mesh, placements=[Shard(0)]).to_local()
    tensor([7., 7., 7.])
    """
    if dtype is None:
        dtype = torch.full((), fill_value).dtype
    return _make(
        "full", (size,), fill_value, dtype, layout, requires_grad, device_mesh, placements, shard_order
    )


def rand(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    shard_order: ShardOrderLike | None = None,
) -> DTensor:
    """A DTensor of uniform numbers in [0, 1): the same global tensor in every layout, see `manual_seed`.

    >>> x = rand(3, 2, device_mesh=mesh, placements=[Shard(0)])
    >>> bool((x < 1).all()), tuple(x.to_local().shape)
    (True, (2, 2))
    """
    kind = _dtype_of("rand", dtype, layout)
    distribution = distributions.uniform(kind.to_real() if kind.is_complex else kind)
    return _make_random("rand", size, distribution, kind, requires_grad, device_mesh, placements, shard_order)


def randn(
    *size: Any,
    requires_grad: bool = False,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    shard_order: ShardOrderLike | None = None,
) -> DTensor:
    """A DTensor of standard normal numbers: the same global tensor in every layout, see `manual_seed`.

    >>> randn(3, 2, device_mesh=mesh, placements=[Shard(1)], dtype=torch.float64).to_local().dtype
    torch.float64
    """
    kind = _dtype_of("randn", dtype, layout)
    distribution = distributions.normal(
        kind.to_real() if kind.is_complex else kind, 0.0, std_of_parts(kind, 1.0)
    )
    return _make_random(
        "randn", size, distribution, kind, requires_grad, device_mesh, placements, shard_order
    )


@between_graphs
def _make_parts(
    caller: str,
    size: tuple[Any, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    shard_order: ShardOrderLike | None,
    fill: Callable[[Layout, torch.Size, tuple[int, ...], torch.device], torch.Tensor],
) -> DTensor:
    """A DTensor of which `fill(layout, shape, coordinate, device)` makes this rank's part; empty outside the mesh. Of
    a pending sum or product one rank has the values, and the others the identity."""
    refuse_inside_transform(caller)
    mesh = resolve_mesh(device_mesh, caller)
    shape = torch.Size(size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size)
    given = (Replicate(),) * mesh.ndim if placements is None else placements
    layout = Layout(mesh, normalize_placements(given, len(shape), caller), shard_order)
    layout.check_ndim(len(shape), shape)
    check_averages(layout, dtype)
    comm = comm_anywhere(mesh)
    device = torch.device(mesh.device_type)
    if not comm.is_member:
        local = torch.empty(0, dtype=dtype, device=device)
    else:
        local = fill(layout, shape, comm.coordinate, device)
        if not keeps_value(layout, comm.coordinate):
            pending = layout.placements[layout.partial_axes[0]]
            assert isinstance(pending, Partial)
            local.fill_(identity_of(pending.reduce_op, dtype))
    return DTensor(local, mesh, layout, shape, contiguous_stride(shape), requires_grad)


def _make(
    caller: str,
    size: tuple[Any, ...],
    value: Any,
    dtype: torch.dtype | None,
    memory_layout: torch.layout,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    shard_order: ShardOrderLike | None,
) -> DTensor:
    kind = _dtype_of(caller, dtype, memory_layout)

    def fill(
        layout: Layout, shape: torch.Size, coordinate: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        local = torch.empty(layout.local_shape(shape, coordinate), dtype=kind, device=device)
        return local if value is None else local.fill_(value)

    return _make_parts(caller, size, kind, requires_grad, device_mesh, placements, shard_order, fill)


def _dtype_of(caller: str, dtype: torch.dtype | None, memory_layout: torch.layout) -> torch.dtype:
    if memory_layout is not torch.strided:
        raise LongmeshError(f"{caller}: a DTensor is strided, got layout={memory_layout}; leave layout= out")
    return torch.get_default_dtype() if dtype is None else dtype


def _make_random(
    caller: str,
    size: tuple[Any, ...],
    distribution: distributions.Distribution,
    dtype: torch.dtype,
    requires_grad: bool,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    shard_order: ShardOrderLike | None,
) -> DTensor:
    key = next_key()  # on every rank, so that all count alike

    def fill(
        layout: Layout, shape: torch.Size, coordinate: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        return sample(distribution, key, layout, shape, coordinate, dtype, device)

    return _make_parts(caller, size, dtype, requires_grad, device_mesh, placements, shard_order, fill)
