"""A model that a scope has met: adapted to its batch, with hooks of its own around its outermost calls.

What inspection found of a model is kept for later scopes, and found anew when the model has changed: when a layer was
replaced or added (LoRA), or a forward or the attention implementation is another.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from longmesh.hf.adaptation import Adaptation, adapt
from longmesh.hf.call_checks import (
    named_arguments,
    refuse_compiled_layers,
    refuse_loss,
    refuse_options,
    refuse_other_terms,
    refuse_positions,
    refuse_zero_padding,
)
from longmesh.hf.fusing import FusingState
from longmesh.hf.gather import warn_of_memory
from longmesh.hf.inspection import inspect_model
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.positions import padding_id
from longmesh.hf.private import implementation_of
from longmesh.hf.router import share_router_loss
from longmesh.hf.state import current, set_state

if TYPE_CHECKING:
    from longmesh.hf.cut import CutState

# Whether the batch has positions, padding, whether layers may be gathered, and the attention implementation.
Kind = tuple[bool, bool, bool, str | None]


@dataclass
class _Known:
    """What was found of a model while it was made of these `modules`. `has_known_loss`: its loss was compared with its
    cross entropy, once: that reads numbers."""

    modules: tuple[Any, ...]
    adaptations: dict[Kind, Adaptation] = field(default_factory=dict)
    has_known_loss: bool = False


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def _known_of(model: nn.Module) -> _Known:
    modules = tuple(
        (name, id(module), type(module), id(vars(module).get("forward")))
        for name, module in model.named_modules()
    )
    found = _known.get(model)
    if found is None or found.modules != modules:
        found = _known[model] = _Known(modules)
    return found


def _adaptation_of(
    model: nn.Module, known: dict[Kind, Adaptation], batch: OpenBatch, gather: bool
) -> Adaptation:
    """How to run this model on such a batch, looked up or found."""
    planned = current().planned
    if planned is not None:
        return planned
    kind = (batch.has_positions, batch.padding is not None, gather, implementation_of(model))
    if kind not in known:
        known[kind] = inspect_model(model, batch, gather)
        gathered = known[kind].of_class(model, known[kind].gathered)
        if gathered:
            warn_of_memory(model, gathered, batch)
    return known[kind]


class BoundModel:
    """A model in a scope. Its hooks act on outermost calls: a model inside another runs as a part of that."""

    def __init__(self, state: CutState, model: nn.Module, batch: OpenBatch) -> None:
        self._state, self._model, self._batch = state, model, batch
        refuse_compiled_layers(model)
        refuse_zero_padding(model, batch)
        self._known = _known_of(model)  # before it is adapted
        self.adaptation = _adaptation_of(model, self._known.adaptations, batch, state.may_gather)

    def begin(self) -> None:
        """The model is called."""
        state, batch = self._state, self._batch
        if state.running is not None or current() is not state:
            return
        batch.count_positions(self.adaptation.rule, padding_id(self._model))
        state.running = self._model
        if batch.features:
            set_state(FusingState(state))
        if batch.loss is not None:
            batch.loss.enter_model()

    def end(self, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """The model returns, or has raised: then without an output."""
        state, batch, model = self._state, self._batch, self._model
        if state.running is not model:
            return None
        state.running = None
        set_state(state)
        if batch.loss is not None:
            batch.loss.in_model = False
        if output is None:
            return None
        given = named_arguments(model, args, kwargs)
        refuse_options(model, given, batch)
        refuse_positions(model, given, batch)
        if batch.loss is not None:
            batch.loss.see_log_probs(output)
        refuse_loss(model, given, output, batch)
        if not self._known.has_known_loss and state.planned is None:
            refuse_other_terms(model, given, output, batch)
            self._known.has_known_loss = True
        output = without_cache(output)
        return share_router_loss(model, output, batch) or output


@contextlib.contextmanager
def bind_model(state: CutState, model: nn.Module, batch: OpenBatch) -> Iterator[BoundModel]:
    """Adapt a model to the batch of a scope as long as this is open."""
    bound = BoundModel(state, model, batch)

    def after(module: nn.Module, args: Any, *rest: Any) -> Any:
        # torch leaves kwargs out where a model has raised.
        return bound.end(args, *(rest if len(rest) == 2 else ({}, None)))

    def before(module: nn.Module, args: Any) -> None:
        bound.begin()

    def share(module: nn.Module, args: Any, output: Any) -> Any:
        return None if state.running is None else share_router_loss(module, output, batch)

    with adapt(model, bound.adaptation, batch) as undo:
        hooks = [
            model.register_forward_pre_hook(before),
            model.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        hooks += [part.register_forward_hook(share) for part in _models_inside(model)]
        for hook in hooks:
            undo.callback(hook.remove)
        model.__dict__["longmesh_state"] = state
        undo.callback(model.__dict__.pop, "longmesh_state", None)
        yield bound


def _models_inside(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if part is not model and hasattr(part, "get_input_embeddings")]


def without_cache(output: Any) -> Any:
    """A model's output without the cache that it fills by default: it holds this rank's tokens only."""
    if not isinstance(output, dict) or output.get("past_key_values") is None:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "past_key_values"})
