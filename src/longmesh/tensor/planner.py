"""Planner: the plan of one op, in the making.

An op goes by its rule: by the rule's program, which writes steps on `Planned` tensors, or by its lines. One without a
rule goes by torch's decomposition of it, whose ops are planned in turn; failing that, every rank runs it on whole
tensors. All steps end up in one plan. Pure: nothing is sent, and every rank makes the same plan from the same call.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from longmesh._torch import OpOverload, TorchDispatchMode, aten, schema_of
from longmesh.rules import OpCall
from longmesh.rules.lookup import Masked
from longmesh.rules.op_facts import (
    decomposition_of,
    facts_of,
    quick_call,
    refuse_new_shape,
    result_on_meta,
    written_targets,
)
from longmesh.rules.planned import Planned, Unplannable
from longmesh.rules.steps import Exchange, Forget, GivenCall, Redistribute, Slot, drops
from longmesh.rules.table import program_of, rule_of
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.spec import Layout
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.lines import Recipe, describe_call, find_lines, pends_more, plan_call, slots_for_metas
from longmesh.tensor.mask_buffer import MaskBuffer, without_mask
from longmesh.tensor.op_plan import NOTHING, Given, OpPlan, Output, Whole
from longmesh.tensor.propagate import Choice, choose
from longmesh.tensor.step_cost import is_collective
from longmesh.tensor.step_writer import StepWriter
from longmesh.tensor.tensor_layout import tensor_layout

# Ops that are made of ops that are made of ops: deeper than this, one is made of itself.
_MAX_DEPTH = 30


class _Tracing(TorchDispatchMode):
    """Ops of a decomposition that have no tensor among their arguments (arange, zeros) are steps, too."""

    def __init__(self, planner: Planner) -> None:
        super().__init__()
        self._planner = planner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:
            return self._planner.op(func, args, kwargs or {})


class Planner(StepWriter):
    """Writes the plan of a call of `func`; `given`: its arguments, where by its lines it may be a plain local call.
    `by_value`: the plan holds for the floats of the call only; `recipe`: how to plan calls of other sizes. `warned`:
    the ops that were warned of."""

    def __init__(self, comm: Any, device: torch.device, warned: set[str]) -> None:
        super().__init__(comm, device)
        self.warned = warned
        self.func: OpOverload | None = None
        self.given: tuple[Any, ...] | None = None
        self.by_value = True
        self.recipe: Recipe | None = None

    # -- the call itself -----------------------------------------------------------------------

    def call_given(self, lists: Sequence[Any], strides: Sequence[tuple[int, ...]]) -> OpPlan:
        func = self.func
        assert func is not None, "a program plans one op"
        outputs = [
            Output(t._layout, tuple(t.shape), stride, mesh=self.mesh_number(t._tensor_layout.comm))
            for t, stride in zip(lists[0], strides, strict=False)
        ]
        call, count = quick_call(func), sum(map(len, lists))
        self.by_value = False
        step = GivenCall(call, tuple(range(count)), count)
        return OpPlan((step,), self.places, tuple(outputs), num_slots=count + 1, plain=call)

    # -- ops -----------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op on planned tensors: its steps are added to the plan."""
        args, kwargs = map_tensors(self._as_planned, (args, kwargs))
        if self.depth > _MAX_DEPTH:
            raise Unplannable
        self.depth += 1
        try:
            program = program_of(func)
            way = self.by_lines if program is None else functools.partial(program, self)
            result = way(func, args, kwargs)
        finally:
            self.depth -= 1
        if self.depth and not _is_planned(result):
            raise Unplannable
        return result

    def _as_planned(self, tensor: torch.Tensor) -> Planned:
        """Plain tensors that a decomposition makes are equal on all ranks."""
        if isinstance(tensor, Planned):
            return self.ready_input(tensor)
        slot = self.local(tensor.clone)
        whole = Layout.replicated(self.comm.shape)
        own = tensor_layout(self.comm, whole, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype)
        return self.planned(slot.number, own)

    def by_lines(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By the lines of the op's rule, by other ops, or on whole tensors: whatever the op has, but for a program."""
        facts, rule = facts_of(func), rule_of(func)
        tensors: list[Any] = all_tensors((args, kwargs))
        if rule is None or rule.axis_rules is None or facts.has_out or not tensors:
            return self._without_rule(func, args, kwargs, tensors)
        if func is self.func and args is self.given and not self.steps:
            made = plan_call(func, rule, args, kwargs, self.comm)
            if made is not None:
                plan, self.recipe = made
                self.by_value = plan.plain is None
                return plan
        lines = find_lines(func, facts, rule, args, kwargs, self.comm)
        if lines is None:
            assert facts.functional is not None
            return self._write_back(func, facts.functional, args, kwargs)
        if facts.functional is not None and tensors[0].is_copied_view:
            raise Unplannable
        call, choice = lines.op_call, lines.choice
        moved = [self.redistribute(t, y) for t, y in zip(tensors, choice.inputs, strict=True)]
        static = (call.args, dict(call.kwargs)) if lines.static is None else lines.static
        local_args, local_kwargs = slots_for_metas(static, [t.slot for t in moved])
        local_call = torch.reshape if func in _VIEWS and lines.call is quick_call(func) else lines.call
        if facts.functional is not None:
            self.local(local_call, *local_args, **local_kwargs)
            return args[0]
        if any(without_mask(y) is not y for y in choice.outputs):
            local_call = Unmasked(local_call)
        structure = result_on_meta(call)
        if (mask := call.get("output_mask")) is not None:  # meta kernels give more than is asked for
            structure = tuple([t if asked else None for t, asked in zip(structure, mask, strict=True)])
        metas = all_tensors(structure)
        if isinstance(structure, torch.Tensor):
            parts = (self.local(local_call, *local_args, **local_kwargs),)
        else:
            parts = self.locals(len(metas), local_call, *local_args, **local_kwargs) if metas else ()
        stays = all(a is b for a, b in zip(moved, tensors, strict=True))
        is_copy = facts.is_copied_view or not stays or pends_more(choice)
        results: list[Planned] = []
        for part, layout, meta, found in zip(parts, choice.outputs, call.outputs, metas, strict=True):
            stride = contiguous_stride(meta.shape)
            own = tensor_layout(self.comm, without_mask(layout), meta.shape, stride, found.dtype)
            results.append(self.planned(part.number, own, is_copied_view=facts.is_view and is_copy))
        following = iter(results)
        return map_tensors(lambda _: next(following), structure)

    def choose(
        self, func: OpOverload, args: tuple[Any, ...], extra: Callable[..., Any]
    ) -> tuple[Choice, OpCall]:
        rule = rule_of(func)
        assert rule is not None and rule.axis_rules is not None
        call, layouts = describe_call(func, rule, args, {})
        choice = choose(call, [*extra(call), *rule.axis_rules(call)], layouts, self.comm.cluster)
        assert choice is not None, "everything replicated is always valid"
        return choice, call

    def _without_rule(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Planned]
    ) -> Any:
        functional = facts_of(func).functional
        if functional is not None:
            return self._write_back(func, functional, args, kwargs)
        if func is aten._local_scalar_dense.default or func is aten.item.default:
            raise Unplannable
        if not tensors:
            return self._make(func, args, kwargs)
        if decomposition_of(func) is not None:
            return self.decompose(func, args, kwargs)
        self.warn_of(func)
        return self.on_whole_tensors(func, args, kwargs)

    def decompose(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        decomposition = decomposition_of(func)
        assert decomposition is not None, f"{func} is made of no other ops"
        with _Tracing(self):
            return decomposition(*args, **kwargs)

    def warn_of(self, func: OpOverload) -> None:
        name = str(func)
        if name not in self.warned:
            self.warned.add(name)
            warnings.warn(
                f"{name} has no sharding rule: its inputs are replicated on every rank. Register one with "
                "register_sharding, or redistribute to Replicate() yourself to silence this",
                stacklevel=4,
            )

    def _make(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A factory function inside a decomposition: every rank makes the whole."""
        found = result_on_meta(OpCall(func, args, kwargs, ()))
        if not isinstance(found, torch.Tensor):
            raise Unplannable
        part = self.local(func, *args, **kwargs)
        whole = Layout.replicated(self.comm.shape)
        return self.planned(
            part.number, tensor_layout(self.comm, whole, found.shape, found.stride(), found.dtype)
        )

    def _write_back(
        self, func: OpOverload, functional: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An in-place or out= op whose target can't stay where it is: compute, redistribute, copy."""
        targets, kwargs = written_targets(func, args, kwargs)
        result = self.op(functional, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            if self.depth > 1:
                raise Unplannable
            self.replaces = True
            return result
        results = result if isinstance(result, (tuple, list)) else [result]
        for target, value in zip(targets, results, strict=False):
            refuse_new_shape(func, target, value)
            self.write(target, value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    # -- the plan ------------------------------------------------------------------------------

    @property
    def places(self) -> tuple[Any, ...]:
        return tuple(comm.place for comm in self.comms)

    def plan(
        self, func: OpOverload | None, result: Any, how: str, strides: Sequence[tuple[int, ...]] = ()
    ) -> OpPlan:
        """The plan of an op whose result is made of planned tensors; None: of several ops, none of which writes or
        gives a view. `strides`: the results', where they are known."""
        is_view = func is not None and facts_of(func).is_view
        is_mutable = func is not None and schema_of(func).is_mutable
        kept: set[int] = set()
        following = iter(strides)

        def leaf(value: Any) -> Any:
            if isinstance(value, Planned):
                if value.input is not None and is_mutable:
                    return Given(value.input)
                kept.add(value.slot)
                own = value._tensor_layout
                shares = 0 if own.has_lookup else None
                where = (value.slot, shares, is_view, self.mesh_number(own.comm))
                return Output(own.layout, tuple(own.shape), next(following, None), *where)
            if isinstance(value, Slot):
                kept.add(value.number)
                return Slot(value.number)
            if isinstance(value, Whole):
                kept.add(value.slot)
                return value
            if isinstance(value, (list, tuple)):
                return [leaf(v) for v in value] if isinstance(value, list) else tuple(leaf(v) for v in value)
            return value

        if is_mutable:
            self.steps += [Forget(number) for number in self.remembering]
        steps = tuple(self.steps)
        is_copied_view = any(isinstance(t, Planned) and t.is_copied_view for t in all_tensors(result))
        template = leaf(result)
        places = self.places
        return OpPlan(
            steps=steps,
            places=places,
            result=NOTHING if template is None else template,
            num_slots=self.num_slots,
            drops=drops(steps, kept, self.num_inputs),
            replaces=self.replaces,
            is_view=is_view,
            is_copy=is_view
            and (
                is_copied_view
                or any(isinstance(s, (Redistribute, Exchange)) or is_collective(s, places) for s in steps)
            ),
            needs_values=self.needs_values,
            lengths=self.lengths,
            how=how,
        )


_VIEWS = (aten.view.default, aten._unsafe_view.default)


class Unmasked(NamedTuple):
    """A lookup whose mask is applied at once."""

    call: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.call(*args, **kwargs)
        return MaskBuffer(found.mask).apply_mask(found.result) if type(found) is Masked else found


def _is_planned(value: Any) -> bool:
    """Whether a result can be computed with further."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (Slot, Whole, Given)):
        return all(map(_is_planned, value))
    return isinstance(value, Planned) or value is None or isinstance(value, int)
