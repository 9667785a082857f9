"""plan_attention: from choices to a plan, checked and cached. It communicates nothing."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from longmesh.attention.exchange.base import Exchange, Prices
from longmesh.attention.exchange.named import AutoExchange, auto_exchanges, exchange_of
from longmesh.attention.exchange.ulysses import HeadShare, Ulysses, count_groups, share_heads
from longmesh.attention.layout.base import TokenLayout
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.given import GivenLayout
from longmesh.attention.layout.named import Auto, layout_of
from longmesh.attention.mask.axes import SequenceAxes, axes_of
from longmesh.attention.mask.band import causal
from longmesh.attention.mask.base import Mask
from longmesh.attention.plan.attention_plan import AttentionPlan, RowPlan
from longmesh.attention.plan.choose import auto_layouts, fastest
from longmesh.attention.plan.cut import Asked, Cuts, cut_both, slices_in
from longmesh.attention.plan.head_sizes import HeadSizes
from longmesh.attention.plan.schedule import make_schedule
from longmesh.errors import LongmeshError, whole_number
from longmesh.plan.cluster import Cluster
from longmesh.plan.named_clusters import cluster_of


def plan_attention(
    *,
    seq_len: int,
    ranks: int | Sequence[int],
    kv_len: int | None = None,
    q_offset: int | None = None,
    mask: Mask | None = None,
    layout: TokenLayout | str = "auto",
    kv_layout: TokenLayout | str | None = None,
    exchange: Exchange | str = "auto",
    chunk: int = 512,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    v_head_dim: int | None = None,
    v_in_k: bool = False,
    dtype_bytes: int = 4,
    cluster: Cluster | str | None = None,
) -> AttentionPlan:
    """Decide who owns, computes and sends what, for every rank. Without `mask` attention is causal.

    If keys are other tokens than queries, `kv_len` is their number and `kv_layout` cuts them. Masks use positions among
    the keys: the first query has `q_offset`; by default the last query has the position of the last key.

    `ranks` is a number, or (inner, outer): groups of `inner` ranks that split heads, `outer` of them.
    `cluster` is the machine that `auto` chooses for: a `Cluster`, or the name of one. The same arguments give the same
    plan, bit for bit, on every rank; it is cached.

    >>> plan = plan_attention(seq_len=16384, ranks=8, mask=masks.documents([9000, 300, 7084]))
    >>> print(plan.layout, plan.exchange, [stats.tokens for stats in plan.stats()])
    Contiguous Ulysses [2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048]
    """
    inner, outer = _mesh(ranks)
    seen = causal() if mask is None else checked_mask(mask).current()
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    sizes = _checked_heads(num_heads, num_kv_heads, head_dim, v_head_dim, dtype_bytes, v_in_k)
    axes = _checked_axes(seen, seq_len, kv_len, q_offset)
    request = Request(
        axes=axes,
        inner=inner,
        outer=outer,
        mask=seen,
        layout=layout_of(layout),
        kv_layout=None if kv_layout is None else layout_of(kv_layout),
        exchange=exchange_of(exchange),
        chunk=_at_least("chunk", chunk, 1),
        heads=sizes,
        cluster=cluster_of(cluster),
    )
    return _choose(request)


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of a plan, checked: the key of the cache."""

    axes: SequenceAxes
    inner: int
    outer: int
    mask: Mask
    layout: TokenLayout
    kv_layout: TokenLayout | None
    exchange: Exchange
    chunk: int
    heads: HeadSizes
    cluster: Cluster

    @property
    def is_one_sequence(self) -> bool:
        """Whether keys are the tokens that queries are, and lie where they do."""
        return self.axes.is_one_sequence and self.kv_layout is None

    @property
    def key_layout(self) -> TokenLayout | None:
        """How keys are cut by themselves: as queries are, where that takes no look at the mask."""
        if self.is_one_sequence:
            return None
        if self.kv_layout is not None and not isinstance(self.kv_layout, Auto):
            return self.kv_layout
        own = self.layout
        return Contiguous() if own.follows_mask or isinstance(own, GivenLayout) else own


