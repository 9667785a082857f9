"""What ranks run, compared with what `plan_op` plans with no process: functions by identity, arguments by value."""

from collections import Counter

from longmesh import DTensor, DTensorSpec, MeshShape, TensorMeta, plan_op
from longmesh._torch import TorchDispatchMode
from longmesh.rules.tree import all_tensors
from longmesh.tensor.dispatch import dispatch
from support.op_sweep import sweep_op

# Why the plan of a call may be left alone: plan_op is told neither, or what is sent is known once values are.
LEFT = {
    "depends on the forward's table",
    "pending lookups and remembered reductions",
    "plain tensors",
    "runs as other ops",
    "scalars for a plain tensor",
    "views that had to be copied",
}


class PlanCompare(TorchDispatchMode):
    """Compares the plan of each op on DTensors with that of `plan_op`, at this rank's coordinate. `left`: how many were
    not compared, by the reason; `different`: the ops whose plans differ."""

    def __init__(self):
        super().__init__()
        self.num_equal = 0
        self.left = Counter()
        self.different = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            self.compare(func, args, kwargs)
        return func(*args, **kwargs)

    def compare(self, func, args, kwargs):
        tensors = all_tensors((args, kwargs))
        reason = reason_to_leave(tensors)
        bound = None if reason else dispatch.plan_of(func, args, kwargs)
        if bound is None:
            self.left[reason or "scalars for a plain tensor"] += 1
            return
        if not bound.plan.is_known:
            assert bound.plan.sent_bytes is None and bound.plan.bytes_by_axes is None
            self.left["runs as other ops"] += 1
            return
        if "embedding_dense_backward" in str(func) and "program" in bound.plan.how:
            self.left["depends on the forward's table"] += 1
            return
        comm = tensors[0]._tensor_layout.comm
        given = specs((args, kwargs))
        planned = plan_op(func, *given[0], mesh=comm.shape, cluster=comm.cluster, **given[1]).at(
            comm.coordinate
        )
        if planned == bound.plan and planned.sent_bytes == bound.plan.sent_bytes:
            self.num_equal += 1
        else:
            self.different.setdefault(str(func), (str(planned), str(bound.plan)))


def reason_to_leave(tensors):
    if not all(isinstance(t, DTensor) for t in tensors):
        return "plain tensors"
    layouts = [t._tensor_layout for t in tensors]
    if len({id(own.comm) for own in layouts}) > 1:
        return "several meshes"
    if any(own.is_copied_view for own in layouts):
        return "views that had to be copied"
    if any(own.has_lookup or own.reduced is not None for own in layouts):
        return "pending lookups and remembered reductions"
    return None


def specs(value):
    """Arguments with a spec in the place of each DTensor."""
    if isinstance(value, DTensor):
        own = value._tensor_layout
        meta = TensorMeta(value.shape, tuple(own.stride), own.dtype)
        return DTensorSpec(MeshShape.of(value.device_mesh), own.layout, meta)
    if isinstance(value, (list, tuple)):
        return [specs(v) for v in value] if isinstance(value, list) else tuple(specs(v) for v in value)
    return {k: specs(v) for k, v in value.items()} if isinstance(value, dict) else value


def compare_plans(names, mesh_shape):
    with PlanCompare() as check:
        for name in names:
            sweep_op(name, 1, True, mesh_shape) or sweep_op(name, 1, False, mesh_shape)
    return check.different, check.num_equal, sorted(check.left)
