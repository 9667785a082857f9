"""Plans carried out by the real driver and kernels on simulated ranks: exact, as planned, in memory and in time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from longmesh.attention import (
    UNBOUNDED,
    AttentionPlan,
    Exchange,
    Hybrid,
    Ring,
    Sparse,
    Ulysses,
    masks,
    plan_attention,
)
from longmesh.attention.execute.route import part
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.layout.named import LAYOUTS
from longmesh.attention.mask.block import Block
from longmesh.attention.mask.slices import area, make_slices, union
from support.attention_reference import check_close, inputs, reference
from support.exchanges import ON_ONE_AXIS, ON_TWO_AXES
from support.simulated_ranks import Clock, Network, attend


@dataclasses.dataclass(frozen=True)
class Slices(masks.Mask):
    """The union of any slices (q0, q1, k0, k1, lo, hi), which may overlap."""

    given: tuple[tuple[int, ...], ...]

    def slices(self, seq_len: int, *, row: int = 0, num_heads: int = 1) -> np.ndarray:
        return functools.reduce(union, [make_slices(one) for one in self.given])

    def visible(self, b, h, q_idx, kv_idx):
        def inside(q0, q1, k0, k1, lo, hi):
            rows = (q_idx >= q0) & (q_idx < q1) & (kv_idx >= k0) & (kv_idx < k1)
            return rows & (kv_idx - q_idx >= lo) & (kv_idx - q_idx <= hi)

        return functools.reduce(operator.or_, [inside(*one) for one in self.given])


@st.composite
def unions_of_slices(draw, seq_len: int) -> Slices:
    bound = st.integers(0, seq_len)
    edge = st.one_of(st.none(), st.integers(-seq_len, seq_len))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        (q0, q1), (k0, k1) = (sorted(draw(st.tuples(bound, bound))) for _ in range(2))
        lo, hi = draw(edge), draw(edge)
        lo, hi = sorted((-UNBOUNDED if lo is None else lo, UNBOUNDED if hi is None else hi))
        found.append((q0, q1, k0, k1, lo, hi))
    return Slices(tuple(found))


class Counting(CpuFlash):
    """Counts the pairs that all ranks together compute in forward, for each head."""

    def __init__(self) -> None:
        self.pairs = 0
        self._lock = threading.Lock()

    def forward(self, work, state=None):
        pairs = int(area(make_slices(*(tuple(block[:6]) for block in work.blocks))).sum())
        with self._lock:
            self.pairs += pairs * work.q_BHSD.shape[1]
        return super().forward(work, state)


@given(st.data())
@settings(max_examples=60)
def test_unions_of_slices_on_any_ranks(data):
    S, ranks = data.draw(st.integers(1, 47)), data.draw(st.integers(1, 6))
    two_axes = data.draw(st.booleans())
    H, G = data.draw(st.sampled_from([(4, 4), (4, 2), (3, 1)]))
    mask = data.draw(unions_of_slices(S))
    plan = plan_attention(
        seq_len=S,
        ranks=(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))) if two_axes else ranks,
        mask=mask,
        layout=data.draw(st.sampled_from(sorted(LAYOUTS))),
        exchange=data.draw(st.sampled_from(ON_TWO_AXES if two_axes else ON_ONE_AXIS)),
        chunk=data.draw(st.integers(1, 9)),
        num_heads=H,
        num_kv_heads=G,
        head_dim=8,
        dtype_bytes=8,
    )
    *qkv, dout = inputs(1, H, G, S, 8, 8, torch.float64)
    kernel, network = Counting(), Network()
    found, want = attend(plan, [*qkv, dout], kernel=kernel, network=network), reference(qkv, dout, mask)
    for name, got, expected in zip(("out", "dq", "dk", "dv"), found, want, strict=True):
        check_close(name, got, expected, torch.float64)
    stats = plan.stats()
    assert sum(s.area for s in stats) * H == pytest.approx(kernel.pairs)
    # The plan counts partial results in fp32, as they are for all inputs but fp64.
    if not plan.rows[0].ownership.moved:
        assert [s.sent_bytes for s in stats] == [network.sent_bytes.get(s.rank, 0) for s in stats]
        assert [s.received_bytes for s in stats] == [network.received_bytes.get(s.rank, 0) for s in stats]


def uncut_plan(ranks: int, exchange: Exchange | str, S: int = 16) -> AttentionPlan:
    """Every rank sees every key: all stages of all ranks have work."""
    return plan_attention(seq_len=S, ranks=ranks, mask=masks.full(), layout="contiguous", exchange=exchange)


@pytest.mark.parametrize("layout", ["zigzag", "round_robin", "solve"])
def test_sparse_receives_the_least_that_the_layout_allows(layout):
    """Of what a rank computes: the keys and queries it does not own, each once, and results of its own queries."""
    S, heads = 201, {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8}
    mask = masks.documents([70, 30, 1, 100])
    plan = plan_attention(seq_len=S, ranks=4, mask=mask, layout=layout, exchange="sparse", chunk=8, **heads)
    owned, i = plan.rows[0].ownership, torch.arange(S)
    owner = np.empty(S, dtype=int)
    for rank in range(4):
        owner[owned.positions(rank)] = rank
    computes = np.repeat(owner[:, None], S, axis=1)
    for q0, q1, k0, k1, rank in owned.moved:
        computes[q0:q1, k0:k1] = rank
    assert bool(owned.moved) == (layout == "solve")
    seen = mask.visible(0, 0, i[:, None], i).numpy()
    network = Network()
    attend(plan, inputs(1, 2, 2, S, 8, 8, torch.float32)[:3], backward=False, network=network)
    for rank in range(4):
        mine = seen & (computes == rank)
        keys = (mine.any(axis=0) & (owner != rank)).sum()
        queries = (mine.any(axis=1) & (owner != rank)).sum()
        away = [(seen & (computes == other)).any(axis=1) for other in range(4) if other != rank]
        results = sum(int((rows & (owner == rank)).sum()) for rows in away)
        least = keys * 2 * 2 * 8 * 4 + queries * 2 * 8 * 4 + results * 2 * 9 * 4
        assert network.received_bytes.get(rank, 0) == least


class LiveBuffers(TorchDispatchMode):
    """The most buffers of given sizes that were alive at once, counted from storages."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.sizes, self.most = sizes, dict.fromkeys(sizes, 0)
        self._alive: dict[str, dict[int, StorageWeakRef]] = {name: {} for name in sizes}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        for name, size in self.sizes.items():
            alive = self._alive[name]
            if storage.nbytes() == size:
                alive[storage._cdata] = StorageWeakRef(storage)
            for key in [key for key, ref in alive.items() if ref.expired()]:
                del alive[key]
            self.most[name] = max(self.most[name], len(alive))


