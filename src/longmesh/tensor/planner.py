"""Planner: what an op does, written down as steps.

    def flip(p, func, args, kwargs):                     # how a family of ops says it (tensor/ops)
        x = p.linear_or_reduced(args[0])
        local = p.local(torch.flip, x, dims)
        ...
        return p.wrap(p.exchange([local], ...), x)

A rule or a family runs once for each kind of call, on `Planned` tensors: they have a global layout and a slot, and no
data. Torch's ops on them are planned in turn, so an op that is made of others (a softmax over a sharded dim, a
decomposition of torch's) is written as it would be on plain tensors, and all of its steps end up in one plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload, TorchDispatchMode, aten, schema_of
from longmesh.rules import Meta, OpCall, find_rule
from longmesh.rules.lookup import Masked
from longmesh.spec import Layout
from longmesh.spec.strides import contiguous_stride
from longmesh.tensor.by_rule import describe_call, local_form, pends_more
from longmesh.tensor.mask_buffer import MaskBuffer, without_mask
from longmesh.tensor.op_facts import (
    decomposition_of,
    facts_of,
    quick_call,
    refuse_new_shape,
    result_on_meta,
    written_targets,
)
from longmesh.tensor.op_plan import NOTHING, Given, OpPlan, Output, Whole
from longmesh.tensor.planned import Planned, Unplannable
from longmesh.tensor.propagate import choose
from longmesh.tensor.sending_steps import Exchange, Redistribute
from longmesh.tensor.step_writer import StepWriter
from longmesh.tensor.steps import Forget, Slot, drops
from longmesh.tensor.tensor_layout import tensor_layout
from longmesh.tensor.tree import all_tensors, map_tensors

# Ops that are made of ops that are made of ops: deeper than this, one is made of itself.
_MAX_DEPTH = 30
# What a family returns where the op's rule does after all.
USUAL = object()


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
    """The plan of one op, in the making: torch's ops on its planned tensors add their steps."""

    # -- ops -----------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op on planned tensors: its steps are added to the plan."""
        args, kwargs = map_tensors(self._as_planned, (args, kwargs))
        if self.depth > _MAX_DEPTH:
            raise Unplannable
        self.depth += 1
        try:
            family = self.families.get(func)
            result = USUAL if family is None else family(self, func, args, kwargs)
            if result is USUAL:
                result = self.by_rule(func, args, kwargs)
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
        own = tensor_layout(
            self.comm.mesh, whole, tensor.shape, contiguous_stride(tensor.shape), tensor.dtype
        )
        return self.planned(slot.number, own)

    def by_rule(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """By the op's rule, by other ops, or on whole tensors: whatever the op has, but for code of its own."""
        facts = facts_of(func)
        rule = find_rule(facts.rule_name)
        tensors: list[Any] = all_tensors((args, kwargs))
        if rule is None or facts.has_out or not tensors:
            return self._without_rule(func, args, kwargs, tensors)
        call, layouts = describe_call(facts.functional or func, rule, args, kwargs)
        pinned = None if facts.functional is None else 0
        choice = choose(call, rule.axis_rules(call), layouts, self.comm.cluster, pinned)
        form = None if choice is None else local_form(func, facts, rule, call, choice, self.comm)
        if choice is None or form is None:
            assert facts.functional is not None
            return self._write_back(func, facts.functional, args, kwargs)
        if facts.functional is not None and tensors[0].is_copied_view:
            raise Unplannable
        moved = [self.redistribute(t, y) for t, y in zip(tensors, choice.inputs, strict=True)]
        static = (call.args, dict(call.kwargs)) if form.static is None else form.static
        local_args, local_kwargs = slots_for_metas(static, [t.slot for t in moved])
        local_call = torch.reshape if func in _VIEWS and form.call is quick_call(func) else form.call
        if facts.functional is not None:
            self.local(local_call, *local_args, **local_kwargs)
            return args[0]
        if any(without_mask(y) is not y for y in choice.outputs):
            local_call = _unmasked(local_call)
        structure = result_on_meta(call)
        if (mask := call.get("output_mask")) is not None:  # meta kernels give more than is asked for
            structure = tuple([t if asked else None for t, asked in zip(structure, mask, strict=True)])
        metas = all_tensors(structure)
        if isinstance(structure, torch.Tensor):
            parts = (self.local(local_call, *local_args, **local_kwargs),)
        else:
            parts = self.locals(len(metas), local_call, *local_args, **local_kwargs) if metas else ()
        stays = all(a is b for a, b in zip(moved, tensors, strict=True))
        is_copy = facts.is_copied_view or not stays or pends_more(choice.inputs, choice.outputs)
        results = iter(
            [
                self.planned(
                    part.number,
                    tensor_layout(
                        self.comm.mesh,
                        without_mask(layout),
                        meta.shape,
                        contiguous_stride(meta.shape),
                        found.dtype,
                    ),
                    is_copied_view=facts.is_view and is_copy,
                )
                for part, layout, meta, found in zip(parts, choice.outputs, call.outputs, metas, strict=True)
            ]
        )
        return map_tensors(lambda _: next(results), structure)

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
        """By the ops that it is made of."""
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
        own = tensor_layout(
            self.comm.mesh, Layout.replicated(self.comm.shape), found.shape, found.stride(), found.dtype
        )
        return self.planned(part.number, own)

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
                stride = next(following, None)
                return Output(own.mesh, own.layout, own.shape, stride, value.slot, shares, is_view)
            if isinstance(value, Slot):
                kept.add(value.number)
                return Slot(value.number)
            if isinstance(value, (Output, Whole)):
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
        return OpPlan(
            steps=steps,
            result=NOTHING if template is None else template,
            num_slots=self.num_slots,
            drops=drops(steps, kept, self.num_inputs),
            replaces=self.replaces,
            is_view=is_view,
            is_copy=is_copied_view
            or any(step.is_collective or isinstance(step, (Redistribute, Exchange)) for step in steps),
            needs_values=self.needs_values,
            after=self.after,
            how=how,
        )


_VIEWS = (aten.view.default, aten._unsafe_view.default)


def _unmasked(call: Callable[..., Any]) -> Callable[..., Any]:
    """A lookup whose mask is applied at once."""

    def run(*args: Any, **kwargs: Any) -> Any:
        found = call(*args, **kwargs)
        return MaskBuffer(found.mask).apply_mask(found.result) if type(found) is Masked else found

    return run


def slots_for_metas(value: Any, slots: list[int]) -> Any:
    """Arguments with slots in the places of metas."""
    if isinstance(value, Meta):
        return Slot(slots[value.index])
    if isinstance(value, (list, tuple)):
        return type(value)(slots_for_metas(v, slots) for v in value)
    return {k: slots_for_metas(v, slots) for k, v in value.items()} if isinstance(value, dict) else value


def _is_planned(value: Any) -> bool:
    """Whether a result can be computed with further."""
    if isinstance(value, (list, tuple)) and not isinstance(value, (Slot, Whole, Given)):
        return all(map(_is_planned, value))
    return isinstance(value, Planned) or value is None or isinstance(value, int)
