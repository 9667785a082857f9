"""OpPlan: what an op on DTensors does, decided once and written down."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from longmesh.comm import MeshComm, comm_of
from longmesh.rules import LocalView, Meta, OpCall, OutMeta, Rule, find_rule
from longmesh.spec import Layout
from longmesh.tensor.propagate import Choice, choose
from longmesh.tensor.tensor_layout import TensorLayout
from longmesh.tensor.tree import map_tensors


class Output:
    """Mesh, layout and global meta of one tensor output. `held` is filled in when its dtype is first seen."""

    __slots__ = ("held", "layout", "mesh", "shape", "stride")

    def __init__(
        self, mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.mesh = mesh
        self.layout = layout
        self.shape = shape
        self.stride = stride
        self.held: TensorLayout | None = None


@dataclass(frozen=True, slots=True)
class OpPlan:
    """How one op call runs.

    `inputs`: the layout each tensor argument is brought to. `local_call` on the local parts, its static
    arguments replaced by `rewritten(locals)` where they depend on the rank. `outputs`: of the results.
    `written`: the argument an in-place op returns. `is_plain`: called on the parts as they lie, put in the
    place of their tensors. `is_view`: of a view op, `is_copy` if its result holds moved data. `has_numbers`: of a call
    with plain scalars among its tensors, as torch makes of x * 2.0.
    Without a `local_call` the op goes another way: by its `functional` form and a copy, by `decomposition`, or
    replicated.
    """

    inputs: tuple[Layout, ...] = ()
    outputs: tuple[Output, ...] = ()
    single: Output | None = None
    local_call: Callable[..., Any] | None = None
    rewritten: Callable[[list[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    is_plain: bool = False
    written: int | None = None
    is_view: bool = False
    is_copy: bool = False
    has_numbers: bool = False
    functional: OpOverload | None = None
    decomposition: Callable[..., Any] | None = None
    note: str = ""


class OpFacts(NamedTuple):
    """What an op's schema says."""

    functional: OpOverload | None
    rule_name: str
    has_out: bool
    returns_one_tensor: bool
    is_view: bool


@functools.cache
def facts_of(func: OpOverload) -> OpFacts:
    functional = functional_form(func)
    return OpFacts(
        functional,
        rule_name(functional or func),
        any(a.is_out for a in func._schema.arguments),
        returns_one_tensor(func),
        is_view(func),
    )


class Recipe:
    """How an op runs whatever the sizes: of a rule that doesn't read them, where no input has to move."""

    __slots__ = ("choice", "facts", "func", "mesh", "model", "rule")

    def __init__(
        self, func: OpOverload, facts: OpFacts, rule: Rule, choice: Choice, mesh: DeviceMesh, model: OpPlan
    ) -> None:
        self.func = func
        self.facts = facts
        self.rule = rule
        self.choice = choice
        self.mesh = mesh
        # Of the call that it was made for. Where the local call is the op itself, others differ in their outputs alone.
        self.model = model

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OpPlan:
        """The plan of a call with other sizes."""
        rule, model = self.rule, self.model
        call, _ = _describe_call(self.facts.functional or self.func, rule, args, kwargs)
        if rule.local_args is None and rule.local_op is None and model.functional is None is model.written:
            outputs = _outputs(self.mesh, self.choice, call)
            single = None if model.single is None else outputs[0]
            return OpPlan(
                model.inputs,
                outputs,
                single,
                model.local_call,
                None,
                True,
                None,
                model.is_view,
                model.is_copy,
            )
        return _plan_choice(self.func, self.facts, rule, call, self.choice, True, self.mesh)


def make_plan(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: DeviceMesh
) -> tuple[OpPlan, Recipe | None]:
    """Plan an op call whose tensor arguments are all DTensors, and say how to plan others like it, if known. Pure."""
    facts = facts_of(func)
    functional = facts.functional
    rule = find_rule(facts.rule_name)
    if rule is None or facts.has_out:
        if functional is not None:
            return OpPlan(functional=functional), None
        return OpPlan(decomposition=decomposition_of(func)), None
    call, layouts = _describe_call(functional or func, rule, args, kwargs)
    choice = choose(call, rule.axis_rules(call), layouts, None if functional is None else 0)
    if choice is None:
        return OpPlan(functional=functional), None
    stays = choice.inputs == layouts
    plan = _plan_choice(func, facts, rule, call, choice, stays, mesh)
    if rule.reads_sizes or not stays or any(entry.even for entry in choice.lines):
        return plan, None
    return plan, Recipe(func, facts, rule, choice, mesh, plan)


