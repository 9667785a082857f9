"""plan_attention: from choices to a plan, checked and cached. It communicates nothing."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from longmesh.attention.exchange.auto import AutoExchange
from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.hybrid import Hybrid
from longmesh.attention.exchange.named import exchange_of
from longmesh.attention.exchange.ring import Ring
from longmesh.attention.exchange.sparse import Sparse
from longmesh.attention.exchange.ulysses import HeadShare, Ulysses, count_groups, share_heads
from longmesh.attention.layout.auto import Auto
from longmesh.attention.layout.base import Layout, Ownership, Workload, collect, even_bounds
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.named import layout_of
from longmesh.attention.layout.solve import Solve
from longmesh.attention.layout.zigzag import Zigzag
from longmesh.attention.mask.band import causal
from longmesh.attention.mask.base import Mask
from longmesh.attention.mask.slices import stride_slices
from longmesh.attention.mask.whole_number import whole_number
from longmesh.attention.plan.attention_plan import AttentionPlan, PassedOver, RowPlan
from longmesh.attention.plan.schedule import make_schedule
from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster
from longmesh.plan.named_clusters import cluster_of

AS_FAST = 1.01  # times the best: predictions are no better than this, and ranks must not differ by a rounding


def plan_attention(
    *,
    seq_len: int,
    ranks: int | Sequence[int],
    mask: Mask | None = None,
    layout: Layout | str = "auto",
    exchange: Exchange | str = "auto",
    chunk: int = 512,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    head_dim: int = 64,
    dtype_bytes: int = 4,
    cluster: Cluster | str | None = None,
) -> AttentionPlan:
    """Decide who owns, computes and sends what, for every rank.

    `ranks` is a number, or (inner, outer): groups of `inner` ranks that split heads, `outer` of them.
    `cluster` is the machine that `auto` chooses for: a `Cluster`, or the name of one. The same arguments give the same
    plan, bit for bit, on every rank; it is cached.

    >>> plan = plan_attention(seq_len=16384, ranks=8, mask=masks.documents([9000, 300, 7084]))
    >>> print(plan.layout, plan.exchange, [stats.tokens for stats in plan.stats()])
    Solve Ulysses [2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048]
    """
    inner, outer = _mesh(ranks)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    counts = {
        "seq_len": seq_len,
        "chunk": chunk,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "dtype_bytes": dtype_bytes,
    }
    request = Request(
        inner=inner,
        outer=outer,
        mask=causal() if mask is None else checked_mask(mask).current(),
        layout=layout_of(layout),
        exchange=exchange_of(exchange),
        cluster=cluster_of(cluster),
        **_checked_counts(counts),
    )
    return _choose(request)


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of a plan, checked: the key of the cache."""

    seq_len: int
    inner: int
    outer: int
    mask: Mask
    layout: Layout
    exchange: Exchange
    chunk: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    cluster: Cluster


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
            f"mask={mask!r} is no mask; use one of longmesh.attention.masks, such as masks.causal(), or wrap "
            "a function of (b, h, q_idx, kv_idx) in masks.mask_mod(fn)"
        )
    return mask


def _checked_counts(counts: dict[str, int]) -> dict[str, int]:
    counts = {name: whole_number(name, value) for name, value in counts.items()}
    for name, value in counts.items():
        if value < 1 and "heads" not in name:
            raise LongmeshError(f"{name}={value}: must be at least 1")
    heads, kv_heads = counts["num_heads"], counts["num_kv_heads"]
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise LongmeshError(
            f"{kv_heads} key heads do not divide {heads} query heads; each key head serves the same number"
        )
    return counts


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
def _slices(mask: Mask, seq_len: int, row: int, num_heads: int) -> np.ndarray:
    out = mask.slices(seq_len, row=row, num_heads=num_heads)
    out.flags.writeable = False
    return out


@functools.lru_cache(maxsize=256)
def _workload(mask: Mask, seq_len: int, row: int, num_heads: int, chunk: int, query_cost: float) -> Workload:
    return Workload(_slices(mask, seq_len, row, num_heads), seq_len, chunk, query_cost)


@functools.lru_cache(maxsize=256)
def _assign(layout: Layout, work: Workload, ranks: int) -> Ownership:
    """The cut, once for all exchanges that are tried with it."""
    return layout.assign(work, ranks)


@functools.lru_cache(maxsize=256)
def _choose(request: Request) -> AttentionPlan:
    """The plan of the request, with `auto` replaced by the cheapest choice; the first wins a tie."""
    layouts, exchanges = [request.layout], [request.exchange]
    if isinstance(request.layout, Auto):
        layouts = [Contiguous(), Zigzag(), Solve()]
    if isinstance(request.exchange, AutoExchange):
        exchanges = [Hybrid()] if request.inner > 1 else [Sparse(), Ring(), Ulysses()]
        if request.num_heads < request.inner * request.outer:
            exchanges = exchanges[:2]  # some ranks would have no head
    # The layout is chosen under the first exchange, then the exchange for that layout.
    first = _by_time([dataclasses.replace(request, layout=x, exchange=exchanges[0]) for x in layouts])
    best, *slower = _by_time([dataclasses.replace(first[0], exchange=x) for x in exchanges])
    return dataclasses.replace(_plan(best), passed_over=tuple(map(_passed_over, (*first[1:], *slower))))


