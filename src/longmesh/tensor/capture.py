"""capture: trace a function of DTensors once to its local ops and collectives, and replay that.

    @longmesh.capture
    def step(params, x, y):
        loss = ((net(params, x) - y) ** 2).mean()
        grads = torch.autograd.grad(loss, params)
        with torch.no_grad():
            for p, g in zip(params, grads):
                p -= 0.1 * g
        return loss.detach()

The replay costs what the local ops and raw collectives cost by hand: no rules, no layouts, no autograd engine.
A call with other layouts, shapes or plain arguments traces anew. Gradients are taken inside the function; nothing
differentiates through a replay. Python side effects happen while tracing only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from longmesh._torch import (
    TreeSpec,
    below_autograd,
    increment_version,
    tree_flatten,
    tree_is_leaf,
    tree_unflatten,
    write_count,
)
from longmesh.errors import LongmeshError
from longmesh.tensor.autograd import current_part
from longmesh.tensor.dtensor import DTensor
from longmesh.tensor.random import get_rng_state
from longmesh.tensor.tensor_layout import TensorLayout

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class _Trace(NamedTuple):
    """One traced call: the graph of local ops, how its outputs are laid out, their structure, and which of the tensors
    that it was given it writes to."""

    graph: GraphModule
    outputs: list[TensorLayout | None]
    spec: TreeSpec
    written: list[int]


class Captured(Generic[Arguments, Result]):
    """A function that is traced per layout and shape, and replayed. Collective, as the function is."""

    def __init__(self, fn: Callable[Arguments, Result]) -> None:
        functools.update_wrapper(self, fn)
        self._fn: Callable[..., Any] = fn
        self._traces: dict[tuple[Any, ...], _Trace] = {}

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        leaves: list[Any] = []
        key = (_flatten((args, kwargs), leaves), torch.is_grad_enabled(), *map(_describe_leaf, leaves))
        trace = self._traces.get(key)
        if trace is None:
            trace = self._traces[key] = self._trace(*tree_flatten((args, kwargs)))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        locals_ = list(map(_local, tensors))
        # Below autograd, which has nothing to do here: each op and collective is cheaper without asking it.
        with torch.no_grad(), below_autograd():
            results = trace.graph.forward(*locals_)
        increment_version([tensors[i] for i in trace.written if not tensors[i].is_inference()])
        wrapped: list[Any] = [
            r if own is None else _wrap(r, own, False) for r, own in zip(results, trace.outputs, strict=True)
        ]
        return wrapped[0] if trace.spec.is_leaf() else tree_unflatten(wrapped, trace.spec)

    def _trace(self, leaves: list[Any], spec: TreeSpec) -> _Trace:
        outputs: list[TensorLayout | None] = []
        structure: list[TreeSpec] = []
        written: list[int] = []

        def run(*locals_: torch.Tensor) -> list[Any]:
            given = iter(locals_)
            rebuilt = [
                _rebuild(leaf, next(given)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            ]
            args, kwargs = tree_unflatten(rebuilt, spec)
            results, result_spec = tree_flatten(self._fn(*args, **kwargs))
            outputs.extend(r._tensor_layout if isinstance(r, DTensor) else None for r in results)
            structure.append(result_spec)
            tensors = [leaf for leaf in rebuilt if isinstance(leaf, torch.Tensor)]
            written.extend(i for i, tensor in enumerate(tensors) if write_count(tensor))
            for result in results:
                if isinstance(result, torch.Tensor) and result.requires_grad:
                    raise LongmeshError(
                        "a captured function returned a tensor that needs a gradient, and none flows through a replay; "
                        "take gradients inside (torch.autograd.grad) and return detach()ed results"
                    )
            return [_local(r) for r in results]

        before = get_rng_state()
        copies = [_local(leaf).detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        graph = make_fx(run)(*copies)
        if before != get_rng_state():
            raise LongmeshError(
                "a captured function drew random numbers, and a replay would draw the same ones each time; "
                "draw them outside and pass them in"
            )
        return _Trace(graph, outputs, structure[0], written)


def capture(fn: Callable[Arguments, Result]) -> Captured[Arguments, Result]:
    """Trace `fn` once per layouts, shapes and plain arguments, and replay its local ops and collectives.

    >>> @capture
    ... def mean_square(x):
    ...     return (x * x).mean()
    >>> x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    >>> mean_square(x).item()  # traced; the next call with such a tensor is replayed
    6.0
    """
    return Captured(fn)


def _flatten(value: Any, leaves: list[Any]) -> Any:
    """Append the leaves of `value`; what else there is to it, as a key. As pytree does, at a fraction of its cost."""
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[_flatten(v, leaves) for v in value])
    if kind is dict:
        return (kind, *[(name, _flatten(v, leaves)) for name, v in value.items()])
    if isinstance(value, torch.Tensor) or tree_is_leaf(value):
        leaves.append(value)
        return None
    inner, spec = tree_flatten(value)
    leaves.extend(inner)
    return spec


def _describe_leaf(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        return leaf._tensor_layout, leaf.requires_grad
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), leaf


def _local(value: Any) -> Any:
    return current_part(value) if isinstance(value, DTensor) else value


def _rebuild(leaf: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    if isinstance(leaf, DTensor):
        return _wrap(local, leaf._tensor_layout, leaf.requires_grad)
    return local.requires_grad_(leaf.requires_grad)


def _wrap(local: torch.Tensor, own: TensorLayout, requires_grad: bool) -> DTensor:
    return DTensor(local, own.mesh, own.layout, own.shape, own.stride, requires_grad)
