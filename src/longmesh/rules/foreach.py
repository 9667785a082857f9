"""Foreach ops: one op on lists of tensors, one dispatch and one local call for all of them.

Members may have nothing in common: each has its own layout, its own mesh, or is a plain tensor. A member whose tensors
are all laid out alike joins the one local call on everybody's parts; the others go one by one, as the op on single
tensors (`_foreach_add` as `add`), which redistributes what it needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from longmesh._torch import OpOverload
from longmesh.rules.planned import Planned
from longmesh.rules.pointwise import elementwise_meta
from longmesh.rules.rule import Meta, Program, Rule
from longmesh.rules.writer import Writer
from longmesh.spec import Layout, MaskPartial, Partial

_NAMES = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor
    frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh
    sqrt sub tan tanh trunc zero
"""
# Linear in their lists together: members with pending sums stay pending.
_LINEAR = frozenset(
    (
        "add.List", "clone.default", "copy.default", "div.Scalar", "div.ScalarList", "div.Tensor", "lerp.Scalar",
        "lerp.ScalarList", "mul.Scalar", "mul.ScalarList", "mul.Tensor", "neg.default", "sub.List", "zero.default",
    )
)  # fmt: skip


@functools.cache
def _may_stay(layout: Layout, is_linear: bool) -> bool:
    """Whether the op on parts is the op on the whole, for tensors that are all laid out so."""
    pending = [p for p in layout.placements if isinstance(p, Partial)]
    return not pending or (
        is_linear and all(p.reduce_op in ("sum", "avg") and not isinstance(p, MaskPartial) for p in pending)
    )


def _are_alike(lead: Planned, others: Sequence[Planned], is_linear: bool) -> bool:
    if lead.is_plain:
        return all(other.is_plain for other in others)
    return _may_stay(lead.global_layout, is_linear) and all(
        not t.is_plain
        and t.global_layout is lead.global_layout
        and t.comm is lead.comm
        and t.shape == lead.shape
        for t in others
    )


def scalar_of(p: Writer, value: Any, members: Sequence[Planned]) -> Any:
    """A tensor that holds for all members (a learning rate, a clipping factor): reduced and whole, on any mesh that has
    the ranks of theirs."""
    if not isinstance(value, Planned) or value.is_plain:
        return value
    p.check_scalar(value, members)
    return p.replicated(value)


