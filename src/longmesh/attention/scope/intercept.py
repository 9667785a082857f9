"""AttentionMode: F.scaled_dot_product_attention and nn.MultiheadAttention on a rank's tokens attend to all tokens.

    with AttentionMode(cut):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)     # exact, over all ranks

A TorchFunctionMode: it holds for this thread and for the backward that is started inside it, recomputation of
checkpoints included, and nothing is patched. What computes attention in another way is refused, since it would
see this rank's tokens only.

A compiler traces the mode with what it compiles: attention is then one opaque op in the graph.

Pitfall: a backward after the scope runs without the mode; a checkpoint then recomputes other tensors than it saved,
and torch raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from longmesh._torch import HigherOrderOperator, aten
from longmesh._torch.process_wide import break_graph, never_compile_alone
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.module_attention import attend_as_module
from longmesh.errors import LongmeshError

# F.scaled_dot_product_attention, and the op of the same name and arguments.
_SDPA = frozenset(
    (
        F.scaled_dot_product_attention,
        aten.scaled_dot_product_attention,
        aten.scaled_dot_product_attention.default,
    )
)
# What a compiler would take apart, so that nothing of its name is left; other ops it shows when its graphs run.
_REFUSED_FUNCTIONS = frozenset(
    (
        torch.ops.higher_order.flex_attention,
        aten._scaled_dot_product_attention_math,
        aten._scaled_dot_product_attention_math.default,
    )
)
# What runs the autograd engine.
_ENGINE = frozenset((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad))


Handlers = Mapping[Callable[..., Any], Callable[..., Any]]


class AttentionMode(TorchFunctionMode):
    """Inside, attention on tensors of `cut.num_tokens` tokens runs over the whole sequence.

    Other lengths are left to the mode around this one, if there is one, else refused. `handlers` replace functions.
    """

    def __init__(
        self, cut: CutSequence, *, is_nested: bool = False, handlers: Handlers | None = None
    ) -> None:
        super().__init__()
        self.cut = cut
        self._is_nested = is_nested
        self.handlers = handlers or {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self.handlers:
            return self.handlers[func](*args, **kwargs)
        if func in _SDPA:
            query = args[0] if args else kwargs["query"]
            if self._is_nested and query.shape[-2] != self.cut.num_tokens:
                return func(*args, **kwargs)
            return self.cut.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # what nn.MultiheadAttention calls
            query = args[0] if args else kwargs["query"]
            if self._is_nested and query.shape[0] != self.cut.num_tokens:
                return func(*args, **kwargs)
            return attend_as_module(self.cut, *args, **kwargs)
        if func in _ENGINE:
            return self._differentiate(func, args, kwargs)
        if _computes_attention(func):
            raise attends_locally(func)
        if torch.compiler.is_compiling() and isinstance(func, HigherOrderOperator):
            # Its functions would be traced without the mode. This way they are called, each a graph of its own.
            break_graph("a higher order operator inside a scope of context parallelism")
        return func(*args, **kwargs)

    def _differentiate(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the autograd engine with the mode on, since what a checkpoint recomputes must meet it.

        A mode is off while it handles a function. Edges of the graph are not tensors, so the same function on edges
        does not ask the mode again.
        """
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        names = list(inspect.signature(func).parameters)
        roots = _as_tuple(given.pop(names[0]))
        grad_name = next(name for name in names if name in ("gradient", "grad_tensors", "grad_outputs"))
        grads = given.pop(grad_name, None)
        grads = (None,) * len(roots) if grads is None else _as_tuple(grads)
        if len(grads) != len(roots) or _needs_torch(roots, grads):
            return func(*args, **kwargs)
        grads = tuple(torch.ones_like(t) if g is None else g for t, g in zip(roots, grads, strict=True))
        if given.get("inputs") is not None:
            given["inputs"] = tuple(_edge(t) for t in _as_tuple(given["inputs"]))
        edges = tuple(_edge(t) for t in roots)
        with self:
            if func is torch.autograd.grad:
                return torch.autograd.grad(edges, given.pop("inputs"), grads, **given)
            return torch.autograd.backward(edges, grads, **given)


def attends_locally(func: Callable[..., Any]) -> LongmeshError:
    name = getattr(func, "__name__", "this function")
    return LongmeshError(
        f"{name} inside a scope of context parallelism would attend to this rank's tokens only; use "
        "F.scaled_dot_product_attention, longmesh.flex_attention or ContextParallel"
    )


def _computes_attention(func: Callable[..., Any]) -> bool:
    """By name, also of other packages' ops; a compiler can't read names. A backward comes from a forward that was
    let through."""
    if torch.compiler.is_compiling():
        return func in _REFUSED_FUNCTIONS
    name = getattr(func, "__name__", "").partition(".")[0]
    if name.endswith("_backward"):
        return False
    return "attention" in name or "flash_attn" in name or name == "_transformer_encoder_layer_fwd"


def _edge(tensor: torch.Tensor | GradientEdge) -> GradientEdge:
    return get_gradient_edge(tensor) if isinstance(tensor, torch.Tensor) else tensor


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (torch.Tensor, GradientEdge)) else tuple(value)


def _needs_torch(roots: tuple[Any, ...], grads: tuple[Any, ...]) -> bool:
    """Whether torch has something to say first: no graph, or no gradient where one is needed."""
    pairs = zip(roots, grads, strict=True)
    return any(
        isinstance(t, torch.Tensor) and (not t.requires_grad or (g is None and t.numel() != 1))
        for t, g in pairs
    )


# Traced as a part of what is called inside the mode, but never compiled by itself: Dynamo knows the function that such
# a frame is given by its id, and getters of a tensor's properties are made for each access, so ids come again.
never_compile_alone(AttentionMode.__torch_function__)
