"""An accelerate Accelerator that knows which ranks share a sequence.

    mesh ("dp", "cp") of 2 x 2      ranks 0 1 | 2 3      0 and 1 get the same rows of data, 2 and 3 others

accelerate shards data over all processes, and gathers results from all. Here both go by the ranks of "dp". Gradients
stay accelerate's: DDP and FSDP2 average over all ranks, and losses are scaled for that.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader

from longmesh.attention.scope.open_scopes import current_cut
from longmesh.comm import AxisGroup, collectives, comm_of
from longmesh.errors import LongmeshError
from longmesh.hf.axes.parallelize import is_parallelized
from longmesh.hf.scope import plan_ahead
from longmesh.hf.whole_batch import scope_arguments

_AXES = ("dp", "cp", "tp", "ep")
_DATA_AXES = ("dp", "ep")  # ranks of the others get the same rows


class PlanningLoader(DataLoader):
    """A DataLoader that has each batch planned when it is read, which is a step before it is used: accelerate reads
    one batch ahead, to know the last one."""

    plan: Callable[[Any], None]

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.plan(batch)
            yield batch


def plan_batches(prepared: Any, plan: Callable[[Any], None]) -> None:
    """Let a prepared loader call `plan` with each batch; one of another class of torch's stays as it is."""
    inside = prepared.__dict__.get("base_dataloader")
    if type(inside) is DataLoader:
        inside.__class__ = PlanningLoader
        inside.__dict__["plan"] = plan


class MeshAccelerator(Accelerator):
    """An Accelerator after `use_mesh`."""

    longmesh_mesh: DeviceMesh

    @functools.cached_property
    def cp_mesh(self) -> DeviceMesh:
        """The axis of sequences: one object for all steps, since plans are kept for it."""
        names = self.longmesh_mesh.mesh_dim_names or ()
        if "cp" in names:
            return self.longmesh_mesh["cp"]
        return init_device_mesh(self.device.type, (dist.get_world_size(), 1), mesh_dim_names=("_", "cp"))[
            "cp"
        ]

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """A loader of this rank's share of the data: that of its coordinates on "dp" and "ep"."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        if self.dispatch_batches:
            raise LongmeshError(
                "dispatch_batches=True with context parallelism: rank 0 would hand a different batch to each rank of a "
                "sequence; leave it unset, so that every rank reads its own"
            )
        mesh = self.longmesh_mesh
        prepared = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=math.prod(axis_size(mesh, name) for name in _DATA_AXES),
            process_index=axis_rank(mesh, "dp") * axis_size(mesh, "ep") + axis_rank(mesh, "ep"),
            split_batches=self.split_batches,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=list(self.rng_types) if self.rng_types else None,
            dispatch_batches=False,
            even_batches=self.even_batches,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        self._dataloaders.append(prepared)
        plan_batches(prepared, self._plan_next)
        return prepared

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """The model on its device, in DDP or FSDP2; one that `hf.parallelize` has sharded averages gradients itself."""
        if isinstance(model, torch.nn.Module) and is_parallelized(model):  # moved, its hooks would be gone
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def _plan_next(self, batch: Any) -> None:
        """Have a batch planned that comes next, as the scope before was. Wrong ones are told by their scope."""
        how = self.__dict__.get("longmesh_scope")
        if how is not None and isinstance(batch, Mapping):
            rest, options = scope_arguments(batch)
            with contextlib.suppress(LongmeshError):
                plan_ahead(self.cp_mesh, rest, **how, **options)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What one rank of each sequence holds, in the order of the data; inside a scope, where each rank has its own
        tokens, what all ranks hold. Collective over all ranks."""
        if use_gather_object:
            raise LongmeshError(
                "gather_for_metrics of objects with context parallelism: every rank of a sequence would give its own; "
                "gather tensors (eval_use_gather_object=False)"
            )
        if current_cut() is not None:
            return self.gather(input_data)
        return _OneOfEach(self).gather_for_metrics(input_data)


