"""A run of a model on a few tokens, with what goes into and comes out of every module."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longmesh._torch import own_buffers
from longmesh.attention import masks
from longmesh.errors import LongmeshError
from longmesh.hf.gather import run_each_token
from longmesh.hf.mask_functions import mask_of
from longmesh.hf.score_ops import Attention, CutBias
from longmesh.hf.state import AttentionRequest, MaskRequest, NestedState, OutsideState, current, entered
from longmesh.recurrent import RecurrentParallel


class InspectingState(NestedState):
    """A model is only inspected: every answer depends on all of a token, and on no other token.

    `positions`: those that the model was given, if any.
    """

    def __init__(self, outer: OutsideState, rows: int, tokens: int, positions: Tensor | None) -> None:
        super().__init__(outer)
        self.rows, self.num_tokens, self._positions = rows, tokens, positions
        self.is_rehearsal = True

    def meet(self, model: nn.Module) -> None:
        pass

    def check_inputs(self, model: nn.Module, given: dict[str, Any]) -> None:
        pass

    def attend(self, request: AttentionRequest) -> tuple[Tensor, None]:
        assert self.batch is not None, "models are inspected in a scope"
        if self.batch.is_outside(request.module):
            return request.by_sdpa()
        request.refuse_unknown()
        return token_by_token(request.query, request.key, request.value).transpose(1, 2).contiguous(), None

    def attend_written(self, asked: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return token_by_token(q, k, v)

    def sdpa(self, *args: Any, **kwargs: Any) -> Tensor:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        return token_by_token(given["query"], given["key"], given["value"])

    def mask(self, request: MaskRequest) -> Any:
        return request.stand_in(mask_of(request.function, self))

    def whole_mask(self, request: MaskRequest) -> Any:
        return self.mask(request)

    def block_mask(self, local: Tensor) -> masks.Mask:
        return masks.full()

    def positions(self) -> Tensor | None:
        return None if self._positions is None else self._positions.expand(self.rows, -1)

    def whole_positions(self) -> Tensor | None:
        return None

    def bias(self, whole: Callable[[], Tensor], own: Callable[[], Tensor]) -> Tensor:
        made = whole()
        return CutBias.of(made, (*made.shape[:-1], self.num_tokens))

    def recurrence(self, *, through_padding: bool = False, whole: bool = False) -> RecurrentParallel:
        """Each token is a document. A layer that is gathered is given one token at a time."""
        tokens = 1 if whole else self.num_tokens
        return RecurrentParallel(None, seq_len=tokens, documents=[[1] * tokens] * self.rows)

    def run_gathered(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return run_each_token(self, layer, forward, args, kwargs)

    def mean(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return func(*args, **kwargs)

    def cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return torch.nn.functional.cross_entropy(*args, **kwargs)


def token_by_token(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In place of attention: depends on q, k and v of each token, and on no other token."""
    heads = query.shape[1] // key.shape[1]
    weight = query.float().sum(-1) + 2 * key.float().sum(-1).repeat_interleave(heads, 1)
    return value.repeat_interleave(heads, 1) * (1 + weight.tanh()).to(value.dtype)[..., None]


@dataclass
class Call:
    """One call of a module: its tensors."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


@dataclass
class Run:
    """`results`: what the model returned, by name or place."""

    rows: int
    calls: list[Call] = field(default_factory=list)
    results: dict[str, list[Tensor]] = field(default_factory=dict)


class CannotRun(Exception):
    """Where a model can't be run on a few tokens, and why."""

    def __init__(self, module: nn.Module, name: str, why: str) -> None:
        super().__init__(f"does not run on a few tokens alone: {why}")
        self.module, self.name = module, name


@contextlib.contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout, and afterwards the model and torch's random numbers as they were."""
    training = {module: module.training for module in model.modules()}
    buffers = {module: dict(own_buffers(module)) for module in model.modules()}
    # Rotary embeddings keep the longest length that they have seen.
    numbers = {
        module: {name: value for name, value in vars(module).items() if isinstance(value, (int, float))}
        for module in model.modules()
        if hasattr(module, "rope_type")
    }
    state = torch.random.get_rng_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, was in training.items():
            own_buffers(module).update(buffers[module])
            vars(module).update(numbers.get(module, {}))
            module.training = was
        torch.random.set_rng_state(state)


def observe(model: nn.Module, given: dict[str, Tensor]) -> Run:
    """Run the model, with attention that sees each token alone."""
    rows, tokens = next(iter(given.values())).shape[:2]
    run, running = Run(rows), list[nn.Module]()
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        running.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        running.pop()
        run.calls.append(Call(names[module], module, _tensors((args, kwargs)), _tensors(output)))

    handles = [module.register_forward_hook(leave, with_kwargs=True) for module in names]
    handles += [module.register_forward_pre_hook(enter) for module in names]
    state = InspectingState(current(), rows, tokens, given.get("position_ids"))
    try:
        with entered(state):
            output = model(**_accepted(model, {**given, "use_cache": False}))
    except Exception as error:
        inner = running[-1] if running else model
        why = str(error) if isinstance(error, LongmeshError) else f"{type(error).__name__}: {error}"
        raise CannotRun(inner, names[inner], why) from error
    finally:
        for handle in handles:
            handle.remove()
    run.results = _results(output)
    return run


def _results(output: Any) -> dict[str, list[Tensor]]:
    named = output
    if not isinstance(output, dict):
        named = dict(enumerate(output if isinstance(output, (list, tuple)) else [output]))
    return {str(name): _tensors(value) for name, value in named.items()}


def _accepted(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach().clone()] if type(value) in (Tensor, nn.Parameter) else []
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in _tensors(item)]
    return []
