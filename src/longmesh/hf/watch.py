"""Which models run in a scope, so that none runs unseen: each is looked at before its first step.

A scope is not told which model will be called in it. torch calls a hook before every module's forward; ours acts on
transformers models that it has not looked at yet.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from longmesh.errors import LongmeshError
from longmesh.hf.look import look_at
from longmesh.hf.open_batch import OpenBatch, current_look

# Models that may be cut, and for which kinds of batches that was seen.
_passed: weakref.WeakKeyDictionary[nn.Module, set[tuple[bool, bool]]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def watch_models(batch: OpenBatch) -> Iterator[None]:
    """Look at every transformers model that this thread calls."""
    from transformers import PreTrainedModel

    thread = threading.get_ident()

    def is_model(module: nn.Module) -> bool:
        if torch.compiler.is_compiling() or not isinstance(module, PreTrainedModel):
            return False
        return threading.get_ident() == thread and current_look() is None

    def before(module: nn.Module, args: Any) -> None:
        if is_model(module):
            check(module, batch)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if is_model(module) and getattr(output, "aux_loss", None) is not None:
            raise LongmeshError(
                f"hf.context_parallel: {type(module).__name__} made an auxiliary loss of its router from this rank's "
                "tokens, which is not a share of that of the whole sequence; set output_router_logits=False"
            )

    handles = register_module_forward_pre_hook(before), register_module_forward_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check(model: nn.Module, batch: OpenBatch) -> None:
    """Look at a model, if nobody has for such a batch."""
    kind = (batch.positions is None, batch.padding is not None)
    if kind not in _passed.get(model, ()):
        look_at(model, batch)
        for part in model.modules():
            _passed.setdefault(part, set()).add(kind)