def _mesh(ranks: int | Sequence[int]) -> tuple[int, int]:
    sizes = tuple(ranks) if isinstance(ranks, Sequence) else (1, ranks)
    sizes = tuple(whole_number("ranks", size) for size in sizes)
    if len(sizes) == 1:
        sizes = (1, sizes[0])
    if len(sizes) != 2:
        raise LongmeshError(
            f"ranks={sizes}: attention runs on a mesh of 1 axis, or 2 (inner, outer) for hybrid, not "
            f"{len(sizes)}; take the sub-mesh of the axes that cut the sequence"
        )
    if min(sizes) < 1:
        raise LongmeshError(f"ranks={ranks}: there must be at least 1 rank on each axis")
    return sizes[0], sizes[1]


def checked_mask(mask: object) -> Mask:
    """The mask, if it is one."""
    if not isinstance(mask, Mask):
        raise LongmeshError(
            f"mask={mask!r} is not a mask; use one of longmesh.attention.masks, such as masks.causal(), or wrap "
            "a function of (b, h, q_idx, kv_idx) in masks.mask_mod(fn)"
        )
    return mask


def _at_least(name: str, value: int, least: int) -> int:
    value = whole_number(name, value)
    if value < least:
        raise LongmeshError(f"{name}={value}: must be at least {least}")
    return value


def _checked_axes(mask: Mask, seq_len: int, kv_len: int | None, q_offset: int | None) -> SequenceAxes:
    """The lengths, if they can be: a sequence that attends to itself has a token at least."""
    seq_len = _at_least("seq_len", seq_len, 1 if kv_len is None else 0)
    kv_len = None if kv_len is None else _at_least("kv_len", kv_len, 0)
    q_offset = None if q_offset is None else whole_number("q_offset", q_offset)
    return axes_of(mask, seq_len, kv_len, q_offset)


def _checked_heads(
    num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype_bytes: int, v_in_k: bool
) -> HeadSizes:
    heads, kv_heads = whole_number("num_heads", num_heads), whole_number("num_kv_heads", num_kv_heads)
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise LongmeshError(
            f"{kv_heads} key heads do not divide {heads} query heads; each key head serves the same number"
        )
    head_dim, v_head_dim = _at_least("head_dim", head_dim, 1), _at_least("v_head_dim", v_head_dim, 0)
    if v_in_k and v_head_dim > head_dim:
        raise LongmeshError(
            f"v_in_k: values of {v_head_dim} features cannot be the first ones of keys of {head_dim}; give "
            f"v_head_dim= of at most {head_dim}"
        )
    return HeadSizes(
        heads, kv_heads, head_dim, v_head_dim, _at_least("dtype_bytes", dtype_bytes, 1), bool(v_in_k)
    )


def _groups(exchange: Exchange, inner: int, outer: int) -> tuple[int, int]:
    """(inner, outer) as the exchange uses them."""
    if isinstance(exchange, Ulysses):
        return inner * outer, 1
    if exchange.splits_heads:
        return inner, outer
    if inner > 1:
        raise LongmeshError(
            f"exchange {exchange} runs on a mesh of 1 axis, given ranks=({inner}, {outer}); "
            f"use Hybrid(outer={exchange}()), or ranks={inner * outer}"
        )
    return 1, outer


@functools.lru_cache(maxsize=256)
def _choose(request: Request) -> AttentionPlan:
    """The plan of the request, with `auto` replaced by what is fastest."""
    layouts, exchanges = [request.layout], [request.exchange]
    if isinstance(request.layout, Auto):
        layouts = auto_layouts(request.is_one_sequence)
    if isinstance(request.exchange, AutoExchange):
        heads = request.heads.num_heads
        exchanges = auto_exchanges(request.inner, request.outer, heads, request.is_one_sequence)
    pairs = itertools.product(layouts, exchanges)
    plans = [_plan(dataclasses.replace(request, layout=x, exchange=y)) for x, y in pairs]
    if len(plans) == 1:
        return plans[0]
    best, others = fastest(plans)
    return dataclasses.replace(best, passed_over=others)


