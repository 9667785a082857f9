"""What travels on each axis of the mesh besides attention: the documented collectives of FSDP2, of tensor-parallel
styles with a sharded sequence between blocks, and of expert parallelism.

    fsdp   a unit's parameters are gathered before its forward and again before its backward, its gradients are
           reduced and scattered after that; a unit is a layer, or all that is outside the layers
    tp     after a block the results are reduced, and in backward the gradient of its input; with a sharded sequence
           between blocks, tokens are gathered before a block, and results reduced and scattered after it
    ep     rows go to their experts and back: an all-to-all each, forward and backward

One place, so that tracing the real thing can replace it.
"""

from __future__ import annotations

from typing import NamedTuple

from longmesh.plan.cluster import Cluster
from longmesh.step.setting import AXES, StepMesh, StepOptions
from longmesh.step.trace import LayerTrace, ModelTrace

FSDP_AXES = ("dp", "ep", "cp")


class Transfer(NamedTuple):
    """Collectives of one kind over `axes`, `times` of them; in each a rank sends, and receives, `num_bytes`."""

    name: str
    collective: str
    axes: tuple[str, ...]
    num_bytes: float
    times: float = 1.0

    def took_us(self, cluster: Cluster, mesh: StepMesh) -> float:
        if not self.num_bytes or not self.times:
            return 0.0
        axes = [AXES.index(axis) for axis in self.axes]
        return self.times * cluster.collective_us(self.collective, mesh.sizes, axes, self.num_bytes)


def group_size(mesh: StepMesh, axes: tuple[str, ...]) -> int:
    size = 1
    for axis in axes:
        size *= getattr(mesh, axis)
    return size


def dense_and_experts(layer: LayerTrace, mesh: StepMesh) -> tuple[float, float]:
    """Elements that a rank would hold without FSDP. `layer` is traced with the shards of `tp` already."""
    return float(layer.parameters - layer.expert_parameters), layer.expert_parameters / mesh.ep


def gather_parameters(layer: LayerTrace, mesh: StepMesh, options: StepOptions) -> tuple[Transfer, ...]:
    """One gathering of a unit's parameters."""
    is_float8 = options.matmul_dtype == "float8" and layer.blocks > 0
    return _sharded(layer, mesh, options, "all_gather", 1 if is_float8 else options.compute_bytes)


def reduce_gradients(layer: LayerTrace, mesh: StepMesh, options: StepOptions) -> tuple[Transfer, ...]:
    """The reduction of a unit's gradients: scattered under FSDP, else for all ranks (DDP)."""
    kind = "reduce_scatter" if options.fsdp else "all_reduce"
    return _sharded(layer, mesh, options, kind, options.gradient_bytes)


def _sharded(
    layer: LayerTrace, mesh: StepMesh, options: StepOptions, collective: str, itemsize: int
) -> tuple[Transfer, ...]:
    dense, experts = dense_and_experts(layer, mesh)
    found: list[Transfer] = []
    for elements, axes in ((dense, FSDP_AXES), (experts, ("dp", "cp"))):
        size = group_size(mesh, axes)
        if elements and size > 1:
            share = -(-elements // size) * (size - 1) * itemsize * (2 if collective == "all_reduce" else 1)
            found.append(Transfer("fsdp" if options.fsdp else "ddp", collective, axes, share))
    return tuple(found)


def block_transfers(
    layer: LayerTrace, trace: ModelTrace, mesh: StepMesh, options: StepOptions
) -> tuple[Transfer, ...]:
    """Of one pass over a layer, either way: its blocks on tp, its experts on ep."""
    found: list[Transfer] = []
    hidden = trace.tokens * trace.hidden * trace.itemsize
    blocks = layer.blocks or 1  # outside the layers: the embedding's result and the head's input
    if mesh.tp > 1:
        share = hidden * (mesh.tp - 1) / mesh.tp
        if options.sequence_parallel:
            found += [
                Transfer("tp", kind, ("tp",), share, blocks) for kind in ("all_gather", "reduce_scatter")
            ]
        else:
            found.append(Transfer("tp", "all_reduce", ("tp",), 2 * share, blocks))
    if mesh.ep > 1 and layer.expert_parameters:
        share = hidden * layer.top_k * (mesh.ep - 1) / mesh.ep
        found.append(Transfer("ep", "all_to_all", ("ep",), share, 2))
    return tuple(found)
