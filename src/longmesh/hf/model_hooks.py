"""Which models run in a scope, so that none runs unseen: each is inspected before its first step.

A scope is not told which model will be called in it. torch calls a hook before every module's forward; ours acts on the
outermost transformers model. What it found is kept, so later steps only put it to work.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from longmesh._torch import compiled_module, runs_compiled
from longmesh._torch.process_wide import watch_modules
from longmesh.hf.adaptation import Adaptation, adapt
from longmesh.hf.call_checks import (
    named_arguments,
    refuse_compiled,
    refuse_compiled_layers,
    refuse_loss,
    refuse_options,
    refuse_other_terms,
    refuse_positions,
    refuse_zero_padding,
)
from longmesh.hf.gather import warn_of_memory
from longmesh.hf.inspection import inspect_model
from longmesh.hf.open_batch import OpenBatch, current_inspection, set_fusing
from longmesh.hf.planning import planned_adaptation
from longmesh.hf.positions import padding_id
from longmesh.hf.private import implementation_of
from longmesh.hf.router import share_router_loss

Kind = tuple[bool, bool, bool, str | None]
# What was found for a model, by whether the batch has positions, padding, whether layers may be gathered, and the
# attention implementation.
_found: weakref.WeakKeyDictionary[nn.Module, dict[Kind, Adaptation]] = weakref.WeakKeyDictionary()
# Models whose loss was compared with its cross entropy, once: that reads numbers.
_has_known_loss: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def watch_models(batch: OpenBatch, gather: bool) -> Iterator[None]:
    """Inspect every transformers model that this thread calls, and adapt it as long as this is open."""
    from transformers import PreTrainedModel

    thread = threading.get_ident()
    prepared: dict[nn.Module, None] = {}
    outermost: list[nn.Module] = []

    def is_ours(module: nn.Module) -> bool:
        if torch.compiler.is_compiling() or not isinstance(module, PreTrainedModel):
            return False
        return threading.get_ident() == thread and current_inspection() is None

    def before(module: nn.Module, args: Any) -> None:
        compiled = compiled_module(module)
        if isinstance(compiled, PreTrainedModel):
            refuse_compiled(compiled)
        if isinstance(module, PreTrainedModel) and runs_compiled():
            refuse_compiled(module)
        is_first = is_ours(module) and not outermost
        if is_ours(module):
            outermost.append(module)
        if is_first:
            if module not in prepared:
                refuse_compiled_layers(module)
            refuse_zero_padding(module, batch)
            adaptation = adaptation_of(module, batch, gather)
            batch.count_positions(adaptation.rule, padding_id(module))
            if module not in prepared:
                prepared[module] = None
                undo.push(adapt(module, adaptation, batch))
            batch.in_model = True
            set_fusing(bool(batch.features))
            if batch.loss is not None:
                batch.loss.enter_model()

    def after(module: nn.Module, args: Any, *rest: Any) -> Any:
        if not is_ours(module) or module not in outermost:  # refused before it ran
            return None
        # torch leaves kwargs out where a model has raised.
        kwargs, output = rest if len(rest) == 2 else ({}, None)
        outermost.pop()
        if not outermost:
            batch.in_model = False
            set_fusing(False)
            if batch.loss is not None:
                batch.loss.in_model = False
            if output is not None:
                given = named_arguments(module, args, kwargs)
                refuse_options(module, given, batch)
                refuse_positions(module, given, batch)
                if batch.loss is not None:
                    batch.loss.see_log_probs(output)
                refuse_loss(module, given, output, batch)
                if module not in _has_known_loss and planned_adaptation() is None:
                    refuse_other_terms(module, given, output, batch)
                    _has_known_loss.add(module)
                output = without_cache(output)
        return share_router_loss(module, output, batch) or output

    with contextlib.ExitStack() as undo:
        undo.callback(watch_modules(before, after, with_kwargs=True))
        yield


def without_cache(output: Any) -> Any:
    """A model's output without the cache that it fills by default: it holds this rank's tokens only."""
    if not isinstance(output, dict) or output.get("past_key_values") is None:
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "past_key_values"})


def adaptation_of(model: nn.Module, batch: OpenBatch, gather: bool) -> Adaptation:
    """How to run this model on such a batch, looked up or found."""
    planned = planned_adaptation()
    if planned is not None:
        return planned
    kind = (batch.has_positions, batch.padding is not None, gather, implementation_of(model))
    known = _found.setdefault(model, {})
    if kind not in known:
        known[kind] = inspect_model(model, batch, gather)
        gathered = known[kind].of_class(model, known[kind].gathered)
        if gathered:
            warn_of_memory(model, gathered, batch)
    return known[kind]
