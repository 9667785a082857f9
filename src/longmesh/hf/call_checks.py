"""What a model is called with inside a scope: refused where each rank would answer for its own part only.

Arguments are the same on every rank, and so is the answer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longmesh._torch import compiled_module
from longmesh.errors import LongmeshError
from longmesh.hf.mixers.bind import is_mixer
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.private import NAME, implementation_of
from longmesh.hf.ranks_agree import true_everywhere
from longmesh.hf.router import weight_of
from longmesh.hf.state import current
from longmesh.hf.whole_batch import CUT


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a model was called with, by name."""
    if not args:
        return kwargs
    given = inspect.signature(model.forward).bind_partial(*args, **kwargs).arguments
    return {**given, **given.get("kwargs", {})}


def refuse_kind(model: nn.Module) -> None:
    """Raise for a model that can't be cut whatever its layers do, or whose attention goes another way."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise LongmeshError(
            f"hf.context_parallel can't cut {type(model).__name__}: its decoder gets other tokens than its encoder, "
            "made of labels; a decoder alone (AutoModelForCausalLM) can be cut"
        )
    found = implementation_of(model)
    if found != NAME and has_attention(model):
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} has attn_implementation={found!r}, which sees this rank's "
            "tokens only; call hf.register() and model.set_attn_implementation('longmesh'), or make it with that"
        )


def refuse_zero_padding(model: Any, batch: OpenBatch) -> None:
    """Raise for padding whose hidden states stay zero, since it sees padding only, in a model that divides by their
    size (AltUp, of Gemma 3n): gradients would not be finite."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if batch.padding is None or batch.embeds is not None or not hasattr(text, "altup_num_inputs"):
        return
    of_padding = model.get_input_embeddings().weight[batch.tokens[batch.padding == 0].unique()]
    if not bool(of_padding.any(-1).all()):
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} embeds padding as zeros and divides by the size of hidden "
            "states, so gradients would not be finite; pad with another token, or pack documents instead"
        )


def refuse_compiled(model: nn.Module, name: str = "") -> None:
    """Raise for a compiled model or layer, which can be neither inspected nor given this rank's positions."""
    where = f" ({name})" if name else ""
    raise LongmeshError(
        f"hf.context_parallel: {type(model).__name__}{where} is compiled (torch.compile, torch_compile=True), so it "
        "can't be inspected before its first step; run it without torch.compile"
    )


def refuse_compiled_layers(model: nn.Module) -> None:
    """Raise for a model with compiled layers that mix tokens; others, such as MLPs, may be compiled."""
    for name, part in model.named_modules():
        inner = compiled_module(part)
        if inner is not None and any(_attends(each) or is_mixer(each) for each in inner.modules()):
            refuse_compiled(inner, name)


def has_attention(model: nn.Module) -> bool:
    """Whether a model has layers that attend, by the names of their classes."""
    return any(map(_attends, model.modules()))


def _attends(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__ and not is_mixer(module)


def check_inputs(model: nn.Module) -> Callable[[], None]:
    """Check what the model inside is called with, before it runs. Returns what undoes it."""
    inner: nn.Module = getattr(model, "base_model", model)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        current().check_inputs(model, named_arguments(inner, args, kwargs))

    return inner.register_forward_pre_hook(before, with_kwargs=True).remove


def refuse_inputs(model: nn.Module, given: dict[str, Any], batch: OpenBatch) -> None:
    tokens = next(
        (given[name] for name in ("input_ids", "inputs_embeds") if isinstance(given.get(name), Tensor)), None
    )
    local = batch.cut.num_tokens
    if tokens is not None and tokens.shape[1:2] != (local,):
        whole = " (the whole sequence)" if tokens.shape[1] == batch.length else ""
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} is called with {tokens.shape[1]} tokens{whole}, and this "
            f"rank's part has {local}; call it with the part that the scope yields. Prompt tuning, which adds tokens, "
            "can't be cut"
        )
    cache = given.get("past_key_values")
    if cache is not None and (not hasattr(cache, "get_seq_length") or cache.get_seq_length() > 0):
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} is called with past_key_values, which a scope does not cut; "
            "leave them out. To generate, use hf.ShardedCache; prefix tuning can't be cut"
        )
    if given.get("encoder_hidden_states") is not None:
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} is called with encoder_hidden_states; attention to other "
            "tokens is not cut here"
        )


