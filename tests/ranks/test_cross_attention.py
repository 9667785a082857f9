"""Cross-attention in scopes, modules and flex_attention: a cut sequence against other keys, as in one process.

Keys are cut by a layout of their own or whole on every rank. Lengths are uneven, prime or 0; float64.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask

from longmesh import flex_attention
from longmesh.attention import ContextParallel, create_cp_block_mask, masks
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.experimental import context_parallel, context_parallel_shard
from longmesh.parallel import AttentionParallel, parallelize_module
from longmesh.testing.mesh import cpu_mesh
from support.attention_reference import check_close, inputs, reference

LAYOUTS = ("whole", None, "contiguous")
LENGTHS = ((19, 7), (7, 29), (13, 0), (2, 41))
H, G, D, E = 4, 2, 8, 6


def every_third(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + h) % 3 != 0


def near(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - 2 * kv_idx).abs()


def bias_of(T: int, K: int) -> torch.Tensor:
    return torch.randn(T, K, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def check_call(mesh, T: int, K: int, kv_layout, scope, attend, mask, **options) -> None:
    """Output and gradients of `attend` in `scope` against the dense reference. Collective."""
    *qkv, dout = inputs(2, H, G, T, D, E, torch.float64, K)
    want = reference(qkv, dout, mask, **options)
    with scope() as cp:
        q = cp.shard(qkv[0], 2).requires_grad_()
        if kv_layout == "whole" or not K:
            keys = [t.clone().requires_grad_() for t in qkv[1:]]
        else:
            keys = [t.requires_grad_() for t in context_parallel_shard(mesh, qkv[1:], [2, 2], kv_layout)]
        out = attend(q, *keys)
        grads = torch.autograd.grad(out, (q, *keys), cp.shard(dout, 2))
        expected = [cp.shard(want[0], 2), cp.shard(want[1], 2)]
    if kv_layout == "whole" or not K:
        grads = [grad.contiguous() for grad in grads]
        for grad in grads[1:]:
            dist.all_reduce(grad)
        expected += want[2:4]
    else:
        expected += context_parallel_shard(mesh, want[2:4], [2, 2], kv_layout or "zigzag")
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *grads), expected, strict=True):
        check_close(f"{T} {K} {kv_layout} {name}", got, right, torch.float64)


def check_scopes(ranks: int) -> list[str]:
    """What is refused without a mask."""
    mesh, refused = cpu_mesh(ranks), []
    sdpa = functools.partial(F.scaled_dot_product_attention, enable_gqa=True)
    for T, K in LENGTHS:
        for kv_layout in LAYOUTS:
            scope = functools.partial(
                context_parallel, mesh, buffers=[torch.zeros(T)], buffer_seq_dims=[0], kv_len=K, kv_layout=kv_layout
            )  # fmt: skip
            run = functools.partial(check_call, mesh, T, K, kv_layout, scope)
            bias, block_mask = bias_of(T, K), None
            run(lambda *qkv, b=bias: sdpa(*qkv, attn_mask=b), masks.full(), bias=bias)
            run(lambda *qkv, b=bias: sdpa(*qkv, attn_mask=b > 0), masks.full(), bias=hidden(bias > 0))
            if K:
                block_mask = create_block_mask(every_third, None, H, T, K, device="cpu")
                run(
                    lambda *qkv, m=block_mask: flex_attention(*qkv, near, m, enable_gqa=True),
                    masks.mask_mod(every_third),
                    score_mod=near,
                )
            try:
                run(sdpa, masks.full())
                run(functools.partial(sdpa, is_causal=True), masks.causal())
            except LongmeshError as error:
                refused.append(str(error))
    return refused


def hidden(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("ranks", [2, 3])
def test_scopes_are_exact_with_other_keys(pool, ranks):
    for refused in pool.run(check_scopes, ranks, ranks=ranks, timeout=120.0):
        # 2 tokens and 41 keys cut over 3 ranks, and 19 and 7 whole: some rank has as many of one as of the other.
        assert len(refused) < len(LENGTHS) * len(LAYOUTS) // 2, refused
        assert all("lengths do not tell which keys a call is given" in text for text in refused), refused


class Cross(nn.Module):
    """Queries against the keys and values of other tokens: (batch, heads, tokens, features) each."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def check_modules(ranks: int) -> int:
    """A module of cross-attention alone is never in doubt, also where a rank has as many keys as tokens."""
    mesh = cpu_mesh(ranks)
    for T, K in (*LENGTHS, (11, 11), (2 * ranks, 2), (1, 1)):
        for kv_layout in LAYOUTS:
            style = AttentionParallel(seq_dim=2, seq_len=T, kv_len=K, kv_layout=kv_layout)
            module = parallelize_module(Cross(), mesh, style)
            scope = functools.partial(context_parallel, mesh, buffers=[torch.zeros(T)], buffer_seq_dims=[0])
            check_call(mesh, T, K, kv_layout, scope, module, masks.full())
    return T


