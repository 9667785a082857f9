"""A step: new tokens of several sequences, through all layers.

    step = pool.step([(seq, 1), (other, 512), (draft, 5)])
    out = step.attend(layer, q, k, v)      # (518, heads, head dim) each; for every layer
    step.commit([1, 512, 3])               # two tokens of the draft were not accepted

Shapes: T rows of the step, H query heads, G key heads, D head dim of keys, E of values.

Queries, keys and values of the new tokens are the same on all ranks, and so are the results, to the last bit. A
digest of the first layer's keys travels with its results: ranks that were given other tokens are an error on all.
In a step with cut queries (`cut=True`) each rank gives and gets only the rows of `step.rows`, whose keys it holds.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longmesh.cache.by_heads import is_cheaper, merge_by_heads, sent_bytes
from longmesh.cache.check import (
    check_attend,
    check_open,
    check_window,
    digest_of,
    forward_only,
    refuse_differences,
)
from longmesh.cache.cut import gather_queries, owned_rows, send_home
from longmesh.cache.gather import gather_partials, sent_elements
from longmesh.cache.local import Paged, Scores, Source, attend_locally
from longmesh.cache.plan import Shares, StepPlan, Write
from longmesh.cache.sequence import Sequence
from longmesh.errors import LongmeshError

if TYPE_CHECKING:
    from longmesh.cache.pool import PagePool

_NOTES = 2


class Step:
    """Made by `PagePool.step`, on every rank alike.

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
        self.plan = StepPlan(entries, pool.num_ranks)
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
        self._by_heads: dict[tuple[int | None, int, int, tuple[int, int]], bool] = {}
        self.is_open = True

    @property
    def rows(self) -> Tensor:
        """The rows of the step that this rank gives and gets: all, or with cut queries those whose keys it holds."""
        if self.is_cut:
            self._pool.member.check("Step.rows")
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
        check_attend(self, q, k, v, window, sinks, softcap)
        check_window(window, self._pool.book.window)
        self.write(layer, k, v)
        out = self.attend_written(layer, q, window=window, sinks=sinks, softcap=softcap, scale=scale)
        return forward_only(out, q, k, v)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put the new tokens' keys and values of a layer into their pages. Local."""
        check_open(self)
        self._pool.member.check("Step.attend")
        if not self._is_checked:
            self._digest = digest_of(k, v)
        self._pool.store(layer, k, v).write(self._writes, k, v)

    @torch.no_grad()
    def attend_written(
        self,
        layer: int,
        q: Tensor,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        source: Source | None = None,
        v_head_dim: int | None = None,
    ) -> Tensor:
        """`attend` for keys that were written before; `source`: keys and values that were made of them. Collective."""
        check_open(self)
        self._pool.member.check("Step.attend")
        check_window(window, self._pool.book.window)
        pool, shares = self._pool, self.plan.shares(window)
        store = pool.store(layer)
        source = Paged(store) if source is None else source
        width = store.v_head_dim if v_head_dim is None else v_head_dim
        scores = Scores(scale, softcap)
        if self.is_cut:
            every = gather_queries(q, self._owned, pool.group)
            mine = attend_locally(every, width, source, shares, pool.rank, scores)
            out, lse = send_home(mine, shares, self._owned, pool.group)
        else:
            mine = attend_locally(q, width, source, shares, pool.rank, scores)
            notes = [] if self._is_checked else [self._digest, pool.random_state()]
            sizes = mine.element_size(), q.element_size()
            if pool.group is not None and self._is_by_heads(shares, q.shape[1], width, sizes):
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
        if self._is_by_heads(shares, num_heads, v_head_dim, sizes):
            return sent_bytes(shares, rank, num_heads, v_head_dim, sizes, notes)
        return sent_elements(shares, rank, num_heads * (v_head_dim + 1), notes) * size

    def _is_by_heads(self, shares: Shares, num_heads: int, v_head_dim: int, sizes: tuple[int, int]) -> bool:
        """Whether results are merged in two collectives."""
        key = shares.window, num_heads, v_head_dim, sizes
        if key not in self._by_heads:
            self._by_heads[key] = is_cheaper(shares, num_heads, v_head_dim, sizes, self._pool.cluster)
        return self._by_heads[key]

    def commit(self, accepted: Listed[int] | None = None) -> None:
        """End the step: of each entry's new tokens the first so many stay (None: all). Local."""
        check_open(self)
        entries = self.plan.entries
        accepted = [entry.num_tokens for entry in entries] if accepted is None else list(accepted)
        if len(accepted) != len(entries) or any(
            not 0 <= n <= entry.num_tokens for n, entry in zip(accepted, entries, strict=False)
        ):
            raise LongmeshError(
                f"commit({list(accepted)}): the step has {[entry.num_tokens for entry in entries]} new tokens; give "
                "for each sequence how many of them stay"
            )
        self.is_open = False
        for entry, count in zip(entries, accepted, strict=True):
            if count < entry.num_tokens:
                self._pool.crop(entry.sequence, entry.start + count)
