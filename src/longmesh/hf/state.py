"""The state that a transformers model runs in: it answers whatever the model asks of the bridge.

    OutsideState       no scope is open: transformers' own "sdpa"
    CutState           in a scope: this rank's tokens, and attention over the whole sequence       cut.py
      FusingState      all tokens, before the language model: images become embeddings             fusing.py
      GatheredState    a layer, or a loss, that every rank computes on the whole sequence          gather.py
      InspectingState  a few tokens, each alone, to see which layers mix tokens                    observed_run.py
      WrittenState     a layer that multiplies queries and keys by itself                          scores.py
    CachedState        keys of a ShardedCache, which carry their state with them                   cached_attention.py
    PlanningState      around a scope: the model has no values                                     planning.py

A model asks for attention, masks, positions, recurrences, products of queries and keys, and losses. Each question is
one method. The files of the states are the only ones that know which state it is: to learn what happens to a layer,
read the file of its state.

One ContextVar holds the current state. States nest: a `NestedState` answers some questions and leaves the others to the
state around it, so a layer that is gathered while its model is inspected runs in three objects, and no class is written
for that combination.

Pitfall: traced code can't read a ContextVar. A model that a scope has met has its CutState in `longmesh_state`, as long
as that scope is open; no second scope ever finds the first one's there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longmesh.attention import masks
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.attention.scope.intercept import attends_locally
from longmesh.errors import LongmeshError
from longmesh.hf import private

if TYPE_CHECKING:
    from longmesh.hf.adaptation import Adaptation
    from longmesh.hf.open_batch import OpenBatch
    from longmesh.hf.score_ops import Attention
    from longmesh.recurrent import RecurrentParallel


@dataclass(frozen=True, eq=False)
class AttentionRequest:
    """A call of transformers' attention function: (batch, heads, tokens, head dim). `more`: what a model adds."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    dropout: float = 0.0
    scaling: float | None = None
    is_causal: bool | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def causal(self) -> bool:
        """Whether a query sees no later keys, where no mask says so."""
        return self.is_causal if self.is_causal is not None else getattr(self.module, "is_causal", True)

    def by_sdpa(self) -> tuple[Tensor, None]:
        """Attention of one process. Sinks need transformers' eager attention."""
        if self.sinks is not None:
            raise LongmeshError(
                "attention sinks outside hf.context_parallel: use attn_implementation='eager' there"
            )
        with entered(PlainState(current())):  # a scope's F.scaled_dot_product_attention is torch's own here
            return private.sdpa(
                self.module,
                self.query,
                self.key,
                self.value,
                self.mask,
                dropout=self.dropout,
                scaling=self.scaling,
                is_causal=self.is_causal,
                softcap=self.softcap,
                **self.more,
            )

    def refuse_unknown(self) -> None:
        """Raise for tensors of this rank's part that attention over the whole sequence knows nothing of."""
        names = [
            name
            for name, value in self.more.items()
            if isinstance(value, Tensor) and name not in _NOT_ATTENTION
        ]
        if names:
            raise LongmeshError(
                f"{type(self.module).__name__} gives attention {', '.join(names)}, which over a cut sequence would be "
                "this rank's part only: this model can't run in hf.context_parallel as it is"
            )


# What models hand to attention that does not change it: it was used before, or speaks of the whole row.
_NOT_ATTENTION = frozenset(
    ("position_ids", "cache_position", "position_embeddings", "labels", "shift_labels", "num_items_in_batch")
)


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """A call of transformers' mask function. `function`: which keys are seen, in indices of what the model sees."""

    rows: int
    queries: int
    keys: int
    function: Callable[..., Any]
    padding: Tensor | None
    may_skip: bool
    device: torch.device | str
    args: tuple[Any, ...]
    more: dict[str, Any]

    def by_sdpa(self) -> Any:
        """The mask tensor of one process."""
        return private.sdpa_mask(
            self.rows,
            self.queries,
            self.keys,
            *self.args,
            mask_function=self.function,
            attention_mask=self.padding,
            allow_is_causal_skip=self.may_skip,
            device=self.device,
            **self.more,
        )

    def stand_in(self, mask: masks.Mask) -> CutMask:
        """A tensor that stands for this mask."""
        return CutMask.of(mask, self.rows, self.queries, self.device)


