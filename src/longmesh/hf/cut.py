"""The state of a model that runs on this rank's part of a batch: attention sees the whole sequence.

It also meets the models that run in its scope. A scope is not told which model will be called, so torch tells it of the
calls of modules. At its first call a transformers model is inspected (inspection.py), adapted to the batch
(adaptation.py) and given hooks around its outermost calls (bound_model.py), until the scope is left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from longmesh._torch import compiled_module, runs_compiled
from longmesh._torch.process_wide import watch_modules
from longmesh.attention import ContextParallel, masks
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.open_scopes import current_cut
from longmesh.attention.scope.reentrant import refuse_reentrant_checkpoint
from longmesh.errors import LongmeshError
from longmesh.hf.adaptation import Adaptation
from longmesh.hf.bound_model import BoundModel, bind_model
from longmesh.hf.call_checks import refuse_compiled, refuse_inputs
from longmesh.hf.gather import GatheredState, run_whole
from longmesh.hf.loss import refuse_mean
from longmesh.hf.mask_functions import block_rule, dense, mask_of
from longmesh.hf.open_batch import OpenBatch
from longmesh.hf.positions import temper
from longmesh.hf.score_ops import Attention, CutBias
from longmesh.hf.state import (
    AttentionRequest,
    MaskRequest,
    NestedState,
    OutsideState,
    current,
    entered,
    refuse_multihead,
)
from longmesh.recurrent import RecurrentParallel


class CutState(NestedState):
    """In a scope of `batch`; of a scope of torch's names (`experimental.context_parallel`) there is none."""

    def __init__(
        self,
        outer: OutsideState,
        cut: CutSequence,
        batch: OpenBatch | None = None,
        *,
        may_gather: bool = False,
    ) -> None:
        super().__init__(outer)
        self.cut, self.batch, self.may_gather = cut, batch, may_gather
        self.rows, self.num_tokens = -1 if batch is None else batch.rows, cut.num_tokens
        self.running: nn.Module | None = None  # the outermost model that runs
        self._bound: dict[nn.Module, BoundModel] = {}
        self._undo = contextlib.ExitStack()

    # -- the models of a scope ---------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Answer this thread's models inside, and meet each before it runs."""
        with self._undo, entered(self):
            self._undo.callback(watch_modules(_introduce))
            yield

    def meet(self, model: nn.Module) -> None:
        if self.running is not None or model in self._bound:
            return
        assert self.batch is not None, "scopes of torch's names meet no models"
        self._bound[model] = self._undo.enter_context(bind_model(self, model, self.batch))
        self._bound[model].begin()  # torch has listed the hooks of the call that has begun

    def adaptation_of(self, model: nn.Module) -> Adaptation:
        """How a model that was met runs on this batch."""
        return self._bound[model].adaptation

    # -- what a model asks for ---------------------------------------------------------------------

    def attend(self, request: AttentionRequest) -> tuple[Tensor, None]:
        batch = self.batch
        if batch is not None and batch.is_outside(
            request.module
        ):  # a checkpoint of what was fused runs again
            return request.by_sdpa()
        request.refuse_unknown()
        refuse_reentrant_checkpoint()
        engine, query = engine_for_request(self.cut, request), request.query
        if batch is not None and request.module in batch.tempered:
            query = temper(request.module, query, batch.local_places)
        out = engine(
            query,
            request.key,
            request.value,
            scale=request.scaling,
            score_mod=None if request.softcap is None else _capped(request.softcap),
            sinks=request.sinks,
            dropout_p=request.dropout,
            dropout_seed=self.cut.common_seed() if request.dropout else None,
        )
        return out.transpose(1, 2).contiguous(), None

    def attend_written(self, asked: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        bias = asked.bias
        if bias is not None:  # (1 or rows, heads, 1, keys)
            bias = bias.reshape(-1, q.shape[1], *bias.shape[-2:]).to(q.dtype)
        return self.cut.engine_with(asked.mask or masks.full())(
            q,
            k,
            v,
            scale=asked.scale,
            bias=bias,
            dropout_p=asked.dropout,
            dropout_seed=self.cut.common_seed() if asked.dropout else None,
        )

    def sdpa(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.cut.attend(*args, **kwargs)

    def multihead(self, *args: Any, **kwargs: Any) -> Any:
        raise refuse_multihead()

    def mask(self, request: MaskRequest) -> Any:
        if request.padding is not None and not bool(request.padding.all()):
            raise LongmeshError(
                "a padding mask inside hf.context_parallel: pass it in the batch given to the scope, which cuts it"
            )
        mask = mask_of(request.function, self)
        if torch.compiler.is_compiling() and mask == masks.causal() and request.may_skip:
            return None
        return request.stand_in(mask)

    def whole_mask(self, request: MaskRequest) -> Any:
        mask = mask_of(request.function, self)
        return request.stand_in(mask) if self.batch is None else dense(mask, self.batch)

    def block_mask(self, local: Tensor) -> masks.Mask:
        if self.batch is None:
            return self.outer.block_mask(local)
        types = self.batch.types
        return block_rule(local, None if types is None else self.cut.lead.shard(types, 1), self.batch)

    def positions(self) -> Tensor | None:
        return None if self.batch is None else self.batch.local_positions

    def whole_positions(self) -> Tensor | None:
        """Without positions in the batch a module that sees all tokens counts them right."""
        return self.batch.positions if self.batch is not None and self.batch.has_positions else None

    def bias(self, whole: Callable[[], Tensor], own: Callable[[], Tensor]) -> Tensor:
        made = whole()
        return CutBias.of(made, (*made.shape[:-1], self.num_tokens))

    def recurrence(self, *, through_padding: bool = False, whole: bool = False) -> RecurrentParallel:
        assert self.batch is not None, "mixers are bound in a scope of hf.context_parallel"
        return self.batch.recurrent(whole=whole, through_padding=through_padding)

    def run_gathered(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        assert self.batch is not None, "layers are gathered in a scope of hf.context_parallel"
        return run_whole(self.batch, GatheredState(self), layer, forward, args, kwargs)

    def check_inputs(self, model: nn.Module, given: dict[str, Any]) -> None:
        assert self.batch is not None
        refuse_inputs(model, given, self.batch)

    def mean(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.running is None:  # a model's own loss is looked at when the model returns
            refuse_mean(func, args, kwargs)
        return func(*args, **kwargs)

    def cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if self.batch is None or self.batch.loss is None:
            return self.mean(torch.nn.functional.cross_entropy, args, kwargs)
        return self.batch.loss(*args, **kwargs)


def state_of(carrier: Any) -> OutsideState:
    """The state that answers a call: that of a sharded cache's keys, else the current one."""
    state = getattr(carrier, "state", None) or current()
    cut = current_cut() if state.batch is None else None
    return state if cut is None else CutState(state, cut)


def _introduce(module: nn.Module, args: Any) -> None:
    """Before any module runs: a transformers model is met by the scope, a compiled one refused."""
    kind, compiled = _model_class(), compiled_module(module)
    if isinstance(compiled, kind):
        refuse_compiled(compiled)
    if isinstance(module, kind):
        if runs_compiled():
            refuse_compiled(module)
        current().meet(module)


@cache
def _model_class() -> type[nn.Module]:
    from transformers import PreTrainedModel

    return PreTrainedModel


def engine_for_request(cut: CutSequence, request: AttentionRequest) -> ContextParallel:
    """The engine for a call's mask. A mask says all; without one, the module is causal as it is for sdpa."""
    mask = request.mask
    if isinstance(mask, CutMask):
        lo, hi = mask.mask.band() or (0, 0)
        if lo > hi:
            raise LongmeshError(
                f"{type(request.module).__name__} has a sliding window of 0 tokens; set sliding_window to 1 or more"
            )
        return cut.engine_with(mask.mask)
    if mask is not None:
        raise LongmeshError(
            "a mask tensor over a cut sequence: the model would need this rank's part of it; give padding and "
            "documents to hf.context_parallel(mesh, batch), which plans attention from them"
        )
    return cut.engine(request.causal, window=request.window)


def _capped(limit: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q_idx, kv_idx: limit * torch.tanh(score / limit)
