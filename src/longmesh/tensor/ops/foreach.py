"""Foreach ops: one op on lists of tensors, one dispatch and one local call for all of them.

Members need have nothing in common: each may lie in its own layout, on its own mesh, or be a plain tensor. A
member whose tensors lie alike joins the one local call on everybody's parts; the others go one by
one, as the op on single tensors (`_foreach_add` as `add`), which moves what has to be moved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from longmesh.rules.pointwise import elementwise_meta
from longmesh.rules.rule import Meta
from longmesh.spec import Layout, MaskPartial, Partial
from longmesh.tensor.autograd import move
from longmesh.tensor.dispatch import Handler
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.meta import global_stride
from longmesh.tensor.op_facts import quick_call
from longmesh.tensor.op_plan import OpPlan, Output
from longmesh.tensor.steps import GivenCall

aten = torch.ops.aten

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
    """Whether the op on parts is the op on the whole, for tensors that all lie so."""
    pending = [p for p in layout.placements if isinstance(p, Partial)]
    return not pending or (
        is_linear and all(p.reduce_op in ("sum", "avg") and not isinstance(p, MaskPartial) for p in pending)
    )


def _lie_alike(lead: torch.Tensor, others: Sequence[torch.Tensor], is_linear: bool) -> bool:
    if not isinstance(lead, DTensor):
        return not any(isinstance(other, DTensor) for other in others)
    held = lead._tensor_layout
    if not _may_stay(held.layout, is_linear):
        return False
    for other in others:
        if not isinstance(other, DTensor):
            return False
        own = other._tensor_layout
        if own is not held and (
            own.layout is not held.layout or own.comm is not held.comm or own.shape != held.shape
        ):
            return False
    return True


def scalar_of(value: Any) -> Any:
    """A tensor that holds for all members (a learning rate, a clipping factor): reduced and whole, on any mesh."""
    if isinstance(value, DTensor):
        return move(value, Layout.replicated(value._layout.mesh))._local_tensor
    return value


def parts_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], torch.Tensor)


def foreach(name: str, overload: str, *, writes: bool) -> Handler:
    """The handler of `_foreach_<name>.<overload>`, which writes to its first list if `writes`."""
    is_linear = f"{name}.{overload}" in _LINEAR
    single = single_op(name, overload)

    def handler(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lists = [a for a in args if _is_tensor_list(a)]
        leads = lists[0]
        members = zip(
            leads, zip(*lists[1:], strict=True) if len(lists) > 1 else [()] * len(leads), strict=True
        )
        alike = [_lie_alike(lead, others, is_linear) for lead, others in members]
        if all(alike):
            if _has_only_lists(args, kwargs):
                return _plan_together(func, lists, writes)
            return _run_together(func, args, kwargs, leads, writes)
        results: list[Any] = [None] * len(leads)
        together = [i for i, ok in enumerate(alike) if ok]
        if together:
            chosen = tuple(_choose(a, together) for a in args)
            made = _run_together(func, chosen, kwargs, [leads[i] for i in together], writes)
            for i, result in zip(together, made or (), strict=False):
                results[i] = result
        for i, ok in enumerate(alike):
            if not ok:
                values = [a[i] if isinstance(a, (list, tuple)) else scalar_of(a) for a in args]
                results[i] = single(i, values, kwargs)
                if writes:
                    leads[i].copy_(results[i])
        return None if writes else results

    return handler


def _has_only_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every tensor is a DTensor and a member of a list."""
    lists = [a for a in args if _is_tensor_list(a)]
    return all(isinstance(t, DTensor) for tensors in lists for t in tensors) and not any(
        isinstance(a, torch.Tensor) for a in (*args, *kwargs.values())
    )


def _plan_together(func: OpOverload, lists: list[Any], writes: bool) -> OpPlan:
    """One call on everybody's parts, for all calls alike."""
    outputs: list[Output] = []
    for members in [] if writes else zip(*lists, strict=True):
        lead = members[0]
        metas = [Meta(i, tuple(t.shape), t.stride(), t.dtype) for i, t in enumerate(members)]
        stride = elementwise_meta(metas[0].shape, metas).stride
        outputs.append(Output(lead._mesh, lead._layout, metas[0].shape, stride))
    call = quick_call(func)
    count = sum(map(len, lists))
    step = GivenCall(call, tuple(range(count)), count)
    return OpPlan((step,), tuple(outputs), num_slots=count + 1, plain=call)


def _choose(value: Any, indices: list[int]) -> Any:
    """An argument for some of the members: lists, and the 1-d tensor of one number each that addcmul takes."""
    if isinstance(value, (list, tuple)):
        return [value[i] for i in indices]
    if isinstance(value, torch.Tensor) and value.ndim:
        return scalar_of(value)[indices]
    return value


def _run_together(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leads: Sequence[torch.Tensor],
    writes: bool,
) -> list[torch.Tensor] | None:
    locals_ = [parts_of(a) if _is_tensor_list(a) else scalar_of(a) for a in args]
    results = func(*locals_, **{k: scalar_of(v) for k, v in kwargs.items()})
    if writes:
        return None
    return [wrap_like(lead, local) for lead, local in zip(leads, results, strict=True)]


def wrap_like(lead: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A result that lies as `lead` does."""
    if not isinstance(lead, DTensor):
        return local
    return DTensor(local, lead._mesh, lead._layout, lead.shape, global_stride(lead.shape, local))


def single_op(name: str, overload: str) -> Callable[[int, list[Any], dict[str, Any]], Any]:
    """What the op does to one member: its index, its arguments, the keyword arguments of all."""
    if name == "zero":
        return lambda i, values, kwargs: torch.zeros_like(values[0])
    if name == "copy":
        return lambda i, values, kwargs: values[1]
    if name in ("addcmul", "addcdiv"):
        ternary = getattr(torch, name)

        def run(i: int, values: list[Any], kwargs: dict[str, Any]) -> Any:
            factor = values[3] if len(values) > 3 else kwargs.get("value", 1)
            factor = factor[i].item() if isinstance(factor, torch.Tensor) else factor
            return ternary(*values[:3], value=factor)

        return run
    if name in ("maximum", "minimum") and overload != "List":
        name = "clamp_min" if name == "maximum" else "clamp_max"
    op = getattr(torch, name)
    return lambda i, values, kwargs: op(*values, **kwargs)


def one_by_one(name: str) -> Handler:
    """An op that is no elementwise one: each member by itself."""
    op = getattr(torch, name)
    return lambda func, args, kwargs: [
        op(*(a[i] for a in args if isinstance(a, (list, tuple)))) for i in range(len(args[0]))
    ]


def _handlers() -> dict[OpOverload, Handler]:
    found: dict[OpOverload, Handler] = {
        aten._foreach_mm.default: one_by_one("mm"),
        aten._foreach_max.default: one_by_one("max"),
    }
    for name in _NAMES.split():
        for writes in (False, True):
            packet = getattr(aten, f"_foreach_{name}{'_' if writes else ''}", None)
            for overload in packet.overloads() if packet is not None else ():
                if not overload.endswith("out"):
                    found[getattr(packet, overload)] = foreach(name, overload, writes=writes)
    return found


HANDLERS: dict[OpOverload, Handler] = _handlers()