class OutsideState:
    """No scope is open. `batch`: that of the scope. `planned`: how a model without values is run.

    `is_rehearsal`: a model only runs to be looked at, so hooks leave what it is called with alone.
    `num_tokens`, `rows`: those of a batch that a model sees.
    """

    batch: OpenBatch | None = None
    planned: Adaptation | None = None
    is_rehearsal: bool = False
    rows: int = -1
    num_tokens: int = -1

    def meet(self, model: nn.Module) -> None:
        """A transformers model is about to run."""

    def attend(self, request: AttentionRequest) -> tuple[Tensor, None]:
        """transformers' attention function."""
        if isinstance(request.mask, CutMask):
            raise LongmeshError(
                f"{type(request.module).__name__} runs with a mask of hf.context_parallel after its scope was left: "
                "call backward() inside the scope, where activation checkpoints run layers again"
            )
        return request.by_sdpa()

    def attend_written(self, asked: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention that a layer wrote out, recognised: (rows, heads, tokens, head dim)."""
        raise AssertionError("scores are recognised in a scope only")

    def sdpa(self, *args: Any, **kwargs: Any) -> Tensor:
        """F.scaled_dot_product_attention of a model that calls it by itself."""
        return F.scaled_dot_product_attention(*args, **kwargs)

    def multihead(self, *args: Any, **kwargs: Any) -> Any:
        """nn.MultiheadAttention."""
        return F.multi_head_attention_forward(*args, **kwargs)

    def product(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A matrix product, which may be that of queries and keys."""
        return func(*args, **kwargs)

    def mask(self, request: MaskRequest) -> Any:
        """transformers' mask function."""
        return request.by_sdpa()

    def whole_mask(self, request: MaskRequest) -> Any:
        """The mask of a layer that is given the whole sequence."""
        return request.by_sdpa()

    def block_mask(self, local: Tensor) -> masks.Mask:
        """Who sees whom inside blocks of tokens, from the numbers that a model gave the tokens it sees."""
        raise LongmeshError(
            "the model masks by blocks of tokens: give token_type_ids or mm_token_type_ids in the batch of "
            "hf.context_parallel, which cuts them"
        )

    def positions(self) -> Tensor | None:
        """(rows, tokens) for a module that would count positions by itself. None: it counts right."""
        return None

    def whole_positions(self) -> Tensor | None:
        """Positions for a module in a layer that is given the whole sequence."""
        return None

    def bias(self, whole: Callable[[], Tensor], own: Callable[[], Tensor]) -> Tensor:
        """An ALiBi bias of the keys: `whole` makes that of all keys, `own` that of the keys that the model sees."""
        return own()

    def recurrence(self, *, through_padding: bool = False, whole: bool = False) -> RecurrentParallel:
        """Recurrent layers over the tokens that the model sees, or over the `whole` sequence."""
        raise AssertionError("mixers are bound inside a scope only")

    def run_gathered(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A layer that can't be cut."""
        return forward(*args, **kwargs)

    def check_inputs(self, model: nn.Module, given: dict[str, Any]) -> None:
        """Look at what the model inside a head is called with."""

    def mean(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """A loss of torch, which may be a mean over tokens."""
        return func(*args, **kwargs)

    def cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """F.cross_entropy."""
        return self.mean(F.cross_entropy, args, kwargs)


_Answers = OutsideState if TYPE_CHECKING else object


class NestedState(_Answers):
    """A state inside another, `outer`, which answers what this one does not."""

    def __init__(self, outer: OutsideState) -> None:
        self.outer = outer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.outer, name)


class PlainState(NestedState):
    """Something that sees all it needs: attention is that of one process, as are products, biases and layers."""

    def attend(self, request: AttentionRequest) -> tuple[Tensor, None]:
        return request.by_sdpa()

    def sdpa(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)

    def multihead(self, *args: Any, **kwargs: Any) -> Any:
        return F.multi_head_attention_forward(*args, **kwargs)

    def product(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return func(*args, **kwargs)

    def bias(self, whole: Callable[[], Tensor], own: Callable[[], Tensor]) -> Tensor:
        return own()

    def check_inputs(self, model: nn.Module, given: dict[str, Any]) -> None:
        pass

    def recurrence(self, *, through_padding: bool = False, whole: bool = False) -> RecurrentParallel:
        return self.outer.recurrence(through_padding=through_padding, whole=True)

    def run_gathered(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return forward(*args, **kwargs)


def refuse_multihead() -> LongmeshError:
    """The error for nn.MultiheadAttention on this rank's tokens."""
    return attends_locally(F.multi_head_attention_forward)


_state: ContextVar[OutsideState] = ContextVar("longmesh_hf_state", default=OutsideState())  # noqa: B039 - without fields


def current() -> OutsideState:
    """The state that this thread's model runs in."""
    return _state.get()


def set_state(state: OutsideState) -> None:
    """Let this state answer from now on."""
    _state.set(state)


@contextlib.contextmanager
def entered(state: OutsideState) -> Iterator[None]:
    """Let this state answer inside."""
    before = _state.get()
    _state.set(state)
    try:
        yield
    finally:
        _state.set(before)
