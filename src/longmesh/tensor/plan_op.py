"""plan_op: the plan of an op for any mesh, with no process."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.errors import LongmeshError
from longmesh.plan import Cluster, cluster_of
from longmesh.spec import Coordinate, DTensorSpec, Layout, MeshShape
from longmesh.tensor.make_plan import make_plan
from longmesh.tensor.op_plan import OpPlan
from longmesh.tensor.step_writer import StepWriter
from longmesh.tensor.tensor_layout import MeshRank, tensor_layout


def plan_op(
    op: Any,
    *args: Any,
    mesh: MeshShape,
    cluster: Cluster | str | None = None,
    **kwargs: Any,
) -> OpPlan:
    """The plan of `op` on a mesh of any size, as its ranks would make it. Pure; sends nothing, needs no process.

    Tensors among the arguments are given as a `DTensorSpec` with a `tensor_meta`. The plan is that of the mesh's first
    rank; `plan.at(coordinate)` is another's. What it sends is None where values decide it.

    >>> many = MeshShape((4096,), ("tp",))
    >>> meta = TensorMeta(torch.Size([8192, 512]), (512, 1), torch.float32)
    >>> x, w = DTensorSpec(many, [Shard(0)], meta), DTensorSpec(many, [Replicate()], meta)
    >>> plan_op(torch.ops.aten.add.Tensor, x, w, mesh=many).sent_bytes
    0
    """
    chosen = cluster_of(cluster)
    func = getattr(op, "default", op)
    if not isinstance(func, OpOverload):
        raise LongmeshError(f"plan_op({op!r}): give an op such as torch.ops.aten.add.Tensor")

    def plan_at(coordinate: Coordinate) -> OpPlan:
        return replace(_plan(func, args, kwargs, MeshRank(mesh, coordinate, chosen)), elsewhere=plan_at)

    return plan_at((0,) * mesh.ndim)


def _plan(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], rank: MeshRank) -> OpPlan:
    writer = StepWriter(rank, torch.device("cpu"))
    given = _with_tensors((args, kwargs), writer)
    with warnings.catch_warnings():  # an op without a rule warns where it runs
        warnings.simplefilter("ignore")
        return make_plan(func, given[0], given[1], rank, warned=set())[0]


def _with_tensors(value: Any, writer: StepWriter) -> Any:
    """Arguments with tensors that hold nothing in the places of specs."""
    if isinstance(value, DTensorSpec):
        rank = writer.comm
        if MeshShape.of(value.mesh) is not rank.shape:
            raise LongmeshError(
                f"plan_op: {value} is on {value.mesh}, not on {rank.shape}; give all on one mesh"
            )
        layout = value.layout if value.layout.mesh is rank.shape else Layout(rank.shape, value.placements)
        own = tensor_layout(rank, layout, tuple(value.shape), tuple(value.stride), value.dtype)
        return writer.planned(0, own)
    if isinstance(value, (list, tuple)):
        return type(value)(_with_tensors(v, writer) for v in value)
    return {k: _with_tensors(v, writer) for k, v in value.items()} if isinstance(value, dict) else value
