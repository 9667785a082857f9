"""A layer run on the whole sequence, for layers that can't be run on a part of it: unknown="gather".

    this rank's tokens --all-gather--> all tokens, in order --the layer--> all tokens --take--> this rank's tokens

Every rank computes the whole layer. Its gradients are gathered as well, so each rank differentiates the whole layer,
too; they are divided by the number of ranks on the way in and multiplied on the way out, so that parameter gradients,
which users add up over ranks, count once.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from longmesh._torch import tree_leaves
from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.errors import LongmeshError
from longmesh.hf.mask_functions import dense
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.private import with_implementation
from longmesh.hf.state import MaskRequest, OutsideState, PlainState, current, entered


class GatheredState(PlainState):
    """A layer, or a loss, runs on the whole sequence: masks and positions are those of all tokens."""

    def mask(self, request: MaskRequest) -> Any:
        return self.outer.whole_mask(request)

    def positions(self) -> Tensor | None:
        return self.outer.whole_positions()

    def mean(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return func(*args, **kwargs)

    def cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return torch.nn.functional.cross_entropy(*args, **kwargs)


def as_whole() -> contextlib.AbstractContextManager[None]:
    """What runs inside is given what all ranks hold together."""
    return entered(GatheredState(current()))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, engine: ContextParallel, dim: int) -> Tensor:
        ctx.engine, ctx.dim = engine, dim
        return engine.unshard(part, dim).contiguous()  # as in one process: layers take views of it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.engine.shard(grad, ctx.dim) * ctx.engine.plan.num_ranks, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, engine: ContextParallel, dim: int) -> Tensor:
        ctx.engine, ctx.dim = engine, dim
        return engine.shard(whole, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.engine.unshard(grad.contiguous(), ctx.dim) / ctx.engine.plan.num_ranks, None, None


def gather_layer(module: nn.Module) -> Callable[[], None]:
    """Let a module run on the whole sequence. Returns what undoes it."""
    forward = module.forward
    had_own = "forward" in module.__dict__

    def gathered(*args: Any, **kwargs: Any) -> Any:
        return current().run_gathered(module, forward, args, kwargs)

    module.forward = gathered

    def undo() -> None:
        if had_own:
            module.forward = forward
        else:
            del module.forward

    return undo


def warn_of_memory(model: nn.Module, modules: list[tuple[str, nn.Module]], batch: OpenBatch) -> None:
    classes = sorted({type(module).__name__ for _, module in modules})
    warnings.warn(
        f"hf.context_parallel(unknown='gather'): {len(modules)} of {type(model).__name__}'s layers "
        f"({', '.join(classes)}) run on the whole sequence of {batch.length} tokens on every rank, with the "
        "memory and time of one process",
        stacklevel=3,
    )


def run_each_token(
    state: OutsideState, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """A gathered layer while its model is inspected: on each token alone."""
    _check_shapes(module, state.num_tokens, (args, kwargs))
    with entered(GatheredState(state)), with_implementation(module, "eager"):
        return _each_token(forward, args, kwargs, state.num_tokens)


def run_whole(
    batch: OpenBatch,
    state: GatheredState,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A layer on the whole sequence, and this rank's part of what it makes. Collective."""
    refuse_reentrant_checkpoint()
    engine, tokens = batch.cut.lead, batch.cut.num_tokens
    has_mask = any(isinstance(value, CutMask) for value in (*args, *kwargs.values()))
    if not has_mask and (batch.is_packed or batch.padding is not None):
        has_positions = kwargs.get("position_ids") is not None
        raise LongmeshError(
            f"hf.context_parallel(unknown='gather'): {type(module).__name__} gets "
            f"{'position_ids and no mask' if has_positions else 'no mask'}, so it is not known whether it keeps "
            f"{'documents of a row apart' if batch.is_packed else 'tokens from seeing padding'}; pass one document per "
            "row, without padding"
        )

    def gather(value: Any) -> Any:
        if isinstance(value, CutMask):
            return dense(value.mask, batch)
        if isinstance(value, Tensor):
            dim = _token_dim(value, tokens)
            return value if dim is None else _Gather.apply(value, engine, dim)
        return _map(gather, value)

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            dim = _token_dim(value, engine.plan.seq_len)
            return value if dim is None else _Take.apply(value, engine, dim)
        return _map(take, value)

    given, named = gather(args), gather(kwargs)
    # As in one process: what a layer makes of masks, sinks or biases by itself, it does for eager attention.
    try:
        with entered(state), with_implementation(module, "eager"), _drawing_alike(module, batch):
            out = forward(*given, **named)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        advice = "; give one row, or one document a row" if batch.is_packed and batch.rows > 1 else ""
        raise LongmeshError(
            f"hf.context_parallel(unknown='gather'): {type(module).__name__} does not run on the whole sequence of "
            f"this batch ({error}){advice}"
        ) from error
    return take(out)