def most_alive(ranks: int, dtype: torch.dtype, half: str) -> dict[str, int]:
    """Buffers of keys and values, and of their gradients, that a ring held at once on a rank, inputs aside."""
    H, G, D, E, tokens = 6, 1, 8, 12, 10  # no other tensor has these sizes
    plan = uncut_plan(ranks, "ring", S=tokens * ranks)
    shard = tokens * G * (D + E)
    found: list[LiveBuffers] = []

    def watch(which: str) -> LiveBuffers:
        mode = LiveBuffers({"kv": shard * dtype.itemsize, "dkv": shard * 4})
        if which == half:
            found.append(mode)
        return mode

    attend(plan, inputs(1, H, G, tokens * ranks, D, E, dtype), watch=watch)
    assert len(found) == ranks
    return {name: max(mode.most[name] for mode in found) for name in ("kv", "dkv")}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_holds_three_shards_whatever_the_number_of_ranks(ranks):
    """The own one, the one it computes on and the one that arrives; gradients come on top in backward."""
    assert most_alive(ranks, torch.bfloat16, "forward") == {"kv": 2, "dkv": 0}
    backward = most_alive(ranks, torch.bfloat16, "backward")
    assert backward["kv"] == 2
    # Of the own keys, of the stage's, and on the way: the last stage's, and what arrives for the own keys.
    assert backward["dkv"] == (3 if ranks == 2 else 4)


