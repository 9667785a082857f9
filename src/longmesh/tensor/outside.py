"""DTensors on a rank that is not in their mesh: they have a shape, a layout and a gradient as everywhere, and no data.

A program in which every rank makes and uses the DTensors of a sub-mesh runs on all ranks. On the ranks outside, an op
is planned as on the mesh's first rank, so that layouts and shapes agree, and none of its steps runs: each result has an
empty part. Random ops count on, so that all ranks draw alike afterwards. What only data can tell, a number or a shape,
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import OpOverload
from longmesh.errors import LongmeshError
from longmesh.rules import Meta, OpCall
from longmesh.rules.op_facts import result_on_meta
from longmesh.rules.steps import Execute, LocalCall, Slot
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec import Layout
from longmesh.tensor.autograd import gradient_layout
from longmesh.tensor.bind_steps import Comms, Run, bind_step
from longmesh.tensor.bound_plan import BoundPlan
from longmesh.tensor.dtensor import DTensor, wrap
from longmesh.tensor.executors import executor_of
from longmesh.tensor.mask_buffer import without_mask
from longmesh.tensor.op_plan import NOTHING, Given, OpPlan, Output
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout


def is_outside(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not tensor._tensor_layout.comm.is_member


def plan_outside(
    plan: OpPlan, comms: Comms, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> BoundPlan:
    """What an op does on a rank outside, from what it does on the mesh's first rank."""
    if not plan.is_known:  # its ops are asked one by one
        return BoundPlan(plan, comms)
    tensors = all_tensors((args, kwargs))
    template, dtypes = plan.result, []
    if plan.written is not None:
        template = Given(plan.written)
    elif template is None or not _is_known(template):
        template, dtypes = _outputs_of(plan, len(tensors), func, args, kwargs)
    first, count = len(tensors), len(dtypes)
    step = LocalCall(_make_nothing, (tuple(dtypes), tensors[0].device), {}, first, count)
    bound = BoundPlan(
        OpPlan(
            (*(s for s in plan.steps if isinstance(s, Execute)), step),
            plan.places,
            result=template,
            num_slots=max(plan.num_slots, first + max(count, 1)),
            replaces=plan.replaces,
            how="this rank is outside the mesh: nothing runs",
        ),
        comms,
    )
    bound.steps = [_skipping(s) for s in plan.steps if isinstance(s, Execute)] + [bind_step(step, comms)]
    return bound


def _skipping(step: Execute) -> Run:
    """Random ops count on."""
    return lambda frame: executor_of(step.name).skip(step)


def _make_nothing(dtypes: tuple[torch.dtype, ...], device: torch.device) -> list[torch.Tensor]:
    return [torch.empty(0, dtype=dtype, device=device) for dtype in dtypes]


def _is_known(template: Any) -> bool:
    """Whether a result is made of tensors that were written to and of constants alone."""
    if type(template) in (tuple, list):
        return all(map(_is_known, template))
    return template is NOTHING or type(template) in (Given, bool, int, float, type(None))


def _collect(template: Any, found: list[Output]) -> None:
    if type(template) is Output:
        found.append(template)
    elif type(template) in (tuple, list):
        for value in template:
            _collect(value, found)


def _outputs_of(
    plan: OpPlan, first: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, list[torch.dtype]]:
    """The result's structure, with an Output for each tensor, from the slot `first` on, and their dtypes: of the op on
    global shapes."""
    mesh = next(t._mesh for t in all_tensors((args, kwargs)) if isinstance(t, DTensor))
    if type(plan.result) is Slot:  # a number
        raise _refusal(func, mesh)
    args, kwargs = map_tensors(lambda t: Meta(0, t.shape, t.stride(), t.dtype), (args, kwargs))
    try:
        structure = result_on_meta(OpCall(func, args, kwargs, ()))
    except (RuntimeError, NotImplementedError) as error:
        raise _refusal(func, mesh) from error
    metas = all_tensors(structure)
    planned: list[Output] = list(plan.outputs)
    if not planned:
        _collect(plan.result, planned)
    whole = Layout.replicated(mesh)
    layouts = (
        [without_mask(o.layout) for o in planned] if len(planned) == len(metas) else [whole] * len(metas)
    )
    made = iter(
        [
            Output(layout, tuple(meta.shape), meta.stride(), first + number, is_alias=True)
            for number, (meta, layout) in enumerate(zip(metas, layouts, strict=True))
        ]
    )
    return map_tensors(lambda _: next(made), structure), [meta.dtype for meta in metas]


def _refusal(func: Any, mesh: DeviceMesh) -> LongmeshError:
    return LongmeshError(
        f"{func} on rank {dist.get_rank()}, which is not in the mesh {mesh.mesh.tolist()}: its result depends on data, "
        "and this rank has none of it; call it on the mesh's ranks only (`if mesh.get_coordinate() is not None:`)"
    )


def results_outside(given: Sequence[DTensor], results: Sequence[TensorLayout]) -> list[DTensor]:
    """Tensors without data, laid out as said, that depend on `given`: backward passes go through them."""
    return list(_Outside.apply(tuple(results), *given))


class _Outside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, results: tuple[TensorLayout, ...], *given: DTensor) -> tuple[DTensor, ...]:
        ctx.given = [t._tensor_layout for t in given]
        ctx.save_for_backward(*given)  # a second derivative goes through what was given, too
        ctx.set_materialize_grads(False)
        made = [wrap(torch.empty(0, dtype=own.dtype, device=given[0].device), own) for own in results]
        ctx.mark_non_differentiable(*(t for t in made if not (t.is_floating_point() or t.is_complex())))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        there = [grad for grad in grads if grad is not None]
        if not there:
            return None, *(None for _ in ctx.given)
        layouts = [
            tensor_layout(own.comm, gradient_layout(own.layout), own.shape, own.stride, own.dtype)
            for own in ctx.given
        ]
        return None, *results_outside([*there, *ctx.saved_tensors], layouts)


def is_split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op on lists has members whose mesh this rank is in and members whose mesh it is not in."""
    lists = [a for a in (*args, *kwargs.values()) if isinstance(a, (list, tuple))]
    tensors = [t for t in all_tensors(lists) if isinstance(t, DTensor)]
    return len({t._tensor_layout.comm.is_member for t in tensors}) == 2


def run_split(
    call: Callable[..., Any], func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The op on lists for the members of either kind by themselves."""
    lead = next(a for a in args if isinstance(a, (list, tuple)))
    size = len(lead)
    results: list[Any] = [None] * size
    is_list = False
    for outside in (False, True):
        chosen = [i for i in range(size) if is_outside(lead[i]) is outside]

        def choose(value: Any, chosen: list[int] = chosen) -> Any:
            is_listed = isinstance(value, (list, tuple)) and len(value) == size
            return [value[i] for i in chosen] if is_listed else value

        made = call(func, (), tuple(map(choose, args)), {k: choose(v) for k, v in kwargs.items()})
        if isinstance(made, (list, tuple)):
            is_list = True
            for i, value in zip(chosen, made, strict=True):
                results[i] = value
    return results if is_list else None
