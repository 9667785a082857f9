"""hf.verify: one short batch whole and cut, loss and gradients compared, and the first layer at which they part.

Inspecting a model (inspection.py) tells what mixes tokens. This tells whether the numbers are right: call it once for a
model that is new to you, before a long run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention.engine.context_parallel import ContextParallel
from longmesh.comm import collectives, comm_of
from longmesh.errors import LongmeshError
from longmesh.hf.call_checks import has_attention
from longmesh.hf.private import NAME, implementation_of, with_implementation
from longmesh.hf.scope import context_parallel
from longmesh.hf.state import current


@dataclass(frozen=True)
class Verification:
    """How far a cut sequence is from a whole one, relative: the loss, and the worst parameter's gradient.

    `layer`: the first module whose output differs by more than the tolerance, None if there is none.

    >>> Verification(loss=1e-7, gradients=2e-6, parameter="lm_head.weight", layer=None).parameter
    'lm_head.weight'
    """

    loss: float
    gradients: float
    parameter: str
    layer: str | None


def verify(
    model: nn.Module, mesh: DeviceMesh, *, tokens: int = 37, unknown: str = "refuse", tolerance: float = 1e-3
) -> Verification:
    """Run two rows of random tokens whole and cut over the mesh, and compare. Raises if they differ. Collective.

    The whole rows run with eager attention, on every rank. Dropout is off; gradients and modes are left as they were.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> register()
    >>> size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = LlamaConfig(vocab_size=50, **size)
    >>> _ = torch.manual_seed(0)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    >>> verify(model, mesh).layer is None
    True
    """
    config: Any = getattr(model, "config", None)
    if implementation_of(model) != NAME and has_attention(model):
        raise LongmeshError(
            f"hf.verify: {type(model).__name__} has no attn_implementation='longmesh'; make it with that, or call "
            "model.set_attn_implementation('longmesh')"
        )
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(3, vocabulary, (2, tokens), generator=torch.Generator().manual_seed(0))
    device = next(model.parameters()).device
    batch = {"input_ids": ids.to(device), "labels": ids.to(device)}
    with _untouched(model):
        whole, expected, loss = _run_whole(model, batch)
        part, found, share = _run_cut(model, mesh, batch, unknown, whole)
    return _compare(model, mesh, (loss, expected), (share, found), part, tolerance)


def _run_whole(model: Any, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[Tensor], Tensor]:
    with with_implementation(model, "eager"), _outputs(model) as outputs:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
    return outputs, _take_gradients(model), loss.detach()


def _run_cut(
    model: nn.Module, mesh: DeviceMesh, batch: dict[str, Tensor], unknown: str, whole: dict[str, Tensor]
) -> tuple[dict[str, float], list[Tensor], Tensor]:
    with context_parallel(mesh, batch, unknown=unknown, model=model) as part, _outputs(model) as outputs:
        loss = model(**part, use_cache=False).loss
        loss.backward()
        opened = current().batch
        assert opened is not None, "the scope is open"
        apart = {
            name: _apart(outputs[name], full, opened.cut.lead)
            for name, full in whole.items()
            if name in outputs
        }
    return apart, _take_gradients(model), loss.detach()


def _apart(local: Tensor, full: Tensor, engine: ContextParallel) -> float:
    """How far this rank's part is from that of the whole, 0 if there is nothing to compare."""
    length = engine.plan.seq_len
    if full.ndim < 3 or full.shape[1] != length or local.shape[1] != engine.num_tokens:
        return 0.0
    wanted = engine.shard(full, 1)
    if not local.numel() or wanted.shape != local.shape:
        return 0.0
    return _or_inf(float((local - wanted).abs().max() / full.abs().max().clamp(min=1e-20)))


def _or_inf(difference: float) -> float:
    """What is no number counts as the largest difference: every comparison would pass over it."""
    return math.inf if math.isnan(difference) else difference


def _compare(
    model: nn.Module,
    mesh: DeviceMesh,
    whole: tuple[Tensor, list[Tensor]],
    cut: tuple[Tensor, list[Tensor]],
    apart: dict[str, float],
    tolerance: float,
) -> Verification:
    group = comm_of(mesh).group(tuple(range(mesh.ndim)))

    def summed(tensor: Tensor) -> Tensor:
        return collectives.all_reduce(tensor, reduce_op="sum", group=group) if group.size > 1 else tensor

    names = [name for name, _ in model.named_parameters()]
    largest = max(float(gradient.abs().max()) for gradient in whole[1])
    off = [
        _or_inf(float((summed(ours) - theirs).abs().max()) / max(float(theirs.abs().max()), 1e-3 * largest))
        for ours, theirs in zip(cut[1], whole[1], strict=True)
    ]
    loss = _or_inf(abs(float(summed(cut[0]) - whole[0])) / abs(float(whole[0])))
    far = summed(torch.tensor([float(value > tolerance) for value in apart.values()], device=cut[0].device))
    layer = next((name for name, value in zip(apart, far.tolist(), strict=True) if value), None)
    worst = max(range(len(off)), key=off.__getitem__)
    found = Verification(loss, off[worst], names[worst], layer)
    if loss > tolerance or off[worst] > tolerance or layer is not None:
        raise LongmeshError(
            f"hf.verify: {type(model).__name__} gives other results over a cut sequence than in one process: the loss "
            f"differs by {loss:.1e}, the gradient of {names[worst]} by {off[worst]:.1e}"
            + (f"; hidden states first differ in {layer}" if layer else "")
        )
    return found


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """No dropout, and gradients and modes afterwards as they were."""
    training = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    model.eval()
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for module, was in training.items():
            module.training = was
        for parameter, gradient in gradients.items():
            parameter.grad = gradient


@contextmanager
def _outputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The first output of every module, in the order in which they end."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if type(first) is Tensor and not current().is_rehearsal:
                found.setdefault(name, first.detach())

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in model.named_modules() if name]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _take_gradients(model: nn.Module) -> list[Tensor]:
    taken = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return taken