@pytest.mark.parametrize("ranks", [2, 3])
def test_modules_are_exact_with_other_keys(pool, ranks):
    assert pool.run(check_modules, ranks, ranks=ranks, timeout=120.0) == [1] * ranks


def check_block_masks(ranks: int) -> list[int]:
    """The mask of create_cp_block_mask says how keys are cut; whole keys send nothing."""
    mesh, sent = cpu_mesh(ranks), []
    for kv_layout in ("whole", "contiguous", "zigzag"):
        T, K = 17, 23
        block_mask = create_cp_block_mask(every_third, None, H, T, K, mesh, kv_layout=kv_layout)
        assert block_mask is create_cp_block_mask(every_third, None, H, T, K, mesh, kv_layout=kv_layout)
        scope = functools.partial(context_parallel, mesh, buffers=[torch.zeros(T)], buffer_seq_dims=[0])

        def attend(*qkv, m=block_mask):
            return flex_attention(*qkv, near, m, enable_gqa=True)

        with record_comm() as record:
            check_call(mesh, T, K, kv_layout, scope, attend, masks.mask_mod(every_third), score_mod=near)
        sent.append(len(record.events))
    return sent


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_block_mask_says_how_keys_are_cut(pool, ranks):
    for whole, *others in pool.run(check_block_masks, ranks, ranks=ranks, timeout=120.0):
        assert whole == 0
        assert min(others) > 0


def test_flex_attention_has_a_backward_with_two_lengths():
    *qkv, dout = inputs(1, H, G, 5, D, E, torch.float64, 12)
    want = reference(qkv, dout, masks.mask_mod(every_third), score_mod=near)
    block_mask = create_block_mask(every_third, None, H, 5, 12, device="cpu")
    leaves = [t.requires_grad_() for t in qkv]
    out = flex_attention(*leaves, near, block_mask, enable_gqa=True)
    for got, right in zip((out, *torch.autograd.grad(out, leaves, dout)), want, strict=True):
        check_close("flex", got, right, torch.float64)


def check_dropout(ranks: int) -> list[float]:
    """Results are linear in the values that were not dropped: <out, dout> is <v, dv>; of ones they are 1 on average."""
    mesh, T, K, found = cpu_mesh(ranks), 40, 23, []
    for kv_layout in ("whole", None):
        q, k, v, dout = (torch.randn(2, H, n, D, dtype=torch.float64) for n in (T, K, K, T))
        v = torch.ones_like(v) if kv_layout is None else v
        scope = {"buffers": [q], "buffer_seq_dims": [2], "kv_len": K, "kv_layout": kv_layout}
        with context_parallel(mesh, **scope) as cp:
            dist.broadcast(v, 0)
            keys = [k, v.clone()] if kv_layout else context_parallel_shard(mesh, [k, v], [2, 2])
            keys = [t.requires_grad_() for t in keys]
            out = F.scaled_dot_product_attention(q, *keys, dropout_p=0.4)
            dv = torch.autograd.grad(out, keys[1], cp.shard(dout, 2))[0]
            sums = torch.stack([(out * cp.shard(dout, 2)).sum(), (keys[1] * dv).sum(), out.sum()]).detach()
        dist.all_reduce(sums)
        found += [(sums[0] - sums[1]).abs().item(), sums[2].item() / (2 * H * T * D)]
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_dropout_on_other_keys(pool, ranks):
    for whole, _, cut, mean in pool.run(check_dropout, ranks, ranks=ranks):
        assert max(whole, cut) < 1e-10
        assert abs(mean - 1) < 0.1 and mean != 1


