"""Run an aten op on DTensors: look up its plan, move inputs that lie wrong, call the op locally, wrap.

    y = x + w  ->  key: add.Tensor, layouts, global shapes, static arguments
               ->  OpPlan (cached): which inputs move where, the local call, the outputs' layouts

A plan is made once per key: the op's rule lists what is valid on one axis, `propagate.choose` combines
the axes. An op without a rule is decomposed; failing that its inputs are replicated and a warning
names it, once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._mode_utils import no_dispatch

from longmesh.errors import LongmeshError
from longmesh.tensor.autograd import apply_lookup_mask, move, part_moved
from longmesh.tensor.direct import no_active_modes
from longmesh.tensor.dtensor import DTensor, Factor, wrap as wrap_held
from longmesh.tensor.op_key import describe, describe_named, exact_key
from longmesh.tensor.op_plan import OpPlan, Output, Recipe, is_pointwise, make_plan
from longmesh.tensor.plain import (
    decomposing,
    on_whole_tensors,
    replicate_plain,
    share_mesh,
    value_of,
    writes_plain,
)
from longmesh.tensor.tensor_layout import TensorLayout, tensor_layout
from longmesh.tensor.tree import all_tensors, map_tensors
from longmesh.tensor.view_origin import remember_origin, write_to_origin

_make_wrapper = torch.Tensor._make_wrapper_subclass

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]

# What a handler returns where the op runs by its rule after all. It says so of every call alike (tensors held
# alike, other arguments equal): it is not asked again for those. Or it returns the OpPlan that holds for them.
USUAL = object()
# More plans of one op than this are no working set: layouts and sizes that never come back.
_MAX_PLANS = 1 << 14


class OpTable:
    """What is known of one op: its handler, and the plans of calls seen.

    `usual`: of calls that came in from outside, looked up before anything else. `plans`: of what handlers run by rule.
    `recipes`: for calls that differ in sizes alone.
    `reads_floats`: whether a plan depends on the values of floats; a pointwise op's does only where a
    reduction is pending, and those plans are not among the usual ones.
    """

    __slots__ = ("func", "handler", "plans", "reads_floats", "recipes", "usual")

    def __init__(self, func: OpOverload, handler: Handler | None) -> None:
        self.func = func
        self.handler = handler
        self.usual: dict[tuple[Any, ...], OpPlan] = {}
        self.plans: dict[tuple[Any, ...], OpPlan] = {}
        self.recipes: dict[tuple[Any, ...], Recipe] = {}
        self.reads_floats = not is_pointwise(func)


class Dispatcher:
    """The ops seen so far with their plans, the ops with a handler of their own, and the ops warned of."""

    def __init__(self) -> None:
        self.tables: dict[int, OpTable] = {}
        self.handlers: dict[OpOverload, Handler] = {}
        self.warned: set[str] = set()

    def from_torch(
        self,
        func: OpOverload,
        types: Sequence[type] = (),
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """`__torch_dispatch__` of DTensors: torch calls this, with nothing in between."""
        table = self.tables.get(id(func)) or self._table(func)
        # Written out, since every op comes through here: see `describe` and `wrap`.
        parts: list[Any] = []
        local_args: list[Any] = []
        for value in args:
            if isinstance(value, DTensor):
                parts.append(value._tensor_layout)
                local_args.append(value._local_tensor)
            else:
                local_args.append(describe(value, parts, table.reads_floats))
        local_kwargs = describe_named(kwargs, parts, table.reads_floats) if kwargs else None
        key: tuple[Any, ...] | None = tuple(parts)
        try:
            plan = table.usual.get(key)
        except TypeError:  # symbolic sizes don't hash
            plan = key = None
        if plan is None:
            return self._first_time(table, args, kwargs or {}, key)
        if not plan.is_plain:
            return self._execute(plan, func, args, kwargs or {})
        call: Callable[..., Any] = plan.local_call  # pyright: ignore[reportAssignmentType]
        local = call(*local_args, **local_kwargs) if local_kwargs else call(*local_args)
        output = plan.single
        if plan.written is not None and args[plan.written]._origin is None:
            return args[plan.written]
        if output is None or plan.written is not None or output.held is None:
            return self._finish(plan, local, func, args, kwargs or {})
        held = output.held
        if held.dtype is not local.dtype:
            held = tensor_layout(held.mesh, held.layout, held.shape, held.stride, local.dtype)
        kind = Factor if held.is_sharded_inside else DTensor
        result = _make_wrapper(
            kind, held.shape, held.face_stride, None, None, held.dtype, torch.strided, local.device
        )  # fmt: skip
        result._local_tensor = local
        result._tensor_layout = held
        if plan.is_view and (plan.is_copy or args[0]._origin is not None):
            remember_origin(result, func, args, kwargs or {})
        return result

    def __call__(self, func: OpOverload, *args: Any) -> Any:
        """An op on DTensors, as from torch."""
        return self.from_torch(func, (), args)

    def _table(self, func: OpOverload) -> OpTable:
        table = self.tables[id(func)] = OpTable(func, self.handlers.get(func))
        return table

    def forget(self, func: OpOverload) -> None:
        """Drop what is known of an op whose rule or handler has changed."""
        self.tables.pop(id(func), None)

    def _first_time(
        self, table: OpTable, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[Any, ...] | None
    ) -> Any:
        """A call whose like was not seen, or that a handler carries out each time."""
        func, result = table.func, USUAL
        if table.handler is not None:
            result = table.handler(func, args, kwargs)
        if result is USUAL:
            return self._run(table, args, kwargs, key)
        if type(result) is OpPlan:
            self._keep(result, table, _helds(all_tensors((args, kwargs))), key, exact_key(args, kwargs))
            return self._execute(result, func, args, kwargs)
        if isinstance(result, DTensor) and result._origin is not None and args and result is args[0]:
            write_to_origin(result, move)
        return result

    def run_known(self, func: OpOverload, key: tuple[Any, ...], parts: tuple[Any, ...]) -> DTensor | None:
        """The op on local parts, if its plan is known and as plain as can be, and nobody would see it."""
        table = self.tables.get(id(func))
        plan = table.usual.get(key) if table is not None else None
        if plan is None or not plan.is_plain or plan.single is None or plan.is_view or not no_active_modes():
            return None
        return wrap(plan.local_call(*parts), plan.single)  # pyright: ignore[reportOptionalCall]

    def write_known(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Do as `run_known` for an op that writes to its first argument; False where it was not done."""
        table = self.tables.get(id(func))
        if (
            table is None
            or not no_active_modes()
            or args[0]._origin is not None
            or torch.is_inference_mode_enabled()
        ):
            return False
        parts: list[Any] = []
        local_args = [describe(value, parts, table.reads_floats) for value in args]
        local_kwargs = describe_named(kwargs, parts, table.reads_floats) if kwargs else {}
        try:
            plan = table.usual.get(tuple(parts))
        except TypeError:  # symbolic sizes don't hash
            return False
        if plan is None or not plan.is_plain or plan.written != 0:
            return False
        plan.local_call(*local_args, **local_kwargs)  # pyright: ignore[reportOptionalCall]
        torch._C._increment_version([args[0]])
        return True

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run by rule, decomposition or replication, without looking for a handler."""
        return self._run(self.tables.get(id(func)) or self._table(func), args, kwargs, None)

    def _run(
        self, table: OpTable, args: tuple[Any, ...], kwargs: dict[str, Any], key: tuple[Any, ...] | None
    ) -> Any:
        """`key`: under which the plan is to be found as a usual one; None for a handler's own calls."""
        func, plan, exact = table.func, None, None
        tensors = all_tensors((args, kwargs))
        helds = _helds(tensors)
        if key is None or (not table.reads_floats and (table.plans or _pends(helds))):
            exact = exact_key(args, kwargs)
            plan = _get(table.plans, exact)
        if plan is None:
            kinds = tuple([p.kind if type(p) is TensorLayout else p for p in exact or key or ()])
            recipe = _get(table.recipes, kinds)
            if recipe is not None:
                plan = recipe.plan(args, kwargs)
            elif func._schema.is_mutable and writes_plain(func, args, kwargs):
                args, kwargs = map_tensors(value_of, (args, kwargs))
                return func(*args, **kwargs)
            elif not share_mesh(tensors):
                args, kwargs = replicate_plain(func, args, kwargs)
                return self._run(table, args, kwargs, None)
            elif len(helds) == len(tensors):
                plan, recipe = make_plan(func, args, kwargs, helds[0].mesh)
                if recipe is not None and not any(held.is_symbolic for held in helds):
                    _put(table.recipes, kinds, recipe)
            else:
                whole_args, whole_kwargs = replicate_plain(func, args, kwargs)
                plan, _ = make_plan(func, whole_args, whole_kwargs, helds[0].mesh)
                plan = replace(plan, has_numbers=True)
            if exact is None and plan.rewritten is not None:  # it holds the values of floats
                exact = exact_key(args, kwargs)
            self._keep(plan, table, helds, key, exact)
        return self._execute(plan, func, args, kwargs)

    def _keep(
        self,
        plan: OpPlan,
        table: OpTable,
        helds: list[TensorLayout],
        key: tuple[Any, ...] | None,
        exact: tuple[Any, ...] | None,
    ) -> None:
        """Remember a plan for calls alike, where there can be any: as a usual one where `key` says enough."""
        if any(held.is_symbolic for held in helds):
            return
        if key is None or (not table.reads_floats and (plan.rewritten or _pends(helds))):
            assert exact is not None
            _put(table.plans, exact, plan)
        else:
            _put(table.usual, key, plan)

    def _execute(self, plan: OpPlan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.is_plain:
            assert plan.local_call is not None
            local_args = [a._local_tensor if isinstance(a, DTensor) else describe(a, []) for a in args]
            local = plan.local_call(*local_args, **(describe_named(kwargs, []) if kwargs else {}))
            return self._finish(plan, local, func, args, kwargs)
        if plan.has_numbers:
            args, kwargs = replicate_plain(func, args, kwargs)
        if plan.local_call is None:
            return self._without_rule(plan, func, args, kwargs)
        return self._finish(plan, _call_locally(plan, args, kwargs), func, args, kwargs)

    def _finish(
        self, plan: OpPlan, local: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What an op returns, from what its local call did."""
        if plan.written is not None:
            result = args[plan.written]
            if result._origin is not None:
                write_to_origin(result, move)
            return result
        result = wrap_all(local, plan.outputs) if plan.single is None else wrap(local, plan.single)
        if plan.is_view and (plan.is_copy or args[0]._origin is not None):
            remember_origin(result, func, args, kwargs)
        return result

    def _without_rule(
        self, plan: OpPlan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if plan.functional is not None:
            return write_back(func, plan.functional, args, kwargs)
        if plan.decomposition is not None:
            token = decomposing.set(True)
            try:
                return plan.decomposition(*args, **kwargs)
            finally:
                decomposing.reset(token)
        return self.replicate(func, args, kwargs)

    def replicate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gather every input and run the op whole on each rank."""
        name = str(func)
        if name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"{name} has no sharding rule: its inputs are replicated on every rank. Register one with "
                "register_sharding, or redistribute to Replicate() yourself to silence this",
                stacklevel=4,
            )
        return on_whole_tensors(func, args, kwargs)


def _helds(tensors: list[torch.Tensor]) -> list[TensorLayout]:
    return [t._tensor_layout for t in tensors if isinstance(t, DTensor)]


def _pends(helds: list[TensorLayout]) -> bool:
    """Whether a reduction is pending in any of them."""
    return any(held.layout.partial_axes for held in helds)


def _put(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(known) >= _MAX_PLANS:
        known.clear()
    with contextlib.suppress(TypeError):  # symbolic sizes don't hash
        known[key] = value


def _get(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...]) -> Any:
    try:
        return known.get(key)
    except TypeError:
        return None


def _call_locally(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bring the parts where the plan wants them, and call."""
    tensors: list[torch.Tensor] = []
    moves = iter(plan.inputs)

    def to_local(tensor: torch.Tensor) -> torch.Tensor:
        layout = next(moves)
        assert isinstance(tensor, DTensor)
        local = tensor._local_tensor if tensor._tensor_layout.layout is layout else part_moved(tensor, layout)
        tensors.append(local)
        return local

    local_args = [to_local(a) if isinstance(a, DTensor) else map_tensors(to_local, a) for a in args]
    local_kwargs = map_tensors(to_local, kwargs)
    if plan.rewritten is not None:
        local_args, local_kwargs = plan.rewritten(tensors)
    assert plan.local_call is not None
    return plan.local_call(*local_args, **local_kwargs)


def wrap(local: torch.Tensor, output: Output) -> DTensor:
    """A DTensor around a local result."""
    dtype = local.dtype
    held = output.held
    if held is None or held.dtype is not dtype:
        held = output.held = tensor_layout(output.mesh, output.layout, output.shape, output.stride, dtype)
    return wrap_held(local, held)


def wrap_all(result: Any, outputs: tuple[Output, ...]) -> Any:
    """Wrap the tensors of a result, in order; everything else is passed on."""
    kind = type(result)
    if kind is tuple or kind is list:
        if not outputs:  # lists that were written to
            return None
        if len(result) == len(outputs):
            return kind(map(wrap, result, outputs))
    following = iter(outputs)
    return map_tensors(lambda tensor: wrap(tensor, next(following)), result)


def write_back(
    func: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An in-place or out= op whose target can't stay where it lies: compute, bring home, copy."""
    outs = [a.name for a in func._schema.arguments if a.is_out]  # `out`, or one name for each of several
    targets = [kwargs[name] for name in outs] or [args[0]]
    kwargs = {k: v for k, v in kwargs.items() if k not in outs}
    result = functional(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        with no_dispatch():
            func(*args, **kwargs)  # the wrapper's own sizes and strides
        target = args[0]
        target._local_tensor, target._tensor_layout = result._local_tensor, result._tensor_layout
        return target
    results = result if isinstance(result, (tuple, list)) else [result]
    for target, value in zip(targets, results, strict=False):
        if target.shape != value.shape:
            raise LongmeshError(
                f"{func} would give the DTensor it writes to another shape: {tuple(target.shape)} -> "
                f"{tuple(value.shape)}; use the op that returns a new tensor"
            )
        if target._lookup is not None:
            apply_lookup_mask(target)
        target._local_tensor.copy_(move(value, target._layout)._local_tensor)
        if target._origin is not None:
            write_to_origin(target, move)
    return targets[0] if len(targets) == 1 else tuple(targets)


dispatch = Dispatcher()