def _is_tensor_list(value: Any) -> bool:
    return type(value) in (list, tuple) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def foreach(name: str, overload: str, *, writes: bool) -> Program:
    """The program of `_foreach_<name>.<overload>`, which writes to its first list if `writes`."""
    is_linear = f"{name}.{overload}" in _LINEAR
    single = single_op(name, overload)

    def program(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lists = [a for a in args if _is_tensor_list(a)]
        leads: list[Planned] = lists[0]
        others = list(zip(*lists[1:], strict=True)) if len(lists) > 1 else [()] * len(leads)
        alike = [_are_alike(lead, rest, is_linear) for lead, rest in zip(leads, others, strict=True)]
        if all(alike) and _has_only_lists(args, kwargs):
            return p.call_given(lists, [] if writes else _strides(lists))
        results: list[Any] = [None] * len(leads)
        for members in _in_turn(alike, writes):
            if alike[members[0]]:
                chosen = [_choose(p, a, members, leads) for a in args]
                options = {k: scalar_of(p, v, leads) for k, v in kwargs.items()}
                if writes:
                    p.local(func, *chosen, **options)
                    continue
                made = p.locals(len(members), func, *chosen, **options)
                for i, part in zip(members, made, strict=True):
                    results[i] = part if leads[i].is_plain else p.wrap(part, leads[i])
                continue
            (i,) = members
            values: list[Any] = [
                a[i] if isinstance(a, (list, tuple)) else scalar_of(p, a, leads) for a in args
            ]
            if any(t.is_plain for t in (leads[i], *others[i]) if t.ndim):
                p.refuse_mix(func, (leads[i], *others[i]))
            with p.on_mesh_of(leads[i]):
                results[i] = single(i, values, kwargs)
                if writes:
                    p.write(leads[i], results[i])
        return None if writes else results

    return program


def _in_turn(alike: Sequence[bool], writes: bool) -> list[list[int]]:
    """The members by local calls: those that join one, and the others each by itself. Members that are written may be
    one tensor, so their order stays: only neighbours join."""
    turns: list[list[int]] = [] if writes else [[i for i, ok in enumerate(alike) if ok]]
    for i, ok in enumerate(alike):
        if not ok:
            turns.append([i])
        elif writes and i and alike[i - 1]:
            turns[-1].append(i)
        elif writes:
            turns.append([i])
    return [members for members in turns if members]


def _has_only_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every tensor is a DTensor and a member of a list."""
    lists = [a for a in args if _is_tensor_list(a)]
    return not any(t.is_plain for tensors in lists for t in tensors) and not any(
        isinstance(a, torch.Tensor) for a in (*args, *kwargs.values())
    )


def _strides(lists: Sequence[Any]) -> list[tuple[int, ...]]:
    """How the results of the members are in memory."""
    found: list[tuple[int, ...]] = []
    for members in zip(*lists, strict=True):
        metas = [Meta(i, tuple(t.shape), t.stride(), t.dtype) for i, t in enumerate(members)]
        found.append(elementwise_meta(metas[0].shape, metas).stride)
    return found


def _choose(p: Writer, value: Any, indices: list[int], members: Sequence[Planned]) -> Any:
    """An argument for some of the members: lists, and the 1-d tensor of one number each that addcmul takes."""
    if isinstance(value, (list, tuple)):
        return [value[i] for i in indices]
    if isinstance(value, torch.Tensor) and value.ndim:
        return p.local(torch.Tensor.__getitem__, scalar_of(p, value, members), indices)
    return scalar_of(p, value, members)


def single_op(name: str, overload: str) -> Callable[[int, list[Any], dict[str, Any]], Any]:
    """What the op does to one member: its index, its arguments, the keyword arguments of all."""
    if name == "zero":
        return lambda i, values, kwargs: torch.zeros_like(values[0])
    if name == "copy":
        return lambda i, values, kwargs: values[1]
    if name in ("addcmul", "addcdiv"):
        ternary, combine = getattr(torch, name), torch.mul if name == "addcmul" else torch.div

        def run(i: int, values: list[Any], kwargs: dict[str, Any]) -> Any:
            factor = values[3] if len(values) > 3 else kwargs.get("value", 1)
            if isinstance(factor, torch.Tensor):
                return values[0] + factor[i] * combine(*values[1:3])
            return ternary(*values[:3], value=factor)

        return run
    if name in ("maximum", "minimum") and overload != "List":
        name = "clamp_min" if name == "maximum" else "clamp_max"
    op = getattr(torch, name)
    return lambda i, values, kwargs: op(*values, **kwargs)


def one_by_one(name: str) -> Program:
    """An op that is no elementwise one: each member by itself."""
    op = getattr(torch, name)

    def program(p: Writer, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results: list[Any] = []
        for i, lead in enumerate(args[0]):
            with p.on_mesh_of(lead):
                results.append(op(*(a[i] for a in args if isinstance(a, (list, tuple)))))
        return results

    return program


def _rules() -> dict[str, Rule]:
    found = {f"_foreach_{name}.default": Rule(program=one_by_one(name), mixed=True) for name in ("mm", "max")}
    for name in _NAMES.split():
        for writes in (False, True):
            packet = getattr(torch.ops.aten, f"_foreach_{name}{'_' if writes else ''}", None)
            for overload in packet.overloads() if packet is not None else ():
                if not overload.endswith("out"):
                    program = foreach(name, overload, writes=writes)
                    found[f"_foreach_{name}{'_' if writes else ''}.{overload}"] = Rule(
                        program=program, mixed=True
                    )
    return found


# Plain tensors are members like others here.
RULES: dict[str, Rule] = _rules()
