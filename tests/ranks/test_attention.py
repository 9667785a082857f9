"""Attention on real ranks against dense float64 attention: every mask x exchange x layout, output and every gradient.

A group of cases has one mask, shape and reference; the layouts and exchanges are what varies inside it.
Shapes, head counts, batch sizes and dtypes turn from group to group. Lengths are prime.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import create_block_mask

from longmesh.attention import (
    ContextParallel,
    Hybrid,
    Ownership,
    Ring,
    TokenLayout,
    Ulysses,
    Workload,
    Zigzag,
    masks,
)
from longmesh.testing.mesh import cpu_mesh
from support.attention_reference import check_close, dense, inputs, reference
from support.exchanges import OF_KEYS

LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "round_robin", "solve")
EXCHANGES = (*OF_KEYS, Ulysses(groups=2))
EVERY = (*itertools.product(LAYOUTS, EXCHANGES), ("auto", "auto"))
ON_TWO_AXES = (*itertools.product(LAYOUTS, ("hybrid", Hybrid(outer=Ring(), groups=2))), ("auto", "auto"))
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
HEADS = (
    (4, 2),
    (3, 1),
    (4, 4),
    (6, 3),
    (1, 1),
)  # grouped, one key head, as many, uneven over 2 and 4 ranks, one


@dataclasses.dataclass
class Group:
    """Cases that share a reference. `options` are those of the call."""

    mask: masks.Mask
    S: int = 37
    B: int = 1
    H: int = 4
    G: int = 2
    D: int = 8
    E: int = 8
    dtype: torch.dtype = torch.float32
    chunk: int = 4
    choices: tuple = EVERY  # of layout and exchange
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_group(mesh_shape, group: Group) -> int:
    """Raise if this rank's output or gradients are not the reference's. Collective."""
    *qkv, dout = inputs(group.B, group.H, group.G, group.S, group.D, group.E, group.dtype)
    want = reference(qkv, dout, group.mask, **group.options)
    for layout, exchange in group.choices:
        cp = ContextParallel(
            cpu_mesh(*mesh_shape),
            seq_len=group.S,
            mask=group.mask,
            layout=layout,
            exchange=exchange,
            chunk=group.chunk,
            num_heads=group.H,
            num_kv_heads=group.G,
            head_dim=group.D,
            dtype=group.dtype,
        )
        local = [cp.shard(t, dim=2).requires_grad_() for t in qkv]
        shared = {
            n: group.options[n].clone().requires_grad_() for n in ("bias", "sinks") if n in group.options
        }
        out = cp(*local, **(group.options | shared))
        grads = list(torch.autograd.grad(out, [*local, *shared.values()], cp.shard(dout, dim=2)))
        assert out.dtype == group.dtype and all(g.dtype == group.dtype for g in grads[:3])
        for grad in grads[3:]:
            dist.all_reduce(grad)
        expected = [cp.shard(t, dim=2) for t in want[:4]] + want[4:]
        for name, got, right in zip(("out", "dq", "dk", "dv", *shared), (out, *grads), expected, strict=True):
            check_close(f"{group} {layout} {exchange} {name}", got, right, got.dtype)
    return len(group.choices)


def check_groups(mesh_shape, groups: list[Group]) -> int:
    return sum(check_group(mesh_shape, group) for group in groups)


def on_ranks(pool, mesh_shape, groups: list[Group]) -> None:
    ranks = math.prod(mesh_shape)
    cases = sum(len(group.choices) for group in groups)
    assert pool.run(check_groups, mesh_shape, groups, ranks=ranks, timeout=300.0) == [cases] * ranks


def every_third(b, h, i, j):
    return ((i + j) % 3 == h % 2) & (j <= i)


def by_row(b, h, i, j):
    return (j <= i) & (j >= 5 * b)


def earlier(b, h, i, j):
    return j <= i


def block_mask(S: int) -> masks.Mask:
    return masks.from_block_mask(create_block_mask(earlier, None, None, S, S, device="cpu", BLOCK_SIZE=8))


def all_masks(S: int) -> list[tuple[masks.Mask, int]]:
    """Every mask for a sequence of S >= 23 tokens, with the batch it needs (0: any)."""
    return [
        (masks.full(), 0),
        (masks.causal(), 0),
        (masks.sliding_window(6), 0),
        (masks.sliding_window(3, 9), 0),
        (masks.documents([11, 1, 0, S - 17, 5]), 0),
        (masks.documents([11, S - 11], within=masks.full()), 0),
        (masks.documents([[S - 7, 7], [5, S - 5]]), 2),
        (masks.from_cu_seqlens([0, 9, S], within=masks.sliding_window(4)), 0),
        (masks.prefix_lm(9), 0),
        (masks.chunked(8), 0),
        (masks.causal() & masks.sliding_window(2) | masks.prefix_lm(3), 0),
        (masks.mask_mod(every_third, block=8), 0),
        (masks.mask_mod(by_row, block=8, rows=2), 2),
        (block_mask(S), 0),
    ]


def grid(turn: int, choices: tuple = EVERY, step: int = 1) -> list[Group]:
    """A group for each mask; every `step`th choice, others for the next mask and the next turn."""
    groups = []
    for number, (mask, batch) in enumerate(all_masks((37, 29, 31, 23)[turn % 4])):
        H, G = HEADS[(number + turn) % len(HEADS)]
        groups.append(
            Group(
                mask,
                S=(37, 29, 31, 23)[turn % 4],
                B=batch or 1 + (number + turn) % 2,
                H=H,
                G=G,
                E=8 if (number + turn) % 4 else 12,
                dtype=DTYPES[(number + turn) % len(DTYPES)],
                choices=choices[(number + turn // 2) % step :: step],
            )
        )
    return groups


@pytest.mark.parametrize(("ranks", "step"), [(1, 4), (2, 3), (3, 2), (4, 2)])
def test_every_mask_exchange_and_layout(pool, ranks, step):
    """On 4 ranks those that are not tried on 3. `make soak` tries all of them on 2, 3 and 4."""
    on_ranks(pool, (ranks,), grid(ranks, step=step))


@pytest.mark.parametrize(("mesh_shape", "step"), [((2, 2), 3), ((1, 3), 4), ((3, 1), 4)])
def test_masks_and_layouts_on_two_axes(pool, mesh_shape, step):
    on_ranks(pool, mesh_shape, grid(sum(mesh_shape), ON_TWO_AXES, step))


def test_long_enough_to_leave_a_part_for_the_end(pool):
    """Of the own keys a part is computed while results and gradients go home."""
    choices = (("solve", "sparse"), ("zigzag", "ring"), ("contiguous", "allgather"))
    group = Group(
        masks.documents([1500, 101]), S=1601, B=1, H=2, G=1, E=8, dtype=torch.float32, choices=choices
    )
    on_ranks(pool, (2,), [group])


def test_heads_and_dtypes(pool):
    heads = [(4, 4), (6, 1), (6, 2), (3, 3), (1, 1), (8, 2)]
    choices = tuple(itertools.product(("zigzag",), ("ring", "sparse", "ulysses", Ulysses(groups=3))))
    groups = [
        Group(masks.documents([17, 6, 14]), B=2, H=H, G=G, E=E, dtype=dtype, choices=choices)
        for (H, G), E in zip(heads, (8, 4, 8, 12, 8, 8), strict=True)
        for dtype in DTYPES
    ]
    on_ranks(pool, (3,), groups)


@dataclasses.dataclass(frozen=True)
class Moved(TokenLayout):
    """Head-tail, with blocks that other ranks compute: two of them for the same queries."""

    def assign(self, work: Workload, ranks: int) -> Ownership:
        base = Zigzag().assign(work, ranks)
        moved = ((5, 14, 0, 9, 1), (5, 14, 9, 20, 2 % ranks), (20, 33, 3, 30, 0))
        return dataclasses.replace(base, moved=moved)


def test_blocks_computed_away_from_home(pool):
    choices = tuple(itertools.product([Moved()], ("sparse", "ring", "allgather")))
    groups = [
        Group(mask, B=2, dtype=dtype, choices=choices)
        for mask in (masks.causal(), masks.full(), masks.documents([17, 6, 14]))
        for dtype in DTYPES
    ]
    on_ranks(pool, (3,), groups)
    on_ranks(pool, (2,), groups[::2])


def alibi(score, b, h, i, j):
    return score - (h + 1) * 0.05 * (i - j).abs() + 0.1 * b


def soft_cap(score, b, h, i, j):
    return 2.0 * torch.tanh(score / 2.0)


def test_score_mod_bias_sinks_scale_and_dropout(pool):
    draw = torch.Generator().manual_seed(0)
    bias, sinks = torch.randn(4, 37, 37, generator=draw), torch.randn(4, generator=draw)
    choices: list[dict[str, Any]] = [
        {"score_mod": alibi},
        {"score_mod": soft_cap, "sinks": sinks},
        {"bias": bias},
        {"bias": bias[:1], "scale": 0.3, "sinks": sinks},
        {"sinks": sinks},
        {"dropout_p": 0.3, "dropout_seed": 7},
        {"score_mod": alibi, "bias": bias, "sinks": sinks, "dropout_p": 0.2, "dropout_seed": 1},
    ]
    for ranks, mask in ((1, masks.causal()), (2, masks.sliding_window(9)), (3, masks.documents([20, 17]))):
        groups = [
            Group(mask, B=2, dtype=DTYPES[n % 2], choices=EVERY[(n + ranks) % 5 :: 5], options=options)
            for n, options in enumerate(choices)
        ]
        on_ranks(pool, (ranks,), groups)
    moved = tuple(itertools.product([Moved()], ("ring", "sparse")))
    on_ranks(pool, (3,), [Group(masks.causal(), choices=moved, options=choices[-1])])


def gradients_of_captured_tensors(exchange):
    cp = ContextParallel(cpu_mesh(3), seq_len=23, layout="zigzag", exchange=exchange, chunk=4)
    *qkv, dout = inputs(2, 4, 2, 23, 8, 8, torch.float64)
    slopes = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(attend, qkv, dout):
        slope = slopes.clone().requires_grad_()
        out = attend(*qkv, score_mod=lambda s, b, h, i, j: s + slope[h] * (i - j))
        return torch.autograd.grad(out, slope, dout)[0]

    got = run(cp, [cp.shard(t, dim=2) for t in qkv], cp.shard(dout, dim=2))
    want = run(lambda *x, **options: dense(*x, masks.causal(), **options), qkv, dout)
    dist.all_reduce(got)
    torch.testing.assert_close(got, want)
    return True


def test_gradients_of_captured_tensors_add_up_over_the_ranks(pool):
    for exchange in EXCHANGES:
        assert pool.run(gradients_of_captured_tensors, exchange, ranks=3, timeout=300.0) == [True] * 3


def test_fewer_tokens_than_ranks(pool):
    groups = [Group(masks.causal(), S=S, B=2, chunk=1, choices=EVERY[S % 2 :: 2]) for S in (1, 2, 3)]
    on_ranks(pool, (4,), groups)
    on_two_axes = [dataclasses.replace(group, choices=ON_TWO_AXES[group.S % 2 :: 2]) for group in groups]
    on_ranks(pool, (2, 2), on_two_axes)