def refuse_loss(model: nn.Module, kwargs: dict[str, Any], output: Any, batch: OpenBatch) -> None:
    """Raise for a loss that the scope has not seen: a mean over this rank's tokens is no share of that over all."""
    has_loss = isinstance(getattr(output, "loss", None), Tensor) or kwargs.get("labels") is not None
    if not has_loss or (batch.loss is not None and batch.loss.was_called):
        return
    if batch.loss is None:
        why = "is called with labels that the scope was not given; give them in the batch, whole and not shifted"
    else:
        why = "computes another loss than a cross entropy; leave labels out and compute the loss from its outputs"
    raise LongmeshError(
        f"hf.context_parallel: {type(model).__name__} {why}: a mean over this rank's tokens would be wrong"
    )


def refuse_other_terms(model: nn.Module, kwargs: dict[str, Any], output: Any, batch: OpenBatch) -> None:
    """Raise for a loss that is more than its cross entropy and router loss, such as one with a z-loss: other terms are
    of this rank's tokens."""
    loss, aux = getattr(output, "loss", None), getattr(output, "aux_loss", None)
    if not isinstance(loss, Tensor) or batch.loss is None or not batch.loss.was_called:
        return
    if isinstance(aux, Tensor):
        loss = loss - (weight_of(model) or 0.0) * aux
    if not batch.loss.is_all_of(loss, kwargs.get("num_items_in_batch")):
        raise LongmeshError(
            f"hf.context_parallel: the loss of {type(model).__name__} is not its cross entropy alone, and what it adds "
            "or divides by is of this rank's tokens; switch that off in its configuration (z_loss_coefficient=0), or "
            "leave labels out and compute the loss from its outputs"
        )


def refuse_positions(model: nn.Module, given: dict[str, Any], batch: OpenBatch) -> None:
    """Raise for a model that was called with other positions than this rank's, or counted its own. Collective, unless
    the positions are the scope's own tensor."""
    if batch.features or "position_ids" not in inspect.signature(model.forward).parameters:
        return  # it makes its positions in a way that the scope knows
    positions = given.get("position_ids")
    if positions is None:
        why = "without position_ids, so it counts from 0 on every rank"
    elif _is_same_tensor(positions, batch.local_positions):
        return
    else:
        fits = torch.tensor([_are_alike(positions, batch.local_positions)], device=positions.device)
        if bool(true_everywhere(fits, batch.cut.mesh).all()):
            return
        why = "with other position_ids than those of this rank's tokens"
    raise LongmeshError(
        f"hf.context_parallel: {type(model).__name__} is called {why}; call it with those that the scope yields. "
        "Positions of your own belong in the batch that the scope is given, of all tokens"
    )


def _is_same_tensor(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape


def _are_alike(positions: Tensor, others: Tensor) -> bool:
    try:
        return bool((positions == others.to(positions.device)).all())
    except RuntimeError:
        return False


_KNOWN = (*CUT, "shift_labels", "num_items_in_batch")


def refuse_options(model: nn.Module, kwargs: dict[str, Any], batch: OpenBatch) -> None:
    """Raise for what was asked of a model where each rank's answer is not a part of that of the whole."""
    config: Any = getattr(model, "config", None)

    def asked(name: str) -> Any:
        value = kwargs.get(name)
        return getattr(config, name, None) if value is None else value

    for name, value in kwargs.items():
        if isinstance(value, Tensor) and value.ndim and not batch.features and name not in _KNOWN:
            raise LongmeshError(
                f"hf.context_parallel: {type(model).__name__} is called with {name} of {tuple(value.shape)}, and it is "
                "not known how to cut it; leave it out"
            )
    for name in ("logits_to_keep", "num_logits_to_keep"):
        value = kwargs.get(name, 0)
        if isinstance(value, Tensor) or value:
            raise LongmeshError(
                f"hf.context_parallel: {type(model).__name__} is called with {name}, which would keep the last tokens "
                "of each rank's part; leave it out. To generate, use hf.ShardedCache, outside the scope"
            )
    if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} is called with use_cache=True or past_key_values, and each "
            "rank's cache would hold its own tokens only; leave them out. To generate, use hf.ShardedCache, outside "
            "the scope"
        )
    if asked("output_attentions"):
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} is asked for output_attentions; attention over a cut "
            "sequence makes no weights: set output_attentions=False"
        )
    if asked("return_dict") is False and asked("output_router_logits"):
        raise LongmeshError(
            f"hf.context_parallel: {type(model).__name__} is called with return_dict=False, so its router loss can't "
            "be found among its outputs; leave return_dict out, or set output_router_logits=False"
        )