def _passed_over(request: Request) -> PassedOver:
    return PassedOver(request.layout, request.exchange, _plan(request).predict())


def _by_time(requests: list[Request]) -> list[Request]:
    """The fastest first; of those that are as good as equal, the first."""
    if len(requests) == 1:
        return requests
    times = [_plan(request).predict().total_us for request in requests]
    best = next(i for i, us in enumerate(times) if us <= min(times) * AS_FAST)
    order = sorted(range(len(times)), key=lambda i: (i != best, times[i]))
    return [requests[i] for i in order]


@functools.lru_cache(maxsize=256)
def _plan(request: Request) -> AttentionPlan:
    exchange, seq_len = request.exchange, request.seq_len
    inner, outer = _groups(exchange, request.inner, request.outer)
    heads = request.num_heads, request.num_kv_heads
    shares = head_shares(exchange, inner, outer, seq_len, *heads, request.head_dim * request.dtype_bytes)
    rows: list[RowPlan] = []
    for row in range(request.mask.num_rows):
        work = _workload(request.mask, seq_len, row, heads[0], request.chunk, query_cost(request))
        owned, grouped = own_tokens(request.layout, work, inner, outer)
        slices = work.slices if grouped.stride == 1 else stride_slices(work.slices, grouped.stride, seq_len)
        rows.append(RowPlan(owned, make_schedule(slices, grouped, exchange), inner, shares))
    _check_rows(rows, request.layout)
    return AttentionPlan(
        seq_len=seq_len,
        inner=inner,
        outer=outer,
        mask=request.mask,
        layout=request.layout,
        exchange=exchange,
        num_heads=request.num_heads,
        num_kv_heads=request.num_kv_heads,
        head_dim=request.head_dim,
        dtype_bytes=request.dtype_bytes,
        cluster=request.cluster,
        rows=tuple(rows),
    )


def head_shares(
    exchange: Exchange, inner: int, outer: int, seq_len: int, num_heads: int, num_kv_heads: int, element_bytes: int
) -> tuple[HeadShare, ...] | None:  # fmt: skip
    """Each rank's heads in a group that splits them, if the exchange does; `element_bytes`: a token of one head."""
    if not exchange.splits_heads:
        return None
    if inner == 1:
        return share_heads(num_heads, num_kv_heads, 1)
    head_bytes = seq_len // outer * element_bytes
    groups = exchange.groups or count_groups(num_heads, num_kv_heads, inner, head_bytes, outer > 1)
    return share_heads(num_heads, num_kv_heads, inner, groups)


def query_cost(request: Request) -> float:
    """Bytes to compute a query away from home, over the bytes of a key and its value."""
    query = request.num_heads * (request.head_dim * request.dtype_bytes + (request.head_dim + 1) * 4)
    return query / (2 * request.num_kv_heads * request.head_dim * request.dtype_bytes)


def own_tokens(layout: Layout, work: Workload, inner: int, outer: int) -> tuple[Ownership, Ownership]:
    """Who owns which tokens: rank by rank, and group by group as the exchange sees it."""
    if inner == 1:
        owned = _assign(layout, work, outer)
        return owned, owned
    if layout.follows_mask and outer > 1:  # balance the groups, then deal a group's tokens to its ranks
        grouped = _assign(layout, work, outer)
        return _subdivide(grouped, inner), grouped
    owned = _assign(layout, work, inner * outer)
    if outer == 1:
        return owned, collect(work.seq_len, 1, [(0, work.seq_len, 0)])
    return owned, _join_groups(owned, inner)


def _join_groups(owned: Ownership, inner: int) -> Ownership:
    spans = [(*span, rank // inner) for rank, pieces in enumerate(owned.pieces) for span in pieces]
    return collect(owned.seq_len, owned.num_ranks // inner, spans, owned.stride)


def _subdivide(grouped: Ownership, inner: int) -> Ownership:
    """A group's tokens, in its order, dealt evenly to its ranks."""
    owned: list[tuple[int, int, int]] = []
    for group, pieces in enumerate(grouped.pieces):
        bounds = even_bounds(grouped.counts[group], inner)
        at = 0
        for start, stop in pieces:
            for member in range(inner):
                low, high = max(at, bounds[member]), min(at + stop - start, bounds[member + 1])
                if low < high:
                    owned.append((start + low - at, start + high - at, group * inner + member))
            at += stop - start
    return collect(grouped.seq_len, grouped.num_ranks * inner, owned, grouped.stride)


def _check_rows(rows: list[RowPlan], layout: Layout) -> None:
    counts = {row.ownership.counts for row in rows}
    if len(counts) > 1:
        raise LongmeshError(
            f"layout {layout} gives a rank different numbers of tokens in different batch rows; a batch is "
            "one tensor, so use a layout that does not follow the mask (zigzag), or solve"
        )