@contextlib.contextmanager
def _drawing_alike(module: nn.Module, batch: OpenBatch) -> Iterator[None]:
    """Dropout in a layer that every rank computes whole: each differentiates what all have computed. Collective."""
    if not module.training:
        yield
        return
    device = batch.tokens.device
    seed = batch.cut.common_seed()
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if is_cpu else [device], device_type="cuda" if is_cpu else device.type):
        torch.manual_seed(seed)
        yield


def _check_shapes(module: nn.Module, tokens: int, given: Any) -> None:
    """Raise for what can't be gathered: tensors made from the number of tokens, such as a table of 2 * tokens relative
    positions, and those with tokens in another dim. `tokens` is that of an inspection: no other size of the model."""
    made = {2 * tokens, 2 * tokens - 1, 2 * tokens + 1, tokens + 1}
    for value in tree_leaves(given):
        if not isinstance(value, Tensor) or isinstance(value, CutMask):
            continue
        dim, shape = _token_dim(value, tokens), tuple(value.shape)
        if (dim is None and made & set(shape)) or shape.count(tokens) > (dim is not None):
            raise LongmeshError(
                f"hf.context_parallel(unknown='gather'): {type(module).__name__} is given a tensor of {shape}, made "
                f"from this rank's {tokens} tokens in a way that can't be gathered"
            )


def _each_token(forward: Callable[..., Any], args: Any, kwargs: Any, tokens: int) -> Any:
    """While a model is inspected: the module on each token alone."""

    def only(at: int) -> Callable[[Any], Any]:
        def pick(value: Any) -> Any:
            if isinstance(value, Tensor):
                if isinstance(value, CutMask):
                    return torch.zeros(value.shape[0], 1, 1, 1, device=value.device)
                dim = _token_dim(value, tokens)
                return value if dim is None else value.narrow(dim, at, 1)
            return _map(pick, value)

        return pick

    outs = [forward(*only(at)(args), **only(at)(kwargs)) for at in range(tokens)]
    return _joined(outs)


def _joined(outs: list[Any]) -> Any:
    first = outs[0]
    if isinstance(first, Tensor):
        dim = next((d for d in (1, 2, 0) if d < first.ndim and first.shape[d] == 1), None)
        return first if dim is None or first.ndim < 2 else torch.cat(outs, dim=dim)
    if isinstance(first, dict):
        joined = {key: _joined([out[key] for out in outs]) for key in first}
        return type(first)(**joined) if type(first) is not dict else joined
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(items)) for items in zip(*outs, strict=True))
    return first


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        found = {key: function(item) for key, item in value.items()}
        return type(value)(**found) if type(value) is not dict else found
    if type(value) in (list, tuple):
        return type(value)(function(item) for item in value)
    return value


def _token_dim(value: Tensor, tokens: int) -> int | None:
    """The dim of the tokens: behind the batch, before the features."""
    return next((d for d in (1, 2, 0) if d < value.ndim and value.shape[d] == tokens), None)
