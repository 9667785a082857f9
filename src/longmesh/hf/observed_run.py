"""A run of a model on a few tokens, with what goes into and comes out of every module."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longmesh._torch import own_buffers
from longmesh.errors import LongmeshError
from longmesh.hf.open_batch import Inspection, set_inspection


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
    run, entered = Run(rows), []
    names = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        entered.append(module)

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        entered.pop()
        run.calls.append(Call(names[module], module, _tensors((args, kwargs)), _tensors(output)))

    handles = [module.register_forward_hook(leave, with_kwargs=True) for module in names]
    handles += [module.register_forward_pre_hook(enter) for module in names]
    set_inspection(Inspection(tokens, rows, given.get("position_ids")))
    try:
        output = model(**_accepted(model, {**given, "use_cache": False}))
    except Exception as error:
        inner = entered[-1] if entered else model
        why = str(error) if isinstance(error, LongmeshError) else f"{type(error).__name__}: {error}"
        raise CannotRun(inner, names[inner], why) from error
    finally:
        set_inspection(None)
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