def refusals(ranks: int) -> list[str]:
    mesh, texts = cpu_mesh(ranks), []
    tokens = torch.zeros(2 * ranks + 1)  # one rank has 3, the others 2

    def text(attend, **options) -> None:
        try:
            with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[0], **options) as cp:
                attend(torch.randn(1, 1, cp.num_tokens, 4))
        except LongmeshError as error:
            texts.append(str(error))

    def to(num_keys: int, attend=F.scaled_dot_product_attention):
        keys = torch.randn(1, 1, num_keys, 4)
        return lambda q: attend(q, keys, keys)

    text(to(2))  # wrong on one rank, and looks right on the others
    text(to(5, flex_attention))
    text(to(2), kv_len=2, kv_layout="whole")
    text(to(5), kv_len=7, kv_layout="whole")
    text(to(5), kv_layout="whole")
    text(to(5), kv_len=5, kv_layout="solve")
    text(to(5), kv_len=-1)
    text(lambda q: create_cp_block_mask(every_third, None, None, 5, 9, mesh))
    return texts


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_nobody_says_is_refused_on_all_ranks_with_the_remedy(pool, ranks):
    T = 2 * ranks + 1
    expected = [
        f"ContextParallel(mesh, seq_len={T}, kv_len=K)",
        f"ContextParallel(mesh, seq_len={T}, kv_len=K)",
        f"or block_mask over all keys, or call ContextParallel(mesh, seq_len={T}, kv_len=2)",
        "but query, key and value have",
        "give kv_len= too",
        "follows a mask, and calls have several",
        "kv_len=-1: give the number of all keys",
        "ContextParallel(mesh, seq_len=5, kv_len=9)",
    ]
    for texts in pool.run(refusals, ranks, ranks=ranks, timeout=60.0):
        assert len(texts) == len(expected), texts
        for text, part in zip(texts, expected, strict=True):
            assert part in text, text


def check_whole_queries(ranks: int) -> str:
    """Every rank gives all queries, and gets all results and the whole gradient of them."""
    for T, K, options in ((7, 23, {}), (1, 17, {"exchange": "cheapest"}), (19, 19, {"layout": "contiguous"})):
        *qkv, dout = inputs(2, H, G, T, D, E, torch.float64, K)
        want = reference(qkv, dout, masks.causal(), q_offset=K - T)
        cp = ContextParallel(
            cpu_mesh(ranks), seq_len=T, kv_len=K, num_heads=H, num_kv_heads=G, head_dim=D, v_head_dim=E, **options
        )  # fmt: skip
        q = qkv[0].clone().requires_grad_()
        keys = [cp.shard_kv(t, 2).requires_grad_() for t in qkv[1:]]
        out = cp.of_whole_queries(q, *keys)
        grads = torch.autograd.grad(out, (q, *keys), dout)
        expected = [*want[:2], *(cp.shard_kv(t, 2) for t in want[2:])]
        for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *grads), expected, strict=True):
            check_close(f"{T} {K} {options} {name}", got, right, torch.float64)
    wrong = qkv[0][:, :, dist.get_rank() > 0 :]  # one token less, but on the first rank
    with pytest.raises(LongmeshError) as found:
        ContextParallel(cpu_mesh(ranks), seq_len=T).of_whole_queries(wrong, *keys)
    return str(found.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_queries_that_every_rank_has(pool, ranks):
    for text in pool.run(check_whole_queries, ranks, ranks=ranks, timeout=60.0):
        assert "the sequence has 19 tokens" in text
