"""context_parallel: a transformer of diffusers over a sequence of latents that is cut over a mesh.

    handle = longmesh.diffusers.context_parallel(pipeline, mesh)     # or a transformer; every rank calls it
    pipeline(prompt)                                                 # the same inputs and results on every rank
    handle.remove()

    tokens of latents   cut where the model's own plan of context parallelism says, gathered where it says
    self-attention      exact over all tokens: any length on any number of ranks
    cross-attention     each rank's queries to the whole text, which every rank has: nothing is sent
    joint attention     text and latents are one sequence (Flux): each is cut, and a rank has its part of both

Only hooks of modules are used. Gradients of parameters are this rank's share: their sum over the ranks is the gradient.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention.layout.base import Ownership
from longmesh.attention.layout.given import GivenLayout
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.intercept import AttentionMode
from longmesh.attention.scope.open_scopes import close_scope, cut_over, open_scope
from longmesh.errors import LongmeshError

__all__ = ["Handle", "context_parallel"]

# Inputs of a model that attends to text and latents as one sequence, as its plan names them, by what they belong to.
_JOINT = {
    "hidden_states": "latents",
    "img_ids": "latents",
    "encoder_hidden_states": "text",
    "txt_ids": "text",
}
# Models whose plans cut a text that only cross-attention reads: it stays whole, on every rank. Their time steps may be
# one for each token, which their plans don't say.
_TEXT_STAYS_WHOLE = frozenset({"LTXVideoTransformer3DModel"})
# Results of a ControlNet: they have a row for each token, and no plan cuts them.
_UNCUT = ("controlnet_block_samples", "controlnet_single_block_samples")


def context_parallel(pipeline_or_transformer: Any, mesh: DeviceMesh) -> Handle:
    """Run the transformers of a pipeline, or one of them, over sequences that are cut over the mesh, until the handle
    is told to `remove()`. Sends nothing itself. Every rank calls it, and gives the same inputs afterwards."""
    try:
        from diffusers import ModelMixin
    except ImportError as error:
        raise LongmeshError(
            "longmesh.diffusers needs the package diffusers: pip install longmesh[diffusers]"
        ) from error
    parts = [getattr(pipeline_or_transformer, name, None) for name in ("transformer", "transformer_2")]
    models = [part for part in parts if isinstance(part, ModelMixin)]
    if isinstance(pipeline_or_transformer, ModelMixin):
        models = [pipeline_or_transformer]
    if not models:
        raise LongmeshError(
            f"longmesh.diffusers.context_parallel: {type(pipeline_or_transformer).__name__} is neither a transformer "
            "of diffusers nor a pipeline that has one; pass pipeline.transformer"
        )
    handle = Handle()
    for model in models:
        _Model(model, mesh, _plan_of(model), handle)
    return handle


class Handle:
    """What undoes `context_parallel`."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def add(self, hook: Any) -> None:
        """Keep a hook until the end."""
        self._hooks.append(hook)

    def remove(self) -> None:
        """Let the model run as before, each rank on its own."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _plan_of(model: nn.Module) -> dict[str, Any]:
    """Where the model says that its sequence may be cut and must be gathered: one sequence, of the latents."""
    plan = getattr(model, "_cp_plan", None)
    name = type(model).__name__
    if any(isinstance(getattr(hook, "__self__", None), _Model) for hook in model._forward_pre_hooks.values()):
        raise LongmeshError(
            f"longmesh.diffusers.context_parallel: this {name} runs over cut sequences already; call remove() of the "
            "handle that the first call gave"
        )
    if not plan:
        raise LongmeshError(
            f"longmesh.diffusers.context_parallel: {name} does not say where its sequence can be cut (it has no plan "
            "of context parallelism); use ContextParallel in attention processors of your own"
        )
    if name in _TEXT_STAYS_WHOLE:
        plan = {
            key: {k: how for k, how in inputs.items() if not str(k).startswith("encoder_")}
            if isinstance(inputs, dict)
            else inputs
            for key, inputs in plan.items()
        }
        plan[""]["timestep"] = dataclasses.replace(plan[""]["hidden_states"], expected_dims=2)
    cut = {key for inputs in plan.values() if isinstance(inputs, dict) for key in inputs}
    if "encoder_hidden_states" in cut and not _is_joint(plan):
        raise LongmeshError(
            f"longmesh.diffusers.context_parallel: {name} cuts its text and its latents, and gives more than both to "
            "its attention; models with self- and cross-attention, such as Wan's, and joint ones, such as Flux, are "
            "supported"
        )
    if any("." in key for key, how in plan.items() if not isinstance(how, dict)):
        raise LongmeshError(
            f"longmesh.diffusers.context_parallel: {name} gathers its latents again inside each of its layers; models "
            "that cut them once, such as Wan's, are supported"
        )
    return plan


def _modules_of(model: nn.Module, name: str) -> list[nn.Module]:
    """Those that a plan names; * stands for any part of a name."""
    wanted = name.split(".")
    if "*" not in wanted:
        return [model.get_submodule(name)]
    named = [(key.split("."), module) for key, module in model.named_modules()]
    return [
        module
        for parts, module in named
        if len(parts) == len(wanted) and all(w in ("*", part) for w, part in zip(wanted, parts, strict=True))
    ]


def _is_joint(plan: dict[str, Any]) -> bool:
    """Whether text and latents are cut where the model begins, and nothing else is."""
    inputs = {name: how for name, how in plan.items() if isinstance(how, dict)}
    return inputs.keys() == {""} and inputs[""].keys() == _JOINT.keys()


class _Model:
    """The hooks of one transformer. `_cuts` are the sequences of the forward that runs, by what they are of."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any], handle: Handle) -> None:
        self._mesh = mesh
        self._name = type(model).__name__
        self._is_joint = _is_joint(plan)
        self._cuts: dict[str, CutSequence] = {}
        self._has_begun = False  # whether the latents are cut; what was made for them may be before
        self._opened: list[AttentionMode | None] = []
        self._num_seen = 0  # calls of attention that ran over the whole sequence
        handle.add(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for how, module in [
            (how, module) for name, how in plan.items() for module in _modules_of(model, name)
        ]:
            if not isinstance(how, dict):
                handle.add(module.register_forward_hook(self._gather(how)))
            elif any(where.split_output for where in how.values()):
                handle.add(module.register_forward_hook(self._cut_outputs(how)))
            else:
                handle.add(module.register_forward_pre_hook(self._cut_inputs(how), with_kwargs=True))
        for module in model.modules():
            if hasattr(module, "set_processor") and hasattr(module, "processor") and module is not model:
                handle.add(module.register_forward_pre_hook(self._before_attention, with_kwargs=True))
                handle.add(module.register_forward_hook(self._check_attention))
                handle.add(module.register_forward_hook(self._after_attention, always_call=True))

    def _begin(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._cuts, self._has_begun = {}, False
        for name in _UNCUT:
            if kwargs.get(name) is not None:
                raise LongmeshError(
                    f"longmesh.diffusers: {self._name} was given {name}, which have a row for each token and are not "
                    "cut; leave them out, or run the model on whole sequences"
                )

    def _part(self, tensor: Any, where: Any, name: Any) -> Any:
        """This rank's tokens of a tensor, if it is one that has tokens there."""
        if not isinstance(tensor, Tensor):
            return tensor
        if where.expected_dims not in (None, tensor.ndim):
            if self._is_joint:
                raise LongmeshError(
                    f"longmesh.diffusers: {name} of {self._name} has {tensor.ndim} dims; its plan of context "
                    f"parallelism cuts it with {where.expected_dims}, so give it with as many"
                )
            return tensor
        length, kind = tensor.shape[where.split_dim], _JOINT[name] if self._is_joint else "latents"
        if kind not in self._cuts:
            self._cuts[kind] = cut_over(self._mesh, length, layout="contiguous")
        cut = self._cuts[kind]
        if cut.seq_len != length:
            raise LongmeshError(
                f"longmesh.diffusers: {self._name} cuts sequences of {cut.seq_len} and of {length} tokens in one "
                "forward; models whose latents are one sequence are supported"
            )
        return cut.lead.shard(tensor, where.split_dim)

    def _attended(self) -> CutSequence | None:
        """The sequence that attention runs over: that of the latents, or text and latents as one."""
        cuts = [self._cuts[kind] for kind in ("text", "latents") if kind in self._cuts]
        if not self._is_joint or len(cuts) < 2:
            return self._cuts.get("latents")
        starts = (0, cuts[0].seq_len)
        pieces: list[list[tuple[int, int]]] = [[] for _ in range(self._mesh.size())]
        for start, cut in zip(starts, cuts, strict=True):
            for rank, spans in enumerate(cut.lead.plan.rows[0].ownership.pieces):
                pieces[rank] += [(start + a, start + b) for a, b in spans]
        owned = Ownership(sum(cut.seq_len for cut in cuts), tuple(tuple(spans) for spans in pieces))
        return cut_over(self._mesh, owned.seq_len, layout=GivenLayout(owned))

    def _cut_inputs(self, how: dict[str, Any]) -> Callable[..., Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = inspect.signature(module.forward).bind(*args, **kwargs)
            for name, where in how.items():
                if name in given.arguments:
                    self._has_begun |= name == "hidden_states"
                    given.arguments[name] = self._part(given.arguments[name], where, name)
            return given.args, given.kwargs

        return before

    def _cut_outputs(self, how: dict[int, Any]) -> Callable[..., Any]:
        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            found = [output] if isinstance(output, Tensor) else list(output)
            for number, where in how.items():
                found[number] = self._part(found[number], where, number)
            return found[0] if isinstance(output, Tensor) else tuple(found)

        return after

    def _gather(self, where: Any) -> Callable[..., Any]:
        def after(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            return self._cuts["latents"].lead.unshard(output, where.gather_dim)

        return after

    def _before_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Self- and joint attention run over the whole sequence; cross-attention has its keys whole on every rank."""
        self._opened.append(None)
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        cut = self._attended() if self._has_begun else None
        if cut is not None and (self._is_joint or given.get("encoder_hidden_states") is None):
            if given.get("attention_mask") is not None:
                raise LongmeshError(
                    f"longmesh.diffusers: {self._name} gives its self-attention a mask; leave the mask out, or use "
                    "ContextParallel in attention processors of your own"
                )
            self._num_seen = 0
            self._opened[-1] = open_scope(cut, {F.scaled_dot_product_attention: self._attend_over(cut)})

    def _attend_over(self, cut: CutSequence) -> Callable[..., Tensor]:
        def attend(*args: Any, **kwargs: Any) -> Tensor:
            self._num_seen += 1
            return cut.attend(*args, **kwargs)

        return attend

    def _check_attention(self, module: Any, *_: Any) -> None:
        """What computes attention in another way has seen this rank's tokens only."""
        if self._opened[-1] is not None and self._num_seen == 0:
            raise LongmeshError(
                f"longmesh.diffusers: the processor {type(module.processor).__name__} of {self._name} did not call "
                "F.scaled_dot_product_attention, so it attended to this rank's tokens only; use diffusers' processors "
                "with set_attention_backend('native')"
            )

    def _after_attention(self, *_: Any) -> None:
        mode = self._opened.pop()
        if mode is not None:
            close_scope(mode)
