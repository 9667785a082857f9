"""flex_attention in one process and over a cut sequence, and attention modules under the style that cuts them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import longmesh
from longmesh import Replicate, Shard, distribute_tensor
from longmesh.attention import ContextParallel, masks
from longmesh.attention.cut_block_mask import create_block_mask_cached, rewrite_mask_mod
from longmesh.attention.flex import create_cp_block_mask, flex_attention
from longmesh.errors import LongmeshError
from longmesh.experimental import context_parallel, context_parallel_shard, context_parallel_unshard
from longmesh.parallel import AttentionParallel, parallelize_module
from longmesh.testing import cpu_mesh

LENGTH = 37
DOCUMENT = torch.repeat_interleave(torch.arange(3), torch.tensor([11, 20, 6]))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 7)


def documents(b, h, q_idx, kv_idx):
    return (DOCUMENT[q_idx] == DOCUMENT[kv_idx]) & (q_idx >= kv_idx)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 <= h


def dense(mask_mod, heads: int) -> torch.Tensor:
    at = torch.arange(LENGTH)
    return torch.stack([mask_mod(0, torch.tensor(h), at[:, None], at) for h in range(heads)])


def reference(q, k, v, mask_mod, slopes, heads: int):
    """Dense, in double precision, with every gradient."""
    q, k, v, slopes = (t.detach().double().requires_grad_() for t in (q, k, v, slopes))
    at = torch.arange(LENGTH)
    bias = slopes[:, None, None] * (at[:, None] - at).abs()
    if mask_mod is not None:
        bias = bias.masked_fill(~dense(mask_mod, heads), -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, bias[None].expand(q.shape[0], -1, -1, -1), enable_gqa=True)
    out.square().sum().backward()
    return [t.detach().float() for t in (out, q.grad, k.grad, v.grad, slopes.grad)]


def inputs(kv_heads: int = 2):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, LENGTH, 8, generator=generator)
    k, v = (torch.randn(2, kv_heads, LENGTH, 8, generator=generator) for _ in range(2))
    return q, k, v, -torch.rand(4, generator=generator)


def largest_difference(found, expected) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mask_mod", [None, causal, window, documents, by_head])
def test_one_process_forward_and_gradients(mask_mod):
    q, k, v, slopes = (t.requires_grad_() for t in inputs())
    block_mask = None
    if mask_mod is not None:
        block_mask = create_block_mask(mask_mod, None, 4, LENGTH, LENGTH, device="cpu")
    out = flex_attention(
        q, k, v, lambda s, b, h, i, j: s + slopes[h] * (i - j).abs(), block_mask, enable_gqa=True
    )
    out.square().sum().backward()
    found = [out.detach(), q.grad, k.grad, v.grad, slopes.grad]
    assert largest_difference(found, reference(*inputs()[:3], mask_mod, inputs()[3], 4)) < 1e-4


def cut_against_reference(ranks: int, length: int | None = None) -> dict[str, float]:
    mesh, worst = cpu_mesh(ranks), {}
    for mask_mod in (None, causal, window, documents, by_head):
        q, k, v, slopes = inputs()
        slopes.requires_grad_()
        parts = [t.clone() for t in (q, k, v)]
        whole = (
            None if mask_mod is None else create_block_mask(mask_mod, None, 4, LENGTH, LENGTH, device="cpu")
        )
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
            local = [p.clone().requires_grad_() for p in parts]
            mine = None if mask_mod is None else create_cp_block_mask(mask_mod, None, 4, LENGTH, LENGTH, mesh)

            def score_mod(s, b, h, i, j, slopes=slopes):
                return s + slopes[h] * (i - j).abs()

            out = flex_attention(*local, score_mod, whole, enable_gqa=True)
            again = flex_attention(*local, score_mod, mine, enable_gqa=True)
            assert torch.equal(out, again)
            out.square().sum().backward()
            found = context_parallel_unshard(mesh, [out.detach(), *(p.grad for p in local)], [2] * 4)
        torch.distributed.all_reduce(slopes.grad)
        expected = reference(q, k, v, mask_mod, slopes, 4)
        worst[getattr(mask_mod, "__name__", "none")] = largest_difference([*found, slopes.grad], expected)
    return worst


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_cut_sequence_forward_and_gradients(pool, ranks):
    for worst in pool.run(cut_against_reference, ranks, ranks=ranks):
        assert max(worst.values()) < 1e-4, worst


def cut_masks(ranks: int):
    mesh = cpu_mesh(ranks)
    whole = create_block_mask(documents, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=8)
    tokens = torch.arange(LENGTH)
    local, positions = context_parallel_shard(mesh, [whole, tokens], [0, 0])
    mine = create_cp_block_mask(documents, None, None, LENGTH, LENGTH, mesh)
    assert isinstance(local, BlockMask) and local.seq_lengths == mine.seq_lengths == (len(positions), LENGTH)
    rows = torch.arange(len(positions))
    rewritten = rewrite_mask_mod(documents, positions)(0, 0, rows[:, None], tokens)
    return torch.equal(
        rewritten, documents(0, 0, positions[:, None], tokens)
    ), local.mask_mod is not documents


def test_block_masks_are_cut_by_rows_and_see_global_positions(pool):
    assert pool.run(cut_masks, 3, ranks=3) == [(True, True)] * 3


def test_block_masks_are_made_once():
    made = create_block_mask_cached(causal, None, None, LENGTH, LENGTH)
    assert create_block_mask_cached(causal, None, None, LENGTH, LENGTH) is made
    assert create_block_mask_cached(window, None, None, LENGTH, LENGTH) is not made


def refusals(ranks: int) -> list[str]:
    mesh, texts = cpu_mesh(ranks), []
    q, k, v, _ = inputs(4)

    def text(call) -> None:
        try:
            call()
        except LongmeshError as error:
            texts.append(str(error))

    wrong = create_block_mask(causal, None, None, 16, 16, device="cpu")
    parts = context_parallel_shard(mesh, [q, k, v], [2, 2, 2])
    text(lambda: flex_attention(q, k, v, return_lse=True))
    text(lambda: flex_attention(q, k[:, :2], v[:, :2]))
    text(lambda: create_cp_block_mask(causal, None, None, 8, 9, mesh))
    text(lambda: context_parallel_shard(mesh, [q, k[:, :, :5]], [2, 2]))
    with context_parallel(mesh, buffers=[torch.zeros(LENGTH)], buffer_seq_dims=[0]):
        text(lambda: flex_attention(q, k, v))
        text(lambda: flex_attention(*parts, block_mask=wrong))
    return texts


def test_bad_input_is_told_with_the_fix(pool):
    expected = ["return_lse", "enable_gqa=True", "one length", "lengths [37, 5]", "uncut", "Q_LEN=37"]
    for texts in pool.run(refusals, 2, ranks=2):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text


class Attention(nn.Module):
    def __init__(self, flex: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.flex = flex

    def forward(self, x: torch.Tensor, block_mask: BlockMask | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        if self.flex:
            out = flex_attention(q, k, v, block_mask=block_mask)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self, flex: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(flex) for _ in range(2))

    def forward(self, x: torch.Tensor, block_mask: BlockMask | None = None) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x, block_mask)
        return x


def styled(ranks: int) -> list[float]:
    mesh, worst = cpu_mesh(ranks), []
    x = torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(1))
    block_mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    lengths = masks.documents([11, 20, 6])
    cases = [
        (False, {}, None, {}),
        (True, {"seq_len": LENGTH}, block_mask, {}),
        (
            False,
            {"layout": "solve", "mask": lengths, "seq_len": LENGTH},
            None,
            {"mask": lengths, "layout": "solve"},
        ),
    ]
    for flex, options, given, scope in cases:
        plain, model = Model(flex), Model(flex)
        parallelize_module(model, mesh, {"layers.*": AttentionParallel(**options)})
        cut = ContextParallel(mesh, seq_len=LENGTH, **{"layout": "zigzag", **scope})
        part = cut.shard(x, 1)
        out = model(part, given)
        out.square().sum().backward()
        found = cut.unshard(out.detach(), 1)
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
        expected = one_process(plain, x, given, scope)
        worst.append((found - expected).abs().max().item())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            worst.append((ours.grad - theirs.grad).abs().max().item() / theirs.grad.abs().max().item())
    return worst


def one_process(plain: Model, x, block_mask, scope: dict) -> torch.Tensor:
    if scope:  # the documents' mask by FlexAttention, and the same weights
        for layer in plain.layers:
            layer.flex = True
        block_mask = create_block_mask(documents, None, None, LENGTH, LENGTH, device="cpu")
    out = plain(x, block_mask)
    out.square().sum().backward()
    return out.detach()


@pytest.mark.parametrize("ranks", [2, 3])
def test_modules_under_the_style_train_as_one_process(pool, ranks):
    assert max(max(w) for w in pool.run(styled, ranks, ranks=ranks)) < 1e-4


def style_refusal(ranks: int) -> str:
    model = Model(False)
    parallelize_module(model, cpu_mesh(ranks), {"layers.*": AttentionParallel(seq_dim=3)})
    with pytest.raises(LongmeshError) as found:
        model(torch.zeros(1, 4, 16))
    return str(found.value)


def test_the_style_says_what_it_was_given(pool):
    assert all("seq_dim=3" in text and "(1, 4, 16)" in text for text in pool.run(style_refusal, 2, ranks=2))


def on_dtensors(mesh_shape, placements) -> dict[str, float]:
    mesh, worst = cpu_mesh(*mesh_shape, names=("a", "b", "c")[: len(mesh_shape)]), {}
    for mask_mod in (None, causal, documents, by_head):
        q, k, v, slopes = inputs()
        slopes.requires_grad_()
        parts = [distribute_tensor(t, mesh, placements).requires_grad_() for t in (q, k, v)]
        heads = 4 if mask_mod is by_head else None
        whole = (
            None
            if mask_mod is None
            else create_block_mask(mask_mod, None, heads, LENGTH, LENGTH, device="cpu")
        )

        def score_mod(s, b, h, i, j, slopes=slopes):
            return s + slopes[h] * (i - j).abs()

        out = longmesh.flex_attention(*parts, score_mod, whole, enable_gqa=True)
        assert out.placements == parts[0].placements
        out.square().sum().backward()
        found = [t.full_tensor().detach() for t in (out, *(p.grad for p in parts))]
        torch.distributed.all_reduce(slopes.grad)
        expected = reference(q, k, v, mask_mod, slopes, 4)
        copies = sum(mesh.size(a) for a, p in enumerate(placements) if p == Replicate()) or 1
        slopes.grad /= copies
        worst[getattr(mask_mod, "__name__", "none")] = largest_difference([*found, slopes.grad], expected)
    return worst


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), [Shard(2)]),
        ((2,), [Shard(1)]),
        ((3,), [Shard(0)]),
        ((2, 2), [Shard(1), Shard(2)]),
        ((2, 2), [Shard(2), Shard(0)]),
        ((2, 2), [Shard(2), Replicate()]),
    ],
)
def test_dtensors_cut_over_tokens_heads_and_batch(pool, mesh_shape, placements):
    ranks = torch.Size(mesh_shape).numel()
    for worst in pool.run(on_dtensors, mesh_shape, placements, ranks=ranks):
        assert max(worst.values()) < 1e-4, worst