class Timed(CpuFlash):
    """Takes a given time a stage."""

    def __init__(self, clock: Clock, forward_s: float, backward_s: float) -> None:
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, *args, **kwargs):
        self.clock.now_s += self.forward_s
        return super().forward(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.clock.now_s += self.backward_s
        return super().backward(*args, **kwargs)


def time_on(
    plan: AttentionPlan, *, transfer_s: float, forward_s: float, backward_s: float
) -> dict[str, float]:
    """The slowest rank's seconds for forward and backward, on a network that takes `transfer_s` a transfer."""
    clock, slowest = Clock(), {"forward": 0.0, "backward": 0.0}

    @contextlib.contextmanager
    def watch(half: str):
        start = clock.now_s
        yield
        slowest[half] = max(slowest[half], clock.now_s - start)

    tensors = inputs(1, plan.heads.num_heads, plan.heads.num_kv_heads, plan.seq_len, 8, 8, torch.float32)
    networks = {"network": Network(transfer_s, clock), "way_back": Network(transfer_s, clock)}
    attend(plan, tensors, kernel=Timed(clock, forward_s, backward_s), watch=watch, **networks)
    return slowest


@pytest.mark.parametrize(
    ("exchange", "ranks", "stages"),
    [("ring", 4, 4), ("ring", 8, 8), ("allgather", 3, 2), ("sparse", 3, 2), (Sparse(3, min_tokens=1), 4, 4)],
)
def test_transfers_are_under_way_while_computing(exchange, ranks, stages):
    """Forward takes what computing takes; in backward the last gradients' way home comes on top."""
    plan = uncut_plan(ranks, exchange)
    assert plan.rows[0].schedule.num_stages == stages
    found = time_on(plan, transfer_s=0.02, forward_s=0.05, backward_s=0.15)
    assert found["forward"] == pytest.approx(stages * 0.05)
    assert found["backward"] == pytest.approx(stages * 0.15 + 0.02)
    assert found["backward"] < 1.1 * stages * 0.15


@pytest.mark.parametrize(("exchange", "ranks"), [("allgather", 3), ("sparse", 3)])
def test_the_last_gradients_go_home_while_computing(exchange, ranks):
    """Where there is enough to compute, some blocks of the own keys are left for the end."""
    lengths = [300, *[600] * (2 * ranks - 1), 300]  # three in each shard, two of them shared with a neighbour
    mask = masks.documents(lengths, within=masks.full())
    plan = plan_attention(
        seq_len=1200 * ranks, ranks=ranks, mask=mask, layout="contiguous", exchange=exchange
    )
    calls = [sum(bool(stage.blocks) for stage in plan.rows[0].rank(rank).stages) for rank in range(ranks)]
    found = time_on(plan, transfer_s=0.02, forward_s=0.05, backward_s=0.15)
    assert found["forward"] == pytest.approx(max(calls) * 0.05)
    assert found["backward"] == pytest.approx(
        (max(calls) + 1) * 0.15
    )  # the kernel takes its time at every call


def test_parts_of_blocks_are_the_blocks():
    for blocks in (
        (Block(0, 1024, 0, 1024, hi=0),),
        (Block(0, 700, 0, 700, hi=0), Block(700, 710, 0, 64), Block(710, 1500, 64, 1500, lo=-99, hi=3)),
        (Block(0, 3, 0, 1 << 19), Block(3, 6, 0, 1 << 19)),
        (Block(0, 8, 0, 8), Block(8, 16, 8, 16)),
        tuple(Block(n, n + 100, n, n + 100) for n in range(0, 4000, 100)),
        (),
    ):
        first, later = part(blocks)
        assert first + later == blocks
        assert pairs(later) <= pairs(blocks) / 2
        assert not later or pairs(blocks) >= 1 << 18
    assert len(later_of(40)) == 20 and later_of(1) == later_of(2)[:0]


def later_of(count):
    return part(tuple(Block(n, n + 400, n, n + 400) for n in range(0, 400 * count, 400)))[1]


def pairs(blocks):
    return int(area(np.array(blocks, dtype=np.int64).reshape(-1, 7)).sum())


@pytest.mark.parametrize("kv_heads", [16, 1])
def test_groups_of_heads_are_under_way_while_computing(kv_heads):
    """All but the way of the first group to the heads, and of the last one's results back."""
    heads = {"num_heads": 16, "num_kv_heads": kv_heads}
    plan = plan_attention(seq_len=16, ranks=2, layout="zigzag", exchange=Ulysses(groups=8), **heads)
    found = time_on(plan, transfer_s=0.02, forward_s=0.05, backward_s=0.15)
    assert found["forward"] == pytest.approx(8 * 0.05 + 2 * 0.02)
    assert found["forward"] <= 1.1 * 8 * 0.05
    assert found["backward"] == pytest.approx(8 * 0.15 + 2 * 0.02)
    slow = time_on(plan, transfer_s=0.02, forward_s=0.005, backward_s=0.005)
    assert slow["forward"] == pytest.approx(8 * 0.02 + 0.005 + 0.02)
    assert slow["backward"] == pytest.approx(8 * 0.02 + 0.005 + 0.02)


def test_groups_of_heads_and_stages_are_under_way_while_computing():
    """Backward also waits for the gradients of each group's last stage."""
    exchange = Hybrid(outer=Ring(), groups=4)
    plan = plan_attention(seq_len=16, ranks=(2, 3), mask=masks.full(), layout="contiguous", exchange=exchange)
    found = time_on(plan, transfer_s=0.02, forward_s=0.05, backward_s=0.15)
    assert found["forward"] == pytest.approx(4 * 3 * 0.05 + 2 * 0.02)
    assert found["forward"] < 1.1 * 4 * 3 * 0.05
    assert found["backward"] == pytest.approx(4 * (3 * 0.15 + 0.02) + 2 * 0.02)
    assert found["backward"] < 1.1 * 4 * 3 * 0.15


@pytest.mark.parametrize("ranks", [4, 8])
def test_a_slow_ring_is_waited_for_and_nothing_more(ranks):
    """Transfers depend on one another: computing is hidden behind them, but for the last stage."""
    found = time_on(uncut_plan(ranks, "ring"), transfer_s=0.02, forward_s=0.005, backward_s=0.005)
    assert found["forward"] == pytest.approx((ranks - 1) * 0.02 + 0.005)
    assert found["forward"] < 1.1 * (ranks - 1) * 0.02
    assert found["backward"] == pytest.approx((ranks - 1) * 0.02 + 0.005 + 0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("exchange", ["ring", "sparse", "ulysses"])
def test_the_error_on_eight_ranks_is_at_most_twice_that_of_one_process(exchange, dtype):
    *qkv, dout = inputs(1, 8, 8, 509, 32, 32, dtype)
    plan = plan_attention(seq_len=509, ranks=8, layout="zigzag", exchange=exchange, chunk=16)
    ours = [t.to(dtype) for t in attend(plan, [*qkv, dout])]
    leaves = [t.clone().requires_grad_() for t in qkv]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True)
    single = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    for mine, one, exact in zip(ours, single, reference(qkv, dout, masks.causal()), strict=True):
        assert (mine - exact).abs().max() <= 2 * (one - exact).abs().max()
