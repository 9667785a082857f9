"""Run an aten op on DTensors: find its plan, run it.

    y = x + w  ->  key: the op, how x and w are laid out, the other arguments
               ->  OpPlan: the steps that make y

Plans are kept by the TensorLayout of the call's first DTensor, under the key that op_key.py describes. A pointwise op's
plan holds for any float; where it does not (a reduction is pending), BY_VALUE stands there and the plan is found under
the key with the floats. A Recipe stands under the key with `TensorLayout.kind` in the places of layouts: it makes the
plans of calls that differ in sizes alone.

A plan that is made anew is, too, what every other rank has: making it depends on nothing but the key (make_plan.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, dispatch_mode_count, dispatch_modes, make_quickly, set_dispatch_modes
from longmesh.comm import comm_anywhere
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.tensor.bound_plan import BoundPlan, execute, fill_result, finish, run_steps
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.make_plan import make_plan, make_plan_of
from longmesh.tensor.op_key import (
    GENERAL,
    LIST,
    VALUE_TYPES,
    VALUES,
    OpTable,
    describe,
    describe_named,
    exact_key,
    key_of_list,
    key_of_sizes,
)
from longmesh.tensor.outside import is_split, plan_outside, run_split
from longmesh.tensor.plain import common_mesh, replicate_plain, scores_with_mask, value_of, writes_plain
from longmesh.tensor.table_notes import NOTES
from longmesh.tensor.tensor_layout import TensorLayout
from longmesh.tensor.view_origin import await_softmax

# More plans of one layout than this are no working set: sizes that never come back.
_MAX_PLANS = 1 << 12
# Stands for a plan that depends on the values of floats: it is found under the key that has them.
BY_VALUE = object()

_is_inference_mode = torch.is_inference_mode_enabled


class Dispatcher:
    """The ops seen so far, and those that were warned of."""

    def __init__(self) -> None:
        self.warned: set[str] = set()
        self.tables: dict[int, OpTable] = {}

    def from_torch(
        self,
        func: OpOverload,
        types: Sequence[type] = (),
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """`__torch_dispatch__` of DTensors: torch calls this, with nothing in between."""
        try:
            table = self.tables[id(func)]
        except KeyError:
            table = self._table(func)
        # Written out, since every op comes through here: what `OpTable.key` does, and what `execute` does for a plan
        # that is one local call with one result.
        local_args: Any
        local_kwargs = None
        form = GENERAL if kwargs else table.form
        if form > LIST:
            first, rest = args[0], args[1:]
            lead = first._tensor_layout
            local_args = (first._local_tensor, *rest)
            key = (table, rest) if form == VALUES else key_of_sizes(table, rest)
        elif form and (key := key_of_list(table, args)) is not None:
            lead = key[2]
            local_args = ([t._local_tensor for t in args[0]], *args[1:])
        else:
            parts: list[Any] = [table]
            local_args = []
            for value in args:
                kind = type(value)
                if kind is DTensor:
                    parts.append(value._tensor_layout)
                    local_args.append(value._local_tensor)
                elif kind in VALUE_TYPES:
                    parts.append(value)
                    local_args.append(value)
                else:
                    local_args.append(describe(value, parts, table.reads_floats))
            if kwargs:
                local_kwargs = describe_named(kwargs, parts, table.reads_floats)
            key = tuple(parts)
            lead = parts[1]
            if type(lead) is not TensorLayout:
                lead = next(p for p in parts if type(p) is TensorLayout)
        if table.writes and (table.written_lists or _is_inference_mode()):
            table.count_writes(lead, args)
        try:
            plan = lead.plans[key]
        except KeyError:
            plan = None
        except TypeError:  # symbolic sizes don't hash
            plan = key = None
        if plan is None or plan is BY_VALUE:
            plan = self._first_time(table, lead, key, args, kwargs or {})
            if type(plan) is not BoundPlan:
                return plan
        call = plan.plain
        if call is None:
            return self._run(plan, func, args, kwargs or {})
        local = call(*local_args, **local_kwargs) if local_kwargs else call(*local_args)
        known = plan.known
        if known is None or known.dtype is not local.dtype or (plan.is_view and _is_inference_mode()):
            return finish(plan, local, func, args, kwargs or {})
        return make_quickly(known.tensor_class, local, known, False)

    def _table(self, func: OpOverload) -> OpTable:
        table = self.tables[id(func)] = OpTable(func, NOTES.get(func))
        return table

    def forget_plans(self) -> None:
        """Forget every plan, since a rule or a family has changed: their keys have the old tables."""
        self.tables.clear()

    def _first_time(
        self,
        table: OpTable,
        lead: TensorLayout,
        key: tuple[Any, ...] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The plan of a call whose like was not seen; the result of one that runs as another call."""
        func, note = table.func, _note_of(table, args, kwargs)
        if table.is_mixed and is_split(args, kwargs):
            return run_split(self.from_torch, func, args, kwargs)
        ready = self._with_layouts(table, args, kwargs)
        if ready is None:
            args, kwargs = map_tensors(value_of, (args, kwargs))
            return func(*args, **kwargs)
        if ready[0] is args:
            return self._find(table, lead, key, args, kwargs, note)
        result = self._run(self._find(table, lead, table.key(*ready), *ready, note), func, *ready)
        unsure = scores_with_mask(func, args, kwargs)
        return result if unsure is None else await_softmax(result, unsure)

    def _with_layouts(
        self, table: OpTable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments, plain ones as replicated DTensors; None: the op writes scalars to a plain tensor."""
        plain = [t for t in all_tensors((args, kwargs)) if not isinstance(t, DTensor)]
        if not plain or table.is_mixed:
            return args, kwargs
        if table.writes and writes_plain(table.func, args, kwargs):
            return None
        return replicate_plain(table.func, args, kwargs) if any(t.ndim for t in plain) else (args, kwargs)

    def _run(self, plan: BoundPlan, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.plan.needs_values and dispatch_mode_count():
            made, comms, _, _ = self._make(func, args, kwargs, is_traced=True)
            plan = BoundPlan(made, comms)
        return execute(plan, func, args, kwargs)

    def _make(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], comm: Any = None, **how: Any
    ) -> Any:
        comm = comm_anywhere(common_mesh(args, kwargs)) if comm is None else comm
        return make_plan(func, args, kwargs, comm, warned=self.warned, **how)

    def _find(
        self,
        table: OpTable,
        lead: TensorLayout,
        key: tuple[Any, ...] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        note: tuple[Any] | None,
    ) -> BoundPlan:
        """The plan of a call, made where it is not known. With a note it is kept under key and note."""
        if note is not None and key is not None:
            key = (*key, *note)
        found = None if key is None else lead.plans.get(key)
        if found is BY_VALUE:
            key = (table, *exact_key(args, kwargs))
            found = lead.plans.get(key)
        if type(found) is BoundPlan:
            return found
        modes, needs_grad = dispatch_modes(), torch.is_grad_enabled()
        try:
            return self._find_anew(table, lead, key, args, kwargs, note)
        except BaseException:  # a RecursionError may come where a mode is taken off or put back
            set_dispatch_modes(modes)
            torch.set_grad_enabled(needs_grad)
            raise

    def _find_anew(
        self,
        table: OpTable,
        lead: TensorLayout,
        key: tuple[Any, ...] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        note: tuple[Any] | None,
    ) -> BoundPlan:
        """Make a plan, from the recipe of others like it if there is one, and keep it."""
        kinds: tuple[Any, ...] | None = None
        made, comms = None, (lead.comm,)
        if key is not None:  # symbolic sizes have kinds of their own, which have no recipes
            kinds = tuple([p.kind if type(p) is TensorLayout else p for p in key])
            recipe = lead.kind.recipes.get(kinds)
            made = None if recipe is None else recipe.plan(args, kwargs, lead.comm)
        if made is None:
            layouts = [lead, *[part for part in key or () if type(part) is TensorLayout]]
            is_symbolic = any(own.is_symbolic for own in layouts)
            is_traced = dispatch_mode_count() > 0
            comm = None if key is None or any(own.comm is not lead.comm for own in layouts) else lead.comm
            how = {"is_traced": is_traced, "note": None if note is None else note[0]}
            made, comms, recipe, by_value = self._make(table.func, args, kwargs, comm, **how)
            by_value = by_value or any(own.layout.partial_axes for own in layouts)
            if not lead.comm.is_member:
                recipe = None
            if is_symbolic or key is None or (is_traced and made.needs_values):
                return BoundPlan(made, comms)
            if recipe is not None and kinds is not None:
                _keep(lead.kind.recipes, kinds, recipe)
            if by_value and not table.reads_floats and (kwargs or table.form == GENERAL):
                exact = (table, *exact_key(args, kwargs))
                if exact != key:
                    _keep(lead.plans, key, BY_VALUE)
                    key = exact
        is_outside = not lead.comm.is_member
        plan = plan_outside(made, comms, table.func, args, kwargs) if is_outside else BoundPlan(made, comms)
        if key is not None:
            _keep(lead.plans, key, plan)
        return plan

    def run_several(
        self, build: Callable[..., Any], static: tuple[Any, ...], tensors: tuple[Any, ...]
    ) -> Any:
        """Several ops on `tensors` (the first a DTensor, others may be None) by one plan, which `build` writes
        (`make_plan_of`). Kept as plans of ops are, `build` in the place of the op. Below autograd; collective
        where the plan is."""
        lead = tensors[0]._tensor_layout
        key = (build, static, *[None if t is None else t._tensor_layout for t in tensors])
        plan = lead.plans.get(key)
        if plan is None:
            plan = BoundPlan(*make_plan_of(build, static, tensors, self.warned))
            _keep(lead.plans, key, plan)
        return fill_result(plan.result, run_steps(plan, tensors, {}), plan)

    def plan_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundPlan | None:
        """The plan that a call would run by; None of one that has none: it writes scalars to a plain tensor."""
        table = self.tables.get(id(func)) or self._table(func)
        note, ready = _note_of(table, args, kwargs), self._with_layouts(table, args, kwargs)
        if ready is None:
            return None
        lead = next(t for t in all_tensors(ready) if isinstance(t, DTensor))._tensor_layout
        return self._find(table, lead, table.key(*ready), *ready, note)


def _note_of(table: OpTable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
    """What a plan of this call depends on beyond its key, if there is anything; asked before all else."""
    return None if table.note is None else (table.note(table.func, args, kwargs),)


def _keep(known: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(known) >= _MAX_PLANS:
        known.clear()
    with contextlib.suppress(TypeError):  # symbolic sizes don't hash
        known[key] = value


dispatch = Dispatcher()
