"""local_map: a function of plain tensors, applied to the local parts of DTensors.

    normalize = local_map(fn, out_placements=[Shard(0)], in_placements=([Shard(0)],))
    y = normalize(x)                      # x: 5 rows on 2 ranks; fn sees 3 and 2 of them; y: 5 rows

Where an input is sharded unevenly, the ranks exchange the sizes of their outputs to find the global shapes. Where all
parts are equal, outputs are taken to be equal, too, and nothing is sent. A rank outside the mesh calls the function
on zeros, to learn the shapes of its results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import AsyncCollectiveTensor, tree_flatten, tree_map, tree_unflatten
from longmesh.comm import comm_anywhere, comm_of
from longmesh.comm.verify import gather_rows
from longmesh.errors import LongmeshError
from longmesh.spec import Layout, Placement, Replicate
from longmesh.tensor import DTensor
from longmesh.tensor.arguments import normalize_placements
from longmesh.tensor.meta import joined_shape
from longmesh.tensor.outside import results_outside

PlacementType = Sequence[Placement] | None
InputPlacements = tuple[PlacementType, ...] | None
OutputPlacements = PlacementType | tuple[PlacementType, ...]


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: OutputPlacements = None,
    in_placements: InputPlacements = None,
    in_grad_placements: InputPlacements = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Run `func` on the local tensors of its DTensor arguments; its results become DTensors with `out_placements`.

    The placements go by the flattened positional arguments and results. Without `in_placements` DTensors may have any
    layout; in it, None is for what is not a DTensor. An input in another layout than `in_placements` says is an error,
    or with `redistribute_inputs` is redistributed. `in_grad_placements` are the placements of the gradients that
    `func` gives its inputs, None where they are the input's. In `out_placements`, None is for what is not a tensor, or
    for a replicated one. Keyword arguments are passed on. Without DTensor arguments it is just `func`. Without `func`
    it is a decorator. Collective: every rank of the mesh. On a rank outside the mesh `func` runs on zeros and the
    results have no data.

    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> half = local_map(lambda part: part / 2, out_placements=[Shard(0)], in_placements=([Shard(0)],))
    >>> half(x).full_tensor()
    tensor([0.0000, 0.5000, 1.0000, 1.5000, 2.0000])
    """
    if func is None:
        return functools.partial(  # pyright: ignore[reportReturnType]
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    function = func

    @functools.wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, structure = tree_flatten(args)
        given = [leaf for leaf in flat if isinstance(leaf, DTensor)]
        _check_counts(flat, in_placements, "in_placements")
        _check_counts(flat, in_grad_placements, "in_grad_placements")
        if not given:
            return function(*args, **kwargs)
        inputs = [_bring(leaf, i, in_placements, redistribute_inputs) for i, leaf in enumerate(flat)]
        is_uneven = any(_is_uneven(leaf) for leaf in inputs if isinstance(leaf, DTensor))
        mesh = given[0].device_mesh if device_mesh is None else device_mesh
        if not comm_anywhere(mesh).is_member:

            def run(where: tuple[int, ...]) -> Any:
                parts = [_zeros(leaf, where) if isinstance(leaf, DTensor) else leaf for leaf in inputs]
                return function(*tree_unflatten(parts, structure), **kwargs)

            return _outside(run, given, mesh, out_placements, is_uneven)
        locals_ = [_local(leaf, i, in_grad_placements) for i, leaf in enumerate(inputs)]
        result = function(*tree_unflatten(locals_, structure), **kwargs)
        return _wrap(result, mesh, out_placements, _gathered_shapes(mesh) if is_uneven else None)

    return mapped


def _check_counts(flat: list[Any], placements: InputPlacements, name: str) -> None:
    if placements is not None and len(placements) != len(flat):
        raise LongmeshError(
            f"local_map: {name} has {len(placements)} entries for {len(flat)} (flattened) positional arguments; give "
            "one for each, None for what is not a tensor"
        )


def _bring(leaf: Any, position: int, placements: InputPlacements, redistribute: bool) -> Any:
    """An argument as `in_placements` wants it."""
    if placements is None:
        return leaf
    wanted = placements[position]
    if not isinstance(leaf, DTensor):
        if wanted is not None and not isinstance(leaf, torch.Tensor):
            raise LongmeshError(
                f"local_map: argument {position} is a {type(leaf).__name__} and has in_placements {tuple(wanted)}; "
                "give None for what is not a tensor"
            )
        return leaf
    if wanted is None:
        raise LongmeshError(
            f"local_map: argument {position} is a DTensor, which expects placements: in_placements has None; "
            f"give its placements, e.g. {leaf.placements}, or leave in_placements out to take inputs in any layout"
        )
    layout = normalize_placements(wanted, leaf.ndim, "local_map(in_placements)")
    if leaf.placements == layout:
        return leaf
    if not redistribute:
        raise LongmeshError(
            f"local_map: argument {position} is laid out as {leaf.placements} and in_placements want {layout}; "
            "redistribute() it first, or pass redistribute_inputs=True"
        )
    return leaf.redistribute(placements=layout)


def _local(leaf: Any, position: int, placements: InputPlacements) -> Any:
    if not isinstance(leaf, DTensor):
        return leaf
    grads = None if placements is None else placements[position]
    local = leaf.to_local(grad_placements=grads)
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _is_uneven(tensor: DTensor) -> bool:
    """Whether the ranks' parts differ in size. The same answer on every rank."""
    layout = tensor._layout
    counts = {dim: torch.Size(layout.mesh.sizes[a] for a in axes).numel() for dim, axes in layout.shard_order}
    return any(tensor.shape[dim] % count for dim, count in counts.items())


# Per coordinate of the mesh the shape of its part of a result, from this rank's part and the result's number.
PartShapes = Callable[[torch.Tensor, int], dict[tuple[int, ...], list[int]]]


def _gathered_shapes(mesh: DeviceMesh) -> PartShapes:
    def gather(local: torch.Tensor, position: int) -> dict[tuple[int, ...], list[int]]:
        group, rows = gather_rows(local.shape, comm_of(mesh), local.device)
        return dict(zip(group.members, rows, strict=True))

    return gather


def _zeros(tensor: DTensor, where: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(
        tensor._layout.local_shape(tensor.shape, where), dtype=tensor.dtype, device=tensor.device
    )


def _outside(
    run: Callable[[tuple[int, ...]], Any],
    given: list[DTensor],
    mesh: DeviceMesh,
    placements: OutputPlacements,
    is_uneven: bool,
) -> Any:
    """The results on a rank outside the mesh. `run` calls the function on zeros, as at a coordinate of the mesh."""
    coordinates = list(comm_anywhere(mesh).shape.coordinates())
    with torch.no_grad():
        results = [run(where) for where in (coordinates if is_uneven else coordinates[:1])]

    def shapes(local: torch.Tensor, position: int) -> dict[tuple[int, ...], list[int]]:
        parts = [tree_flatten(result)[0][position] for result in results]
        return {where: list(part.shape) for where, part in zip(coordinates, parts, strict=True)}

    def depend(leaf: Any) -> Any:
        return results_outside(given, [leaf._tensor_layout])[0] if isinstance(leaf, DTensor) else leaf

    return tree_map(depend, _wrap(results[0], mesh, placements, shapes if is_uneven else None))


def _wrap(result: Any, mesh: DeviceMesh, placements: OutputPlacements, part_shapes: PartShapes | None) -> Any:
    flat, structure = tree_flatten(result)
    wanted = placements if isinstance(placements, tuple) and not _is_one_layout(placements) else (placements,)
    if len(wanted) != len(flat):
        raise LongmeshError(
            f"local_map: out_placements has {len(wanted)} entries for {len(flat)} (flattened) results; give a tuple "
            "with one for each, None for what is not a tensor"
        )
    wrapped = [
        _wrap_one(leaf, i, mesh, w, part_shapes) for i, (leaf, w) in enumerate(zip(flat, wanted, strict=True))
    ]
    return tree_unflatten(wrapped, structure)


def _is_one_layout(placements: tuple[Any, ...]) -> bool:
    """A tuple of placements is one output's layout; a tuple of such tuples or None is several outputs'."""
    return bool(placements) and all(isinstance(p, Placement) for p in placements)


def _wrap_one(
    leaf: Any, position: int, mesh: DeviceMesh, placements: Any, part_shapes: PartShapes | None
) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if placements is not None:
            raise LongmeshError(
                f"local_map: result {position} is a {type(leaf).__name__} and has out_placements {tuple(placements)}; "
                "give None for what is not a tensor"
            )
        return leaf
    if isinstance(leaf, DTensor):
        raise LongmeshError(
            f"local_map: result {position} is a DTensor already; the function gets plain tensors and returns plain ones"
        )
    if placements is None:  # as in from_local
        placements = [Replicate()] * mesh.ndim
    layout = Layout(mesh, normalize_placements(placements, leaf.ndim, "local_map(out_placements)"))
    layout.check_ndim(leaf.ndim, leaf.shape)
    shape = None
    if part_shapes is not None and layout.shard_dims:
        what = f"local_map: result {position}"
        shape = joined_shape(part_shapes(leaf, position), layout, what, "return parts as chunking makes them")
    return DTensor.from_local(leaf, mesh, layout.placements, shape=shape)
