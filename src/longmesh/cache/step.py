"""A step: new tokens of several sequences, through all layers.

    step = pool.step([(seq, 1), (other, 512), (draft, 5)])
    out = step.attend(layer, q, k, v)      # (518, heads, head dim) each; for every layer
    step.commit([1, 512, 3])               # two tokens of the draft were not accepted

Shapes: T rows of the step, H query heads, G key heads, D head dim of keys, E of values.

Queries, keys and values of the new tokens are the same on all ranks, and so are the results, to the last bit. A
digest of the first layer's keys travels with its results: ranks that were given other tokens are an error on all. At
a pool's first call the ranks agree that they are called alike, and inside `check_every_call` at every one.
In a step with cut queries (`cut=True`) each rank gives and gets only the rows of `step.rows`, whose keys it holds.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longmesh.cache.bookkeeping import is_whole
from longmesh.cache.check import (
    AttendSignature,
    check_attend,
    check_open,
    check_window,
    digest_of,
    forward_only,
    refuse_differences,
    signature_of,
)
from longmesh.cache.local import KeySource, Paged, ScoreChange, attend_locally
from longmesh.cache.merge_results import (
    gather_partials,
    gather_queries,
    merge_by_heads,
    owned_rows,
    send_home,
    sent_bytes,
    sent_elements,
)
from longmesh.cache.plan import CacheStep, Write
from longmesh.cache.sequence import Sequence
from longmesh.comm.agree import agree, checks_every_call
from longmesh.errors import LongmeshError

if TYPE_CHECKING:
    from longmesh.cache.pool import PagePool

_NOTES = 2


class PoolStep:
    """Made by `PagePool.step`, the same on every rank.

    >>> from longmesh.cache import PagePool
    >>> pool = PagePool(mesh, num_pages=4, page=2, layers=1, kv_heads=1, head_dim=8)
    >>> sequence = pool.sequence()
    >>> step = pool.step([(sequence, 3)])
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = (torch.randn(3, heads, 8) for heads in (2, 1, 1))  # the same on every rank
    >>> step.attend(0, q, k, v).shape
    torch.Size([3, 2, 8])
    >>> step.commit([2])
    >>> len(sequence)
    2
    """

    def __init__(self, pool: PagePool, entries: Listed[tuple[Sequence, int]], *, cut: bool) -> None:
        self._pool, self.is_cut = pool, cut
        self.plan = CacheStep.of(entries, pool.num_ranks, pool.cluster)
        self._writes = self.plan.writes(pool.rank)
        self._owned = owned_rows(self.plan) if cut else []
        if cut:
            at = 0
            own: list[Write] = []
            for write in self._writes:
                own.append(write._replace(row=at))
                at += write.num_tokens
            self._writes = own
        self._is_checked = cut
        self._digest = 0
        self._written: set[int] = set()
        self.is_open = True

    @property
    def machine(self) -> str:
        """The cluster that the pool plans for: its name and digest."""
        return self._pool.machine

    @property
    def rows(self) -> Tensor:
        """The rows of the step that this rank gives and gets: all, or with cut queries those whose keys it holds."""
        if self.is_cut:
            self._pool.member.check("PoolStep.rows")
            return torch.from_numpy(self._owned[self._pool.rank])
        return torch.arange(self.plan.num_rows)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """Attention of the new tokens over their sequences, causal: (T, H, D), (T, G, D), (T, G, E) in, (T, H, E) out.

        `window`: how many keys a query sees, its own included. `sinks`: a logit per query head that takes part in each
        softmax and has no value. `softcap`: scores become ``softcap * tanh(score / softcap)``.
        Collective: every rank, with the same arguments.
        """
        self._pool.member.check("PoolStep.attend")
        signature, error = None, None
        try:
            check_open(self)
            check_attend(self, q, k, v, window, sinks, softcap, scale)
            check_window(window, self._pool.book.window)
            self.write(layer, k, v)
            signature = signature_of(self, layer, q, v.shape[2], window, sinks, softcap, scale)
        except LongmeshError as found:
            error = found
        self._agree(signature, error)
        scores = ScoreChange(scale, softcap)
        return forward_only(self._attend(layer, q, window, sinks, scores, None, None), q, k, v)

    def _agree(self, signature: AttendSignature | None, error: LongmeshError | None) -> None:
        """Raise `error`. At the first call of a pool all ranks raise, if one has an error or their calls differ."""
        pool = self._pool
        if pool.group is not None and (self.is_cut not in pool.agreed or checks_every_call()):
            agree("PoolStep.attend", signature, error, pool.group, str(pool.device))
            pool.agreed.add(self.is_cut)
        elif error is not None:
            raise error

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the new tokens' keys and values of a layer into their pages. Local."""
        check_open(self)
        self._pool.member.check("PoolStep.attend")
        store = self._pool.store(layer, k, v)
        if not self._is_checked:
            self._digest = digest_of(k, v, besides=repr((layer, self.plan.stops, self.plan.counts)).encode())
        store.write(self._writes, k, v)
        self._written.add(layer)

    def attend_written(
        self,
        layer: int,
        q: Tensor,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        source: KeySource | None = None,
        v_head_dim: int | None = None,
    ) -> Tensor:
        """`attend` for keys that were written before; `source`: keys and values that were made of them. Collective."""
        self._pool.member.check("PoolStep.attend")
        signature, error = None, None
        try:
            check_open(self)
            check_window(window, self._pool.book.window)
            if layer not in self._written:
                raise LongmeshError(
                    f"layer {layer} was not written in this step; call write(layer, k, v) first"
                )
            width = self._pool.store(layer).v_head_dim if v_head_dim is None else v_head_dim
            signature = signature_of(self, layer, q, width, window, sinks, softcap, scale)
        except LongmeshError as found:
            error = found
        self._agree(signature, error)
        return self._attend(layer, q, window, sinks, ScoreChange(scale, softcap), source, v_head_dim)

    @torch.no_grad()
    def _attend(
        self, layer: int, q: Tensor, window: int | None, sinks: Tensor | None, scores: ScoreChange,
        source: KeySource | None, v_head_dim: int | None,
    ) -> Tensor:  # fmt: skip
        """Of a call that is in order. Collective."""
        pool, shares = self._pool, self.plan.shares(window)
        store = pool.store(layer)
        source = Paged(store) if source is None else source
        width = store.v_head_dim if v_head_dim is None else v_head_dim
        if self.is_cut:
            every = gather_queries(q, self._owned, pool.group)
            mine = attend_locally(every, width, source, shares, pool.rank, scores)
            out, lse = send_home(mine, shares, self._owned, pool.group)
        else:
            mine = attend_locally(q, width, source, shares, pool.rank, scores)
            notes = [] if self._is_checked else [self._digest, pool.random_state()]
            sizes = mine.element_size(), q.element_size()
            if pool.group is not None and shares.merges_by_heads(q.shape[1], width, sizes):
                out, told = merge_by_heads(mine, shares, notes, sinks, q.dtype, pool.group)
                sinks, lse = None, None
            else:
                out, lse, told = gather_partials(mine, shares, notes, pool.group)
            if not self._is_checked:
                self._is_checked = True
                refuse_differences(told)
                pool.has_agreed = True
        if sinks is not None and lse is not None:
            out = out * torch.sigmoid(lse - sinks.to(lse.dtype)).unsqueeze(-1)
        return out.to(q.dtype)

    def sent_bytes(
        self, num_heads: int, v_head_dim: int, dtype: torch.dtype, *, window: int | None = None
    ) -> int:
        """What this rank sends in `attend` of a layer, by the plan; the step's first layer sends its notes, too."""
        size, shares, rank = 8 if dtype == torch.float64 else 4, self.plan.shares(window), self._pool.rank
        notes = 0 if self._is_checked else _NOTES * 8 // size
        sizes = size, dtype.itemsize
        if shares.merges_by_heads(num_heads, v_head_dim, sizes):
            return sent_bytes(shares, rank, num_heads, v_head_dim, sizes, notes)
        return sent_elements(shares, rank, num_heads * (v_head_dim + 1), notes) * size

    def commit(self, accepted: Listed[int] | None = None) -> None:
        """End the step: of each entry's new tokens the first so many stay (None: all). Local."""
        check_open(self)
        counts = self.plan.counts
        accepted = counts if accepted is None else accepted
        if (
            not isinstance(accepted, Listed)
            or len(accepted) != len(counts)
            or not all(is_whole(n) and 0 <= n <= count for n, count in zip(accepted, counts, strict=True))
        ):
            raise LongmeshError(
                f"commit({accepted!r}): the step has {counts} new tokens; give a list, for each sequence how many of "
                "them stay"
            )
        self.is_open = False
        for entry, count in zip(self.plan.entries, accepted, strict=True):
            if count < entry.num_tokens:
                self._pool.crop(entry.sequence, entry.start + count)
