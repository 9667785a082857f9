"""What is done to a model inside a scope, and undone after it: hooks and forwards of single modules, no patches.

An `Adaptation` is found by inspecting a model (inspection.py) and holds for all its steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.hf import alibi, positions, rope, scores
from longmesh.hf.call_checks import check_inputs
from longmesh.hf.cut_at_decoder import cut_at_decoder
from longmesh.hf.gather import run_gathered
from longmesh.hf.mixers.bind import bind_mixer, is_mixer
from longmesh.hf.open_batch import OpenBatch, current_inspection, is_fusing, is_whole

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

    def local_positions() -> Tensor | None:
        inspection = current_inspection()
        if is_fusing() or (is_whole() and (inspection is not None or not batch.has_positions)):
            return None  # a module that sees all tokens counts them by itself
        if inspection is not None:
            return None if inspection.positions is None else inspection.positions.expand(inspection.rows, -1)
        return batch.positions if is_whole() else batch.local_positions

    def longest() -> int:
        return int(batch.positions.max())

    if batch.features:
        undo.callback(cut_at_decoder(model, batch))
    else:
        undo.callback(check_inputs(model, batch))
    for module in model.modules():
        if is_mixer(module):
            undo.callback(bind_mixer(module))
            undo.callback(module.register_forward_pre_hook(_refuse_reentrant).remove)
        if positions.counts_by_itself(module):
            for handle in positions.give_positions(module, local_positions):
                undo.callback(handle.remove)
        if positions.scales_by_place(module):
            undo.callback(setattr, module, _TEMPERED, getattr(module, _TEMPERED))
            setattr(module, _TEMPERED, False)
            batch.tempered.add(module)
            undo.callback(batch.tempered.discard, module)
        if rope.depends_on_length(module):
            for handle in rope.give_length(module, longest):
                undo.callback(handle.remove)
        undo.callback(alibi.give_bias(module, batch))
    for _, module in adaptation.of_class(model, adaptation.scores):
        for handle in (
            module.register_forward_pre_hook(_switch(True)),
            module.register_forward_hook(_switch(False), always_call=True),
        ):
            undo.callback(handle.remove)
    for name, module in adaptation.of_class(model, adaptation.gathered):
        undo.callback(run_gathered(module, name, batch))
    return undo


def _refuse_reentrant(*args: Any) -> None:
    refuse_reentrant_checkpoint()


def _switch(on: bool) -> Callable[..., None]:
    def switch(*args: Any) -> None:
        scores.set_recognised(on and not is_whole())

    return switch
