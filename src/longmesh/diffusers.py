"""context_parallel: a transformer of diffusers over a sequence of latents that is cut over a mesh.

    handle = longmesh.diffusers.context_parallel(pipeline, mesh)     # or a transformer; every rank calls it
    pipeline(prompt)                                                 # the same inputs and results on every rank
    handle.remove()

    tokens of latents   cut where the model's own plan of context parallelism says, gathered where it says
    self-attention      exact over all tokens: any length on any number of ranks
    cross-attention     each rank's queries to the whole text, which every rank has: nothing is sent

Only hooks of modules are used. Gradients of parameters are this rank's share: their sum over the ranks is the gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.intercept import AttentionMode
from longmesh.attention.scope.open_scopes import close_scope, cut_over, open_scope
from longmesh.errors import LongmeshError

__all__ = ["Handle", "context_parallel"]


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
        """Let the model run as before, each rank by itself."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _plan_of(model: nn.Module) -> dict[str, Any]:
    """Where the model says that its sequence may be cut and must be gathered: one sequence, of the latents."""
    plan = getattr(model, "_cp_plan", None)
    name = type(model).__name__
    if not plan:
        raise LongmeshError(
            f"longmesh.diffusers.context_parallel: {name} does not say where its sequence can be cut (it has no plan "
            "of context parallelism); use ContextParallel in attention processors of your own"
        )
    cut = {key for inputs in plan.values() if isinstance(inputs, dict) for key in inputs}
    if "encoder_hidden_states" in cut:
        raise LongmeshError(
            f"longmesh.diffusers.context_parallel: {name} attends to latents and text as one joint sequence, of which "
            "both parts would be cut; models with self- and cross-attention, such as Wan's, are supported"
        )
    return plan


class _Model:
    """The hooks of one transformer. `_cut` is the sequence of the forward that runs."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, plan: dict[str, Any], handle: Handle) -> None:
        self._mesh = mesh
        self._name = type(model).__name__
        self._cut: CutSequence | None = None
        self._opened: list[AttentionMode | None] = []
        handle.add(model.register_forward_pre_hook(self._begin))
        for name, how in plan.items():
            module = model.get_submodule(name)
            if not isinstance(how, dict):
                handle.add(module.register_forward_hook(self._gather(how)))
            elif any(where.split_output for where in how.values()):
                handle.add(module.register_forward_hook(self._cut_outputs(how)))
            else:
                handle.add(module.register_forward_pre_hook(self._cut_inputs(how), with_kwargs=True))
        for module in model.modules():
            if hasattr(module, "set_processor") and hasattr(module, "processor") and module is not model:
                handle.add(module.register_forward_pre_hook(self._before_attention, with_kwargs=True))
                handle.add(module.register_forward_hook(self._after_attention, always_call=True))

    def _begin(self, *_: Any) -> None:
        self._cut = None

    def _part(self, tensor: Any, where: Any) -> Any:
        """This rank's tokens of a tensor, if it is one that has tokens there."""
        if not isinstance(tensor, Tensor) or where.expected_dims not in (None, tensor.ndim):
            return tensor
        length = tensor.shape[where.split_dim]
        if self._cut is None:
            self._cut = cut_over(self._mesh, length, layout="contiguous")
        if self._cut.seq_len != length:
            raise LongmeshError(
                f"longmesh.diffusers: {self._name} cuts sequences of {self._cut.seq_len} and of {length} tokens in one "
                "forward; models whose latents are one sequence are supported"
            )
        return self._cut.lead.shard(tensor, where.split_dim)

    def _cut_inputs(self, how: dict[str, Any]) -> Callable[..., Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = inspect.signature(module.forward).bind(*args, **kwargs)
            for name, where in how.items():
                if name in given.arguments:
                    given.arguments[name] = self._part(given.arguments[name], where)
            return given.args, given.kwargs

        return before

    def _cut_outputs(self, how: dict[int, Any]) -> Callable[..., Any]:
        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            found = [output] if isinstance(output, Tensor) else list(output)
            for number, where in how.items():
                found[number] = self._part(found[number], where)
            return found[0] if isinstance(output, Tensor) else tuple(found)

        return after

    def _gather(self, where: Any) -> Callable[..., Any]:
        def after(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            assert self._cut is not None, "what is gathered was cut before"
            return self._cut.lead.unshard(output, where.gather_dim)

        return after

    def _before_attention(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Self-attention runs over the whole sequence; cross-attention has its keys whole on every rank."""
        self._opened.append(None)
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        if given.get("encoder_hidden_states") is None and self._cut is not None:
            if given.get("attention_mask") is not None:
                raise LongmeshError(
                    f"longmesh.diffusers: {self._name} gives its self-attention a mask; leave the mask out, or use "
                    "ContextParallel in attention processors of your own"
                )
            self._opened[-1] = open_scope(self._cut)

    def _after_attention(self, *_: Any) -> None:
        mode = self._opened.pop()
        if mode is not None:
            close_scope(mode)
