"""Tracing a transformers model: one layer of each kind runs without values as one rank, and is recorded.

    config -> the model on torch's meta device -> one layer of each kind -> hollow parameters -> forward, backward

Only shapes exist, so a model of any size is traced in a second on any machine. The process becomes a rank of a world
that sends nothing (`fake_rank`), so this runs where no world is: in the command's own process, or in a helper's.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from longmesh.comm.groups import AxisGroup
from longmesh.comm.record import CommEvent, CommObserver, observe_comm
from longmesh.hf.adaptation import Adaptation
from longmesh.hf.causal_head import tiled_loss
from longmesh.hf.cut import CutState
from longmesh.hf.interface import register
from longmesh.hf.layer_kinds import Kinds, copy_config, find_kinds, keep_one_of_each
from longmesh.hf.mixers.bind import is_mixer
from longmesh.hf.planning import planning
from longmesh.hf.scope import context_parallel
from longmesh.hf.small_config import small_config
from longmesh.hf.state import current
from longmesh.step.record import Place, Recorder, mark_module
from longmesh.step.summarize import SectionFacts, summarize
from longmesh.step.trace import ModelTrace
from longmesh.testing.device import DEVICE, hollow

_VOCABULARY = 61  # of the tokens of a batch: none of them is looked up


def trace_hollow(
    config: Any, dtype: torch.dtype, sizes: Sequence[int], ranks: int, adaptation: Adaptation, loss: str, *,
    every_layer: bool = False,
) -> list[ModelTrace]:  # fmt: skip
    """What one rank computes, saves and sends, for each of several numbers of tokens of its own, of a sequence cut over
    `ranks`. `every_layer`: each layer is a kind of its own. Inside `fake_rank`."""
    model, kinds = make_hollow(config, dtype, every_layer)
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
        state = current()
        assert isinstance(state, CutState), "the scope is open"
        found.append(state.adaptation_of(model))
    return found[0]


def make_batch(tokens: int) -> dict[str, Any]:
    """One row of tokens, each its own label."""
    ids = torch.arange(tokens)[None] % _VOCABULARY
    return {"input_ids": ids, "labels": ids.clone()}


def make_hollow(config: Any, dtype: torch.dtype, every_layer: bool = False) -> tuple[Any, Kinds]:
    """The model with one layer of each kind, or all of them, and no values, and its kinds."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"), quiet_warnings():
        model = AutoModelForCausalLM.from_config(
            copy_config(config), attn_implementation="longmesh", dtype=dtype
        )
    kinds = find_kinds(model)
    if every_layer:
        count = len(kinds.layers)
        kinds = Kinds(kinds.layers, tuple(range(count)), (1,) * count)
    keep_one_of_each(model, kinds)
    return empty(model), kinds


def empty(model: nn.Module) -> nn.Module:
    """The model on the made-up device, without values."""
    # By the parameters themselves, so that tied ones stay tied.
    made = {p: nn.Parameter(hollow(p.detach()), requires_grad=p.requires_grad) for p in model.parameters()}
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, made[p])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, hollow(buffer))
    return model.train()


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

    @contextlib.contextmanager
    def scope() -> Iterator[Callable[[], Tensor]]:
        with planning(adaptation), quiet_warnings(), context_parallel(mesh, batch, model=model) as part:
            if loss == "tiled":
                yield lambda: tiled_loss(model, part)
            else:
                yield lambda: model(**part, use_cache=False).loss

    text = config.get_text_config()
    facts = ModuleFacts(
        name=getattr(config, "model_type", "model"),
        hidden=text.hidden_size,
        top_k=float(getattr(text, "num_experts_per_tok", 0) or 0),
        layout="ordered" if any(map(is_mixer, model.modules())) else "zigzag",
    )
    return trace_module(model, kinds, scope, seq_len // ranks, ranks, facts)


class ModuleFacts(NamedTuple):
    """What a recording does not tell of a model: features between layers, experts per token, and how attention's
    tokens are laid out."""

    name: str
    hidden: int
    top_k: float = 0.0
    layout: str = "zigzag"


def trace_module(
    model: nn.Module,
    kinds: Kinds,
    scope: Callable[[], AbstractContextManager[Callable[[], Tensor]]],
    tokens: int,
    ranks: int,
    facts: ModuleFacts,
) -> ModelTrace:
    """The trace of a module without values that has one layer of each kind. `scope()` is entered around a step and
    gives the function that computes its loss. Inside `fake_rank`."""
    # The first step of several ranks compares them and makes groups; the next ones are alike.
    for is_last in (False, True) if ranks > 1 else (True,):
        model.zero_grad(set_to_none=True)
        recorder = Recorder(DEVICE)
        parameters = {recorder.number_of(p) for p in model.parameters()}
        messages = _Messages(recorder)
        with scope() as compute:
            with _marked_layers(recorder, kinds.layers), observe_comm(messages), recorder.forward():
                loss = compute()
            with observe_comm(messages), recorder.backward():
                loss.backward()
        del loss, compute
        if is_last:
            gradients = {recorder.number_of(p.grad) for p in model.parameters() if p.grad is not None}
            return _summary(model, kinds, recorder, parameters, gradients, messages, tokens, facts)
    raise AssertionError("the last step returns")


def _summary(
    model: nn.Module, kinds: Kinds, recorder: Recorder, parameters: set[int], gradients: set[int], messages: _Messages,
    tokens: int, facts: ModuleFacts,
) -> ModelTrace:  # fmt: skip
    inside = {id(p) for p in kinds.layers.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    layers = zip(kinds.layers, kinds.counts, strict=True)
    sections = [SectionFacts("outside the layers", 1, rest, 0, 0, 0.0)]
    sections += [_facts(layer, count, facts.top_k) for layer, count in layers]
    traced = [
        summarize(recorder, number, section, parameters, gradients, messages.found)
        for number, section in enumerate(sections)
    ]
    itemsize = next(model.parameters()).element_size()
    return ModelTrace(facts.name, tokens, traced[0], tuple(traced[1:]), facts.hidden, itemsize, facts.layout)


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


def _facts(layer: nn.Module, count: int, top_k: float) -> SectionFacts:
    experts = sum(p.numel() for p in layer.parameters() if p.ndim == 3)
    total = sum(p.numel() for p in layer.parameters())
    kind = (
        getattr(layer, "attention_type", None) or getattr(layer, "layer_type", None) or type(layer).__name__
    )
    return SectionFacts(str(kind), count, total, experts, len(blocks_of(layer)), top_k if experts else 0.0)


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
