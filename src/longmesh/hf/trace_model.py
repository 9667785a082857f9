"""Tracing a transformers model: one layer of each kind runs without values as one rank, and is recorded.

    config -> the model on torch's meta device -> one layer of each kind -> hollow parameters -> forward, backward

Only shapes exist, so a model of any size is traced in a second on any machine. The process becomes a rank of a world
that sends nothing (`fake_rank`), so this runs where no world is: in the command's own process, or in a helper's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from longmesh.comm.groups import AxisGroup
from longmesh.comm.record import CommEvent, CommObserver, observe_comm
from longmesh.hf.adaptation import Adaptation
from longmesh.hf.causal_head import tiled_loss
from longmesh.hf.interface import register
from longmesh.hf.layer_kinds import Kinds, copy_config, find_kinds, keep_one_of_each
from longmesh.hf.mixers.bind import is_mixer
from longmesh.hf.model_hooks import adaptation_of
from longmesh.hf.planning import planning
from longmesh.hf.scope import context_parallel
from longmesh.hf.small_config import small_config
from longmesh.step.record import Place, Recorder, mark_module
from longmesh.step.summarize import SectionFacts, summarize
from longmesh.step.trace import ModelTrace
from longmesh.testing.device import DEVICE, hollow

_VOCABULARY = 61  # of the tokens of a batch: none of them is looked up


def trace_hollow(
    config: Any, dtype: torch.dtype, sizes: Sequence[int], ranks: int, adaptation: Adaptation, loss: str
) -> list[ModelTrace]:
    """What one rank computes, saves and sends, for each of several numbers of tokens of its own, of a sequence cut over
    `ranks`. Inside `fake_rank`."""
    model, kinds = make_hollow(config, dtype)
    return [_trace(config, model, kinds, tokens * ranks, ranks, adaptation, loss) for tokens in sizes]


def inspect_small(config: Any, ranks: int) -> Adaptation:
    """How the family runs over a cut sequence: found on a small model with values."""
    from transformers import AutoModelForCausalLM

    register()
    with quiet_warnings():
        model = AutoModelForCausalLM.from_config(small_config(config), attn_implementation="longmesh")
        keep_one_of_each(model, find_kinds(model))
    mesh = init_device_mesh("cpu", (ranks,))
    found: list[Adaptation] = []
    batch = make_batch(16 * ranks)
    with context_parallel(mesh, batch, model=model) as part, torch.no_grad(), quiet_warnings():
        model(**part, use_cache=False)
        from longmesh.hf.open_batch import current_batch

        here = current_batch()
        assert here is not None
        found.append(adaptation_of(model, here, False))
    return found[0]


def make_batch(tokens: int) -> dict[str, Any]:
    """One row of tokens, each its own label."""
    ids = torch.arange(tokens)[None] % _VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}


def make_hollow(config: Any, dtype: torch.dtype) -> tuple[Any, Kinds]:
    """The model with one layer of each kind and no values, and its kinds."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quiet_warnings():
        model = AutoModelForCausalLM.from_config(
            copy_config(config), attn_implementation="longmesh", dtype=dtype
        )
    kinds = find_kinds(model)
    keep_one_of_each(model, kinds)
    # By the parameters themselves, so that tied ones stay tied.
    made = {p: nn.Parameter(hollow(p.detach()), requires_grad=p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, made[p])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, hollow(buffer))
    return model.train(), kinds


class _Messages(CommObserver):
    """Collectives of layers besides those of attention."""

    def __init__(self, recorder: Recorder) -> None:
        self.found: list[tuple[Place, bool, CommEvent]] = []
        self._recorder = recorder

    def on_collective(self, event: CommEvent, group: AxisGroup) -> None:
        if not self._recorder.is_attending:
            self.found.append((self._recorder.place, self._recorder.is_backward, event))


def _trace(
    config: Any, model: Any, kinds: Kinds, seq_len: int, ranks: int, adaptation: Adaptation, loss: str
) -> ModelTrace:
    mesh = init_device_mesh(DEVICE, (ranks,))
    batch = make_batch(seq_len)
    layout = "zigzag"
    for warm in (True, False):  # the first step compares ranks and makes groups; the next ones are alike
        model.zero_grad(set_to_none=True)
        recorder = Recorder(DEVICE)
        parameters = {recorder.number_of(p) for p in model.parameters()}
        messages = _Messages(recorder)
        with planning(adaptation), quiet_warnings(), context_parallel(mesh, batch, model=model) as part:
            with _marked_layers(recorder, kinds.layers), observe_comm(messages), recorder.forward():
                out = tiled_loss(model, part) if loss == "tiled" else model(**part, use_cache=False).loss
            with observe_comm(messages), recorder.backward():
                out.backward()
        del out, part
        if warm:
            continue
        gradients = {recorder.number_of(p.grad) for p in model.parameters() if p.grad is not None}
        layout = "ordered" if any(map(is_mixer, model.modules())) else layout
    text = config.get_text_config()
    sections = [
        _facts(layer, number, count, text)
        for number, (layer, count) in enumerate(zip(kinds.layers, kinds.counts, strict=True))
    ]
    inside = {id(p) for p in kinds.layers.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    sections.insert(0, SectionFacts("outside the layers", 1, rest, 0, 0, 0.0))
    traced = [
        summarize(recorder, i, facts, parameters, gradients, messages.found)
        for i, facts in enumerate(sections)
    ]
    itemsize = next(model.parameters()).element_size()
    return ModelTrace(
        getattr(config, "model_type", "model"),
        seq_len // ranks,
        traced[0],
        tuple(traced[1:]),
        text.hidden_size,
        itemsize,
        layout,
    )


@contextlib.contextmanager
def _marked_layers(recorder: Recorder, layers: nn.ModuleList) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for number, layer in enumerate(layers, start=1):
            undo.push(mark_module(recorder, layer, Place(number, False)))
            for block in blocks_of(layer):
                undo.push(mark_module(recorder, block, Place(number, True)))
        yield


def blocks_of(layer: nn.Module) -> list[nn.Module]:
    """Attention and MLP blocks: the parts of a layer that have matrices."""
    return [part for part in layer.children() if any(p.ndim >= 2 for p in part.parameters())]


def _facts(layer: nn.Module, number: int, count: int, config: Any) -> SectionFacts:
    experts = sum(p.numel() for p in layer.parameters() if p.ndim == 3)
    total = sum(p.numel() for p in layer.parameters())
    kind = (
        getattr(layer, "attention_type", None) or getattr(layer, "layer_type", None) or type(layer).__name__
    )
    top_k = float(getattr(config, "num_experts_per_tok", 0) or 0) if experts else 0.0
    return SectionFacts(f"{kind}", count, total, experts, len(blocks_of(layer)), top_k)


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
