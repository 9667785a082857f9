"""What `ShardedCache.update` gives a model in place of all keys: a tensor that knows its cache.

    keys = cache.update(k, v, layer)[0]     # (1, key heads, this rank's tokens, head dim), one element of memory
    attention(module, query, keys, ...)     # finds the cache in it, and reads its pages where they lie
    expand(keys)                            # of latents: on this rank's tokens; the result knows the cache, too

The attention function is given no cache, and the layer it is called for need not be the one whose keys it is given:
so the link travels with the keys. Pitfall: they are this rank's only. What would take them for the whole sequence is an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longmesh._torch import no_subclass_functions
from longmesh.attention.scope.cut_mask import StandIn
from longmesh.cache.local import GivenKeys, joined
from longmesh.cache.plan import Keys
from longmesh.errors import LongmeshError
from longmesh.hf.cached_batch import CachedBatch
from longmesh.hf.state import OutsideState

_READS = StandIn.READS | {"ndimension"}
# What gives each token of the result from the same token of the keys.
_TOKEN_BY_TOKEN = frozenset(
    (
        *("view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "flatten", "unflatten"),
        *("contiguous", "to", "type", "type_as", "float", "half", "bfloat16", "clone", "detach", "split", "chunk"),
        *("unbind", "__getitem__", "linear", "layer_norm", "rms_norm", "cat", "concat", "new_empty"),
        *("empty_like", "copy_", "repeat_interleave", "mul", "__mul__", "__rmul__", "div", "__truediv__", "pow"),
        *("__pow__", "mean", "rsqrt", "add", "__add__", "__radd__"),
    )
)  # fmt: skip


@dataclass(eq=False)
class Link:
    """A layer of a cache, in the step in which its keys were written."""

    batch: CachedBatch
    layer: int
    num_tokens: int  # of all rows, on this rank
    state: OutsideState  # what answers attention to these keys

    def real(self, values: bool) -> Tensor:
        """(1, G, K, D): all keys or values of this rank, row after row."""
        found = [self._of_entry(number, values) for number in range(len(self._entries()))]
        whole = torch.cat(found, 1)[None]
        return whole if whole.shape[2] else whole.new_zeros((*whole.shape[:2], 1, whole.shape[3]))

    def given(self, k: Tensor, v: Tensor) -> GivenKeys:
        """What was made of the keys and values, for attention."""
        starts, at = {}, 0
        for entry in self._entries():
            starts[entry.row] = at
            at += self._local(entry)
        return GivenKeys(k[0], v[0], starts)

    def _entries(self):
        assert self.batch.step is not None, "keys are used in the step in which they were given"
        return self.batch.step.plan.entries

    def _local(self, entry: Any) -> int:
        placement, rank = entry.sequence.placement, self.batch.pool.rank
        return (
            placement.local(placement.ranks.index(rank), entry.sequence.length)
            if rank in placement.ranks
            else 0
        )

    def _of_entry(self, number: int, values: bool) -> Tensor:
        entry, store = self._entries()[number], self.batch.pool.store(self.layer)
        count = self._local(entry)
        if not count:
            width = store.v_head_dim if values else store.head_dim
            return torch.empty((store.kv_heads, 0, width), dtype=store.dtype, device=store.device)
        slot = entry.sequence.placement.ranks.index(self.batch.pool.rank)
        keys = Keys(entry, slot, ((0, count),))
        return joined(store.pieces(entry.sequence.runs(slot), keys.spans))[int(values)]


def link_layer(batch: CachedBatch, layer: int, state: OutsideState) -> tuple[CachedKeys, CachedKeys]:
    """Keys and values of a layer that was written in the running step. `state` answers attention to them."""
    link = Link(batch, layer, 0, state)
    # One at least, if in vain: models can't reshape what has no elements.
    link.num_tokens = max(1, sum(link._local(entry) for entry in link._entries()))
    store = batch.pool.store(layer)
    return CachedKeys.of(link, store, False), CachedKeys.of(link, store, True)


class CachedKeys(torch.Tensor):
    """This rank's keys or values of a layer, or something made of them token by token. `is_real`: it has elements."""

    link: Link
    is_real: bool
    is_values: bool

    @property
    def state(self) -> OutsideState:
        """What answers attention to these keys."""
        return self.link.state

    @staticmethod
    def of(link: Link, store: Any, is_values: bool) -> CachedKeys:
        width = store.v_head_dim if is_values else store.head_dim
        one = torch.zeros((), dtype=store.dtype, device=store.device)
        found = one.expand(1, store.kv_heads, link.num_tokens, width).as_subclass(CachedKeys)
        found.link, found.is_real, found.is_values = link, False, is_values
        return found

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name in _READS:
            with no_subclass_functions():
                return func(*args, **kwargs)
        if name not in _TOKEN_BY_TOKEN:
            raise _refusal(name)
        link = _first_link((*args, *kwargs.values()))
        args = tuple(_real(arg) for arg in args)
        kwargs = {key: _real(value) for key, value in kwargs.items()}
        try:
            with no_subclass_functions():
                found = func(*args, **kwargs)
        except RuntimeError as error:  # a shape that this rank's keys don't have
            raise _refusal(name) from error
        if isinstance(found, (tuple, list)):
            return type(found)(_linked(part, link) for part in found)
        return _linked(found, link)


def _refusal(name: str) -> LongmeshError:
    return LongmeshError(
        f"the model computes {name} of cached keys, of which this rank holds its own only: load it with "
        "attn_implementation='longmesh', and if it has attention code of its own, use transformers' DynamicCache"
    )


def _first_link(args: tuple[Any, ...]) -> Link:
    for arg in args:
        if isinstance(arg, CachedKeys):
            return arg.link
        if isinstance(arg, (tuple, list)):
            for part in arg:
                if isinstance(part, CachedKeys):
                    return part.link
    raise AssertionError("torch calls this for a CachedKeys among the arguments")


def _real(arg: Any) -> Any:
    if isinstance(arg, CachedKeys):
        return arg if arg.is_real else arg.link.real(arg.is_values)
    if isinstance(arg, (tuple, list)) and any(isinstance(part, CachedKeys) for part in arg):
        return type(arg)(_real(part) for part in arg)
    return arg


def _linked(found: Any, link: Link) -> Any:
    if not isinstance(found, Tensor):
        return found
    kept = found.as_subclass(CachedKeys)
    kept.link, kept.is_real, kept.is_values = link, True, False
    return kept