class _OneOfEach(Accelerator):
    """The accelerator, with a `gather` that leaves out the ranks whose rows another one has given."""

    def __init__(self, accelerator: MeshAccelerator) -> None:
        self.__dict__ = accelerator.__dict__

    def gather(self, tensor: Any) -> Any:
        mesh: DeviceMesh = self.__dict__["longmesh_mesh"]
        first = [
            rank
            for rank in range(dist.get_world_size())
            if not any(_coordinate(mesh, rank, name) for name in ("cp", "tp"))
        ]

        def select(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.unflatten(0, (dist.get_world_size(), -1))[first].flatten(0, 1)
            if isinstance(value, dict):
                return type(value)({key: select(part) for key, part in value.items()})
            return type(value)(select(part) for part in value)

        return select(super().gather(tensor))


def use_mesh(accelerator: Accelerator, mesh: DeviceMesh | None) -> DeviceMesh:
    """Let an accelerator go by the mesh: its own object, since what it prepared refers to it. Returns the mesh.

    Without one all ranks are on "cp". Collective where groups are made.
    """
    _refuse_own_cp(accelerator)
    if mesh is None:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("cp",))
    _check_mesh(mesh, accelerator.num_processes)
    accelerator.__class__ = MeshAccelerator
    accelerator.__dict__["longmesh_mesh"] = mesh
    return mesh


def _refuse_own_cp(accelerator: Accelerator) -> None:
    config = getattr(accelerator, "parallelism_config", None)
    if config is not None and (config.cp_size > 1 or config.sp_size > 1 or config.tp_size > 1):
        raise LongmeshError(
            f"the accelerator has a ParallelismConfig with cp_size={config.cp_size}, sp_size={config.sp_size}, "
            f"tp_size={config.tp_size}; leave them at 1 and give longmesh a mesh with the axes 'dp' and 'cp'"
        )
    if str(getattr(accelerator.distributed_type, "value", "")).upper() == "DEEPSPEED":
        raise LongmeshError("longmesh.hf with DeepSpeed is not supported; use DDP or FSDP2")


def _check_mesh(mesh: DeviceMesh, num_processes: int) -> None:
    names = mesh.mesh_dim_names or ()
    if not names or any(name not in _AXES for name in names):
        raise LongmeshError(
            f"mesh= has the axes {names or tuple(mesh.shape)}; name them 'dp' (data), 'cp' (sequence), "
            "'tp' (tensors) and 'ep' (experts), as in init_device_mesh(device, (2, 4), mesh_dim_names=('dp', 'cp'))"
        )
    if mesh.size() != num_processes:
        raise LongmeshError(
            f"mesh= has {mesh.size()} ranks and there are {num_processes} processes; make it of all of them"
        )


def axis_size(mesh: DeviceMesh, name: str) -> int:
    """Ranks of an axis; 1 if the mesh has none of that name."""
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def axis_rank(mesh: DeviceMesh, name: str) -> int:
    """This rank's coordinate on an axis; 0 if the mesh has none of that name."""
    return mesh.get_local_rank(name) if name in (mesh.mesh_dim_names or ()) else 0


def _coordinate(mesh: DeviceMesh, rank: int, name: str) -> int:
    names = mesh.mesh_dim_names or ()
    if name not in names:
        return 0
    place = (mesh.mesh == rank).nonzero()[0].tolist()
    return place[names.index(name)]


def sum_over(mesh: DeviceMesh, name: str, value: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of an axis. Collective over them."""
    if axis_size(mesh, name) == 1:
        return value
    return collectives.all_reduce(value, reduce_op="sum", group=_group(mesh, name))


def _group(mesh: DeviceMesh, name: str) -> AxisGroup:
    assert mesh.mesh_dim_names is not None
    return comm_of(mesh).group((mesh.mesh_dim_names.index(name),))
