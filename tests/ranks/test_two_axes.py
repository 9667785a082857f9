"""Attention of queries to keys that are other tokens, on real ranks, against dense float64: output and gradients.

Lengths are uneven, prime or 0, and either side may be the longer one; layouts of both sides, exchanges and masks vary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from longmesh.attention import Cheapest, ContextParallel, Hybrid, Ring, Sparse, Ulysses, masks
from longmesh.comm import record_comm
from longmesh.testing.mesh import cpu_mesh
from support.attention_reference import check_close, inputs
from support.two_axes import (
    Case,
    assert_exact_or_refused,
    check_case,
    every_fifth,
    falling,
    near_thirds,
    run_drawn,
)

EXCHANGES = ("ring", "allgather", Ulysses(groups=2), Sparse(min_tokens=2), "cheapest", "auto")
LAYOUTS = (  # of queries, of keys
    ("auto", None),
    ("contiguous", "zigzag"),
    ("zigzag", "round_robin"),
    ("striped", "striped"),
    ("solve", "contiguous"),
    ("per_document", "per_document"),
)
EVERY = tuple(itertools.product(LAYOUTS, EXCHANGES))
LENGTHS = ((5, 23), (23, 5), (1, 17), (11, 11), (2, 31), (0, 7), (7, 0))


def check_cases(mesh_shape, cases: list[Case]) -> int:
    return sum(check_case(mesh_shape, case) for case in cases)


def on_ranks(pool, mesh_shape, cases: list[Case]) -> None:
    ranks = math.prod(mesh_shape)
    number = sum(len(case.choices) for case in cases)
    assert pool.run(check_cases, mesh_shape, cases, ranks=ranks, timeout=300.0) == [number] * ranks


def masks_for(T: int, K: int) -> list[masks.Mask]:
    found = [
        masks.causal(),
        masks.full(),
        masks.sliding_window(4, 1),
        masks.prefix_lm(min(3, K)),
        masks.documents([T // 2, 0, T - T // 2], kv_lengths=[K // 3, 0, K - K // 3]),
    ]
    if T <= K:  # these speak of positions among the keys, and queries must stand there
        found += [masks.mask_mod(near_thirds, block=8), masks.documents([K // 2, K - K // 2])]
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_mask_layout_and_exchange(pool, ranks):
    heads, dtypes = ((4, 2), (3, 1), (6, 3), (1, 1)), (torch.float32, torch.float64, torch.bfloat16)
    cases = []
    for number, (T, K) in enumerate(LENGTHS):
        for turn, mask in enumerate(masks_for(T, K)):
            H, G = heads[(number + turn) % 4]
            choices = EVERY[(number + turn) % 9 :: 9]
            B, E = 1 + turn % 2, (8, 6, 10)[turn % 3]
            dtype = dtypes[(number + turn) % 3]
            cases.append(Case(T, K, mask, B=B, H=H, G=G, E=E, dtype=dtype, choices=choices))
    on_ranks(pool, (ranks,), cases)


def test_groups_of_ranks_that_split_heads(pool):
    choices = tuple(
        itertools.product(LAYOUTS[::2], ("hybrid", Hybrid(outer=Ring(), groups=2), Hybrid(Cheapest())))
    )
    cases = [Case(T, K, mask, E=6, choices=choices) for T, K in LENGTHS for mask in masks_for(T, K)[::3]]
    on_ranks(pool, (2, 2), cases)


def test_values_that_are_a_part_of_the_keys(pool):
    choices = tuple(itertools.product((("auto", None), ("contiguous", "zigzag")), EXCHANGES))
    shapes = ((5, 23, 4, 1, 6), (9, 9, 4, 2, 8), (23, 4, 3, 3, 1), (0, 3, 2, 1, 4))
    cases = [
        Case(T, K, masks.causal(), B=2, H=H, G=G, E=E, dtype=dtype, v_in_k=True, choices=choices)
        for T, K, H, G, E in shapes
        for dtype in (torch.float64, torch.bfloat16)
    ]
    on_ranks(pool, (3,), cases)
    on_ranks(pool, (2, 2), [dataclasses.replace(c, choices=((("auto", None), "hybrid"),)) for c in cases])


def test_options_number_queries_and_keys_by_themselves(pool):
    draw = torch.Generator().manual_seed(1)
    bias, sinks = torch.randn((1, 4, 5, 13), generator=draw), torch.randn(4, generator=draw)
    choices = tuple(itertools.product((("contiguous", "zigzag"),), ("ring", "sparse", "ulysses")))
    cases = [
        Case(5, 13, masks.causal(), choices=choices, options={"bias": bias, "sinks": sinks}),
        Case(5, 13, masks.causal(), choices=choices, options={"bias": bias[..., :1, :], "scale": 0.3}),
        Case(5, 13, masks.full(), choices=choices, options={"dropout_p": 0.4, "dropout_seed": 7}),
        Case(5, 13, masks.causal(), choices=choices, options={"score_mod": falling}),
        Case(5, 13, masks.causal(), q_offset=2, choices=choices, options={"score_mod": falling}),
        Case(13, 5, masks.mask_mod(every_fifth, rows=2), B=2, q_offset=0, choices=choices),
        Case(13, 5, masks.documents([[5, 8], [13, 0]], kv_lengths=[[1, 4], [3, 2]]), B=2, choices=choices),
    ]
    on_ranks(pool, (2,), cases)


def check_lse(mesh_shape) -> bool:
    """The log-sum-exp of unequal lengths, and its gradient, with values inside the keys, too."""
    q, k, v, _ = inputs(1, 4, 2, 5, 8, 8, torch.float64, 11)
    for v_in_k in (False, True):
        cp = ContextParallel(
            cpu_mesh(*mesh_shape), seq_len=5, kv_len=11, head_dim=8, v_head_dim=8, num_heads=4, num_kv_heads=2,
            v_in_k=v_in_k, exchange="sparse", layout="contiguous",
        )  # fmt: skip
        leaves = [t.clone().requires_grad_() for t in (q, k)]
        score = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 8**-0.5
        hidden = torch.arange(11) > torch.arange(5)[:, None] + 6
        want = score.masked_fill(hidden, -torch.inf).logsumexp(-1)
        want_grads = torch.autograd.grad(want.square().sum(), leaves)
        local = [cp.shard(q, 2).requires_grad_(), cp.shard_kv(k, 2).requires_grad_()]
        _, lse = cp.with_lse(*local, *(() if v_in_k else (cp.shard_kv(v, 2),)))
        grads = torch.autograd.grad(lse.square().sum(), local)
        check_close("lse", lse.detach(), cp.shard(want.detach(), 2), torch.float64)
        check_close("dq", grads[0], cp.shard(want_grads[0], 2), torch.float64)
        check_close("dk", grads[1], cp.shard_kv(want_grads[1], 2), torch.float64)
    return True


def test_one_sequence_with_what_is_lighter_travelling(pool):
    """The same exchange where queries and keys are the same tokens, with blocks away from home besides."""
    documents = masks.documents([3, 11, 2, 7])
    choices = tuple(
        (pair, Cheapest(min_tokens=2)) for pair in (("zigzag", None), ("solve", None), ("ordered", None))
    )
    heads = ((4, 4), (8, 1), (4, 1))
    cases = [
        Case(23, 23, mask, H=H, G=G, E=E, choices=choices)
        for (H, G), E in zip(heads, (8, 1, 8), strict=True)
        for mask in (documents, masks.causal(), masks.sliding_window(5))
    ]
    on_ranks(pool, (3,), cases)


def sent_and_planned() -> list[tuple[int, int]]:
    """What this rank sends in a forward, and what the plan says. Collective."""
    found = []
    exchanges = ("ring", "allgather", "sparse", "ulysses", "cheapest")
    for exchange, (T, K), dtype in itertools.product(
        exchanges, ((1, 70), (37, 21)), (torch.float32, torch.float64)
    ):
        for H, G, D, E, inside in ((4, 2, 8, 8, False), (6, 1, 8, 4, True)):
            cp = ContextParallel(
                cpu_mesh(3), seq_len=T, kv_len=K, exchange=exchange, layout="contiguous", num_heads=H, num_kv_heads=G,
                head_dim=D, v_head_dim=E, v_in_k=inside, dtype=dtype, check=False,
            )  # fmt: skip
            q, k, v = (
                torch.zeros(size, dtype=dtype)
                for size in (
                    (1, H, cp.num_tokens, D),
                    (1, G, cp.num_kv_tokens, D),
                    (1, G, cp.num_kv_tokens, E),
                )
            )
            given = (q, k) if inside else (q, k, v)
            cp(*given)  # ranks agree at the first call
            with record_comm() as log:
                cp(*given)
            found.append((log.total_bytes, cp.plan.stats()[cp.rank].sent_bytes))
    return found


def test_recorded_bytes_are_those_of_the_plan(pool):
    for of_rank in pool.run(sent_and_planned, ranks=3):
        assert [sent for sent, _ in of_rank] == [planned for _, planned in of_rank]
        assert sum(sent > 0 for sent, _ in of_rank) > 10


def test_log_sum_exp_of_unequal_lengths(pool):
    assert pool.run(check_lse, (3,), ranks=3) == [True] * 3


def refuse(mesh_shape) -> list[str]:
    """What each wrong call says, on every rank."""
    cp = ContextParallel(cpu_mesh(*mesh_shape), seq_len=4, kv_len=10, head_dim=8, num_heads=2)
    inside = ContextParallel(
        cpu_mesh(*mesh_shape), seq_len=4, kv_len=10, head_dim=8, v_head_dim=6, v_in_k=True, num_heads=2
    )
    q, k = torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 5, 8)
    calls = [
        lambda: cp(q, q, q),
        lambda: cp(q, k),
        lambda: cp(q, k, k, bias=torch.zeros(4, 4)),
        lambda: cp.shard(k, 2),
        lambda: cp.shard_kv(k, 2),
        lambda: cp.unshard_kv(q, 2),
        lambda: inside(q, k, k),
        lambda: inside(q[..., :4], k[..., :4]),
    ]
    return [error_of(call) for call in calls]


def error_of(call) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def test_wrong_calls_are_errors_on_every_rank(pool):
    expected = [
        "this rank has 2 of 4 queries and 5 of 10 keys, given q (1, 2, 2, 8), k (1, 2, 2, 8)",
        "or make the plan with v_in_k=True, where values are a part of the keys",
        "does not broadcast to (1, 2, 4, 10) (batch, heads, seq_len, kv_len)",
        "shard(dim=2): the tensor is (1, 2, 5, 8), but the sequence has 4 tokens; give the dim that holds the tokens",
        "shard_kv(dim=2): the tensor is (1, 2, 5, 8), but the sequence has 10 keys; give the dim that holds the keys",
        "unshard_kv(dim=2): the tensor is (1, 2, 2, 8), but this rank's part has 5 keys",
        "v_in_k: the values are the first 6 features of the keys, so pass q and k only; given v (1, 2, 5, 8)",
        "v_in_k: the values are the first 6 features of the keys, given k (1, 2, 5, 4)",
    ]
    for said in pool.run(refuse, (2,), ranks=2):
        for text, part in zip(said, expected, strict=True):
            assert part in text


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_drawn_cases_are_exact_or_refused(pool, ranks):
    seeds = list(range(ranks * 1000, ranks * 1000 + 25))
    assert_exact_or_refused(pool.run(run_drawn, ranks, seeds, ranks=ranks, timeout=120.0), most_refused=0.3)
