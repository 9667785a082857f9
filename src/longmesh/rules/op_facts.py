"""What an op's schema and torch's tables say of it, whatever its arguments are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from longmesh._torch import (
    OpOverload,
    decompositions,
    is_composite,
    no_dispatch_modes,
    op_function,
    schema_of,
)
from longmesh.errors import LongmeshError
from longmesh.rules.rule import Meta, OpCall, OutMeta, arguments_of
from longmesh.rules.tree import all_tensors


class OpFacts(NamedTuple):
    """What an op's schema says."""

    functional: OpOverload | None
    # The op's own name, and that of its functional form, if it is not one.
    name: str
    rule_name: str
    has_out: bool
    returns_one_tensor: bool
    is_view: bool
    # A view op that is made of others, as reshape: they say whether its result is a view or a copy. Autograd has them
    # run one by one, inference mode gives us the op itself.
    is_composite_view: bool
    # Conjugates and negatives: views by a bit of the tensor that collectives don't know, so the local call copies.
    is_copied_view: bool


@functools.cache
def facts_of(func: OpOverload) -> OpFacts:
    functional = functional_form(func)
    return OpFacts(
        functional,
        rule_name(func),
        rule_name(functional or func),
        bool(out_names(func)),
        returns_one_tensor(func),
        is_view(func),
        is_view(func) and is_composite(func),
        rule_name(func) in ("_conj.default", "_neg_view.default"),
    )


def out_names(func: OpOverload) -> list[str]:
    """The arguments that the op writes its results to: `out`, or one name for each of several."""
    return [a.name for a in schema_of(func).arguments if a.is_out]


def written_targets(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What an in-place or out= op writes its results to, and the keyword arguments of its functional form."""
    outs = out_names(func)
    others = {name: value for name, value in kwargs.items() if name not in outs}
    return [kwargs[name] for name in outs] or [args[0]], others


def refuse_new_shape(func: OpOverload, target: torch.Tensor, value: torch.Tensor) -> None:
    if target.shape != value.shape:
        raise LongmeshError(
            f"{func} would change the shape of the DTensor it writes to: {tuple(target.shape)} -> "
            f"{tuple(value.shape)}; use the op that returns a new tensor"
        )


def is_view(func: OpOverload) -> bool:
    """Whether the op's results share the memory of its first argument."""
    arguments = schema_of(func).arguments
    first = arguments[0].alias_info if arguments else None
    return first is not None and not first.is_write


def result_on_meta(call: OpCall) -> Any:
    """What the op returns for the global shapes, as meta tensors."""

    def empty(value: Any) -> Any:
        if isinstance(value, Meta):
            return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
        kind: Any = type(value)  # pyright: ignore[reportUnknownVariableType]
        if kind in (list, tuple):
            return kind([empty(v) for v in value])  # pyright: ignore[reportUnknownVariableType]
        if kind is dict:
            return {k: empty(v) for k, v in value.items()}
        return torch.device("meta") if isinstance(value, torch.device) else value

    with no_dispatch_modes(), torch.no_grad():
        try:
            return call.func(*empty(call.args), **empty(dict(call.kwargs)))
        except AssertionError as error:  # how torch's decompositions refuse arguments
            raise RuntimeError(f"{call.func}: {error}") from error


def run_on_meta(call: OpCall) -> tuple[OutMeta, ...]:
    """The outputs' global metas, by running the op on meta tensors of the global shapes."""
    return tuple([OutMeta(tuple(t.shape), t.stride()) for t in all_tensors(result_on_meta(call))])


def written_arguments(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The values of the arguments that the op's schema says it writes to."""
    given = arguments_of(func, args, kwargs)
    arguments = schema_of(func).arguments
    return [given[a.name] for a in arguments if a.alias_info is not None and a.alias_info.is_write]


def rule_name(func: OpOverload) -> str:
    """The name a rule is listed under: without the namespace for aten, with it otherwise."""
    return str(func).removeprefix("aten.")


def functional_form(func: OpOverload) -> OpOverload | None:
    """The overload that returns what an in-place or out= overload writes; None for a functional op."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return None
    namespace, name = schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None:
        return None
    wanted = [str(a.type) for a in schema.arguments if not a.is_out]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if (
            not schema_of(candidate).is_mutable
            and [str(a.type) for a in schema_of(candidate).arguments] == wanted
        ):
            return candidate
    return None


def decomposition_of(func: OpOverload) -> Callable[..., Any] | None:
    """The op in terms of others: torch's decomposition, or the composite kernel itself."""
    if func in decompositions:
        return decompositions[func]
    if is_composite(func):
        return func.decompose
    return None


def is_pointwise(func: OpOverload) -> bool:
    return torch.Tag.pointwise in func.tags or schema_of(func).name.startswith("aten::_foreach_")


# Ops whose Python binding takes what the op takes, in its order: the binding is cheaper than the op itself.
_BOUND = frozenset(
    (
        "_log_softmax", "_softmax", "abs", "add.Tensor", "add_.Tensor", "addcdiv_", "addcmul_", "addmm", "amax", "bmm",
        "cat", "clone", "copy_", "cos", "detach", "div.Tensor", "div_.Tensor", "exp", "expand", "gelu", "lerp_.Scalar",
        "linear", "log", "matmul", "mean.dim", "mm", "mul.Tensor", "mul_.Tensor", "native_layer_norm", "neg",
        "ones_like", "relu", "rsqrt", "sigmoid", "sin", "sqrt", "sub.Tensor", "sum", "sum.dim_IntList", "t", "tanh",
        "transpose.int", "view", "zeros_like",
    )
)  # fmt: skip


@functools.cache
def quick_call(func: OpOverload) -> Callable[..., Any]:
    """The cheapest way to call an op on plain tensors."""
    name = rule_name(func).removesuffix(".default")
    if name not in _BOUND and not name.startswith("_foreach_"):
        return op_function(func)
    if name == "view":
        return _view
    name = name.partition(".")[0]
    places = (torch, torch.nn.functional, torch.Tensor)
    return next((getattr(place, name) for place in places if hasattr(place, name)), op_function(func))


def _view(part: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """Sizes one by one are cheaper to hand over than a list."""
    return part.view(*size) if size else part.view(size)


def returns_one_tensor(func: OpOverload) -> bool:
    returns = schema_of(func).returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"
