"""What is done to a model inside a scope, and undone after it: hooks and forwards of single modules, no patches.

An `Adaptation` is found by inspecting a model (inspection.py) and holds for all its steps.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import nn

from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.hf import alibi, positions
from longmesh.hf.call_checks import check_inputs
from longmesh.hf.fusing import cut_at_decoder
from longmesh.hf.gather import gather_layer
from longmesh.hf.mixers.bind import bind_mixer, is_mixer
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.scores import recognise_scores
from longmesh.hf.state import current

_TEMPERED = "attn_temperature_tuning"


@dataclass(frozen=True)
class Adaptation:
    """`rule`: how the model counts positions. `scores`: classes of modules that compute attention by themselves.
    `gathered`: classes of modules that run on the whole sequence."""

    rule: positions.Rule = positions.counted
    scores: frozenset[type] = frozenset()
    gathered: frozenset[type] = frozenset()

    def of_class(self, model: nn.Module, classes: frozenset[type]) -> list[tuple[str, nn.Module]]:
        return [(name, module) for name, module in model.named_modules() if type(module) in classes]


def adapt(model: nn.Module, adaptation: Adaptation, batch: OpenBatch) -> ExitStack:
    """Prepare a model for this batch. Closing what is returned leaves it as it was."""
    if any(map(is_mixer, model.modules())):
        batch.recurrent(through_padding=True)  # raises before anything runs if tokens are not in order
    undo = ExitStack()

    def longest() -> int:
        return int(batch.positions.max())

    if batch.features:
        undo.callback(cut_at_decoder(model, batch))
    else:
        undo.callback(check_inputs(model))
    for module in model.modules():
        if is_mixer(module):
            undo.callback(bind_mixer(module))
            undo.callback(module.register_forward_pre_hook(_refuse_reentrant).remove)
        if positions.counts_by_itself(module):
            for handle in positions.give_positions(module, lambda: current().positions()):
                undo.callback(handle.remove)
        if positions.scales_by_place(module):
            undo.callback(setattr, module, _TEMPERED, getattr(module, _TEMPERED))
            setattr(module, _TEMPERED, False)
            batch.tempered.add(module)
            undo.callback(batch.tempered.discard, module)
        if positions.depends_on_length(module):
            for handle in positions.give_length(module, longest):
                undo.callback(handle.remove)
        undo.callback(alibi.give_bias(module, batch))
    for _, module in adaptation.of_class(model, adaptation.scores):
        undo.callback(recognise_scores(module))
    for _, module in adaptation.of_class(model, adaptation.gathered):
        undo.callback(gather_layer(module))
    return undo


def _refuse_reentrant(*args: Any) -> None:
    refuse_reentrant_checkpoint()