def _outputs(mesh: DeviceMesh, choice: Choice, call: OpCall) -> tuple[Output, ...]:
    metas = zip(choice.outputs, call.outputs, strict=True)
    return tuple([Output(mesh, layout, meta.shape, meta.stride) for layout, meta in metas])


def _describe_call(
    func: OpOverload, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[OpCall, tuple[Layout, ...]]:
    """The call with metas in its tensors' places, and how those lie."""
    layouts: list[Layout] = []
    metas: list[Meta] = []

    def describe(tensor: Any) -> Meta:
        held = tensor._tensor_layout
        layouts.append(held.layout)
        meta = Meta(len(metas), tuple(held.shape), tuple(held.stride), held.dtype)
        metas.append(meta)
        return meta

    meta_args = map_tensors(describe, args)
    meta_kwargs = map_tensors(describe, kwargs) if kwargs else kwargs
    call = OpCall(func, meta_args, meta_kwargs, tuple(metas))
    outputs = rule.out_meta(call) if rule.out_meta is not None else run_on_meta(call)
    return OpCall(func, meta_args, meta_kwargs, call.tensors, outputs), tuple(layouts)


def _plan_choice(
    func: OpOverload,
    facts: OpFacts,
    rule: Rule,
    call: OpCall,
    choice: Choice,
    stays: bool,
    mesh: DeviceMesh,
) -> OpPlan:
    """The plan of a call whose layouts are chosen; `stays`: the inputs lie so already."""
    functional = facts.functional
    if functional is not None and call.outputs[0].shape != call.tensors[0].shape:
        return OpPlan(functional=functional)
    results = _outputs(mesh, choice, call)
    rewritten, local_call = None, func
    if rule.local_args is not None or rule.local_op is not None:
        view = _local_view(call, choice.inputs, choice.outputs, comm_of(mesh))
        if rule.local_op is not None:
            local_call = rule.local_op(call, view) or func
            if local_call is not func and functional is not None:
                return OpPlan(functional=functional)
        if rule.local_args is not None:
            given = (call.args, dict(call.kwargs))
            static = rule.local_args(call, view)
            if not _equal(static, given):
                rewritten = _rewriter(static)
                if stays and _leads(static, 1) and _leads(given, 1):
                    rewritten, local_call = None, _with_static(local_call, static[0][1:])
    return OpPlan(
        inputs=choice.inputs,
        outputs=results,
        single=results[0] if len(results) == 1 and facts.returns_one_tensor else None,
        local_call=quick_call(local_call) if isinstance(local_call, OpOverload) else local_call,
        rewritten=rewritten,
        is_plain=rewritten is None and stays,
        written=0 if functional is not None else None,
        is_view=functional is None and facts.is_view,
        is_copy=not stays or _pends_more(choice.inputs, choice.outputs),
    )


def _leads(static: tuple[tuple[Any, ...], dict[str, Any]], count: int) -> bool:
    """Whether the arguments are `count` tensors followed by others, and no keywords."""
    args, kwargs = static
    return (
        not kwargs
        and all(isinstance(a, Meta) for a in args[:count])
        and not any(
            isinstance(m, Meta) for a in args[count:] for m in (a if isinstance(a, (list, tuple)) else [a])
        )
    )


def _with_static(op: Callable[..., Any], rest: tuple[Any, ...]) -> Callable[..., Any]:
    """A call on one local part whose other arguments are this rank's, not the given ones."""
    call = quick_call(op) if isinstance(op, OpOverload) else op
    return lambda part, *given: call(part, *rest)


def is_view(func: OpOverload) -> bool:
    """Whether the op's results share the memory of its first argument."""
    arguments = func._schema.arguments
    first = arguments[0].alias_info if arguments else None
    return first is not None and not first.is_write


def _pends_more(inputs: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> bool:
    """Whether outputs have a pending reduction that the inputs don't: their parts are new."""
    before = {a for layout in inputs for a in layout.partial_axes}
    return any(a not in before for layout in outputs for a in layout.partial_axes)


def _equal(a: Any, b: Any) -> bool:
    """Equal arguments, a list being as good as a tuple."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and a == b


def _rewriter(
    static: tuple[tuple[Any, ...], dict[str, Any]],
) -> Callable[[list[torch.Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Local tensors back into the places where the rewritten arguments have metas."""

    def fill(value: Any, locals_: list[torch.Tensor]) -> Any:
        if isinstance(value, Meta):
            return locals_[value.index]
        if isinstance(value, (list, tuple)):
            return type(value)(fill(v, locals_) for v in value)
        if isinstance(value, dict):
            return {k: fill(v, locals_) for k, v in value.items()}
        return value

    return lambda locals_: fill(static, locals_)


def _local_view(
    call: OpCall, inputs: tuple[Layout, ...], outputs: tuple[Layout, ...], comm: MeshComm
) -> LocalView:
    where = comm.coordinate

    def shapes(layouts: tuple[Layout, ...], metas: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(y.local_shape(m.shape, where) for y, m in zip(layouts, metas, strict=True))

    def offsets(layouts: tuple[Layout, ...], metas: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(y.local_offset(m.shape, where) for y, m in zip(layouts, metas, strict=True))

    return LocalView(
        input_shapes=shapes(inputs, call.tensors),
        input_offsets=offsets(inputs, call.tensors),
        output_shapes=shapes(outputs, call.outputs),
        output_offsets=offsets(outputs, call.outputs),
    )


def run_on_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """The outputs' global metas, by running the op on meta tensors of the global shapes."""

    def empty(value: Any) -> Any:
        if isinstance(value, Meta):
            return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return type(value)(empty(v) for v in value)
        if isinstance(value, dict):
            return {k: empty(v) for k, v in value.items()}
        return torch.device("meta") if isinstance(value, torch.device) else value

    found: list[OutMeta] = []
    with _disable_current_modes(), torch.no_grad():
        result = call.func(*empty(call.args), **empty(dict(call.kwargs)))
    map_tensors(lambda t: found.append(OutMeta(tuple(t.shape), t.stride())), result)
    return tuple(found)


def rule_name(func: OpOverload) -> str:
    """The name a rule is listed under: without the namespace for aten, with it otherwise."""
    return str(func).removeprefix("aten.")


def functional_form(func: OpOverload) -> OpOverload | None:
    """The overload that returns what an in-place or out= overload writes; None for a functional op."""
    schema = func._schema
    if not schema.is_mutable:
        return None
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None
    wanted = [str(a.type) for a in schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and [str(a.type) for a in candidate._schema.arguments] == wanted:
            return candidate
    return None


def decomposition_of(func: OpOverload) -> Callable[..., Any] | None:
    """The op in terms of others: torch's decomposition, or the composite kernel itself."""
    if func in decomposition_table:
        return decomposition_table[func]
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose
    return None


def is_pointwise(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags or func._schema.name.startswith("aten::_foreach_")


# Ops whose Python binding takes what the op takes, in its order: the binding is cheaper than the op itself.
_BOUND = frozenset(
    (
        "_log_softmax", "_softmax", "abs", "add.Tensor", "add_.Tensor", "addcdiv_", "addcmul_", "addmm", "amax", "bmm",
        "cat", "clone", "copy_", "cos", "detach", "div.Tensor", "div_.Tensor", "exp", "expand", "gelu", "lerp_.Scalar",
        "linear", "log", "matmul", "mm", "mul.Tensor", "mul_.Tensor", "native_layer_norm", "neg", "ones_like", "relu",
        "rsqrt", "sigmoid", "sin", "sqrt", "sub.Tensor", "sum", "sum.dim_IntList", "t", "tanh", "transpose.int",
        "view", "zeros_like",
    )
)  # fmt: skip


@functools.cache
def quick_call(func: OpOverload) -> Callable[..., Any]:
    """The cheapest way to call an op on plain tensors."""
    name = rule_name(func).removesuffix(".default")
    if name not in _BOUND and not name.startswith("_foreach_"):
        return func._op
    name = name.partition(".")[0]
    places = (torch, torch.nn.functional, torch.Tensor)
    return next((getattr(place, name) for place in places if hasattr(place, name)), func._op)


def returns_one_tensor(func: OpOverload) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"