@functools.lru_cache(maxsize=256)
def _plan(request: Request) -> AttentionPlan:
    exchange, heads = request.exchange, request.heads
    inner, outer = _groups(exchange, request.inner, request.outer)
    layouts = request.layout, request.key_layout
    shares = head_shares(exchange, inner, outer, request.axes, heads)
    rows: list[RowPlan] = []
    for row in range(request.mask.num_rows):
        asked = Asked(request.mask, request.axes, row, heads.num_heads, request.chunk, heads.query_cost)
        cuts = cut_both(*layouts, asked, inner, outer)
        prices = prices_of(heads, request.cluster, inner, outer)
        rows.append(make_row(cuts, slices_in(cuts, asked), exchange, inner, shares, prices))
    _check_rows(rows, request.layout)
    return AttentionPlan(
        axes=request.axes,
        inner=inner,
        outer=outer,
        mask=request.mask,
        layout=request.layout,
        kv_layout=request.key_layout,
        exchange=exchange,
        heads=heads,
        cluster=request.cluster,
        rows=tuple(rows),
    )


def prices_of(heads: HeadSizes, cluster: Cluster, inner: int, outer: int) -> Prices:
    """What travels between groups weighs this much in all heads together."""
    link = cluster.level_of((outer, inner), (0,)).link_of("all_to_all")
    return Prices(heads.key_bytes, heads.query_bytes, heads.result_bytes, link)


def make_row(
    cuts: Cuts, slices: np.ndarray, exchange: Exchange, inner: int, shares: tuple[HeadShare, ...] | None,
    prices: Prices,
) -> RowPlan:  # fmt: skip
    """The plan of one batch row from how it is cut, and slices in the coordinates of that."""
    schedule = make_schedule(slices, cuts.grouped, exchange, cuts.kv_grouped, prices)
    return RowPlan(cuts.owned, schedule, inner, shares, cuts.kv_owned)


def head_shares(
    exchange: Exchange, inner: int, outer: int, axes: SequenceAxes, heads: HeadSizes
) -> tuple[HeadShare, ...] | None:
    """Each rank's heads in a group that splits them, if the exchange does."""
    if not exchange.splits_heads:
        return None
    counts = heads.num_heads, heads.num_kv_heads
    if inner == 1:
        return share_heads(*counts, 1)
    head_bytes = max(axes.seq_len, axes.kv_len) // outer * heads.head_dim * heads.dtype_bytes
    groups = exchange.groups or count_groups(*counts, inner, head_bytes, outer > 1)
    return share_heads(*counts, inner, groups)


def _check_rows(rows: list[RowPlan], layout: TokenLayout) -> None:
    counts = {(row.ownership.counts, row.kv_ownership.counts) for row in rows}
    if len(counts) > 1:
        raise LongmeshError(
            f"layout {layout} gives a rank different numbers of tokens in different batch rows; a batch is "
            "one tensor, so use a layout that does not follow the mask (zigzag), or solve"
        )


def request_for(plan: AttentionPlan, heads: HeadSizes, request: dict[str, Any]) -> dict[str, Any]:
    """The arguments `request` that `plan` was made with, for other heads and the layout that was chosen."""
    return request | heads._asdict() | {"layout": plan.layout, "kv_layout": plan.kv_layout}


def adapt_plan(
    plan: AttentionPlan, heads: HeadSizes, request: dict[str, Any], known: AttentionPlan | None = None
) -> AttentionPlan:
    """The best plan for these heads if it cuts the sequence as `plan` does; else `plan`'s cut and exchange.

    `request`: the arguments that `plan` was made with; `known`: the best plan, if it was made ahead.
    """
    if heads == plan.heads:
        return plan
    fresh = plan_attention(**request_for(plan, heads, request)) if known is None else known
    pairs = zip(plan.rows, fresh.rows, strict=True)
    if all(_cut(old) == _cut(new) for old, new in pairs):
        return fresh
    shares = head_shares(plan.exchange, plan.inner, plan.outer, plan.axes, heads)
    prices = prices_of(heads, plan.cluster, plan.inner, plan.outer)
    rows: list[RowPlan] = []
    for number, row in enumerate(plan.rows):
        grouped = row.schedule.ownership, row.schedule.kv_ownership
        cuts = Cuts(row.ownership, grouped[0], row.kv_ownership, grouped[1])
        asked = Asked(plan.mask, plan.axes, number, heads.num_heads, 1, heads.query_cost)
        rows.append(make_row(cuts, slices_in(cuts, asked), plan.exchange, row.inner, shares, prices))
    return dataclasses.replace(plan, rows=tuple(rows), passed_over=(), heads=heads)


def _cut(row: RowPlan) -> tuple:
    return tuple((owned.pieces, owned.stride) for owned in (row.ownership, row.kv_ownership))
