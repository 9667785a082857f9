"""flex_attention in one process, its log-sum-exp, its masks over a cut sequence, and DTensors cut otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention as torch_flex_attention,
)
from torch.utils.checkpoint import checkpoint

import longmesh
from longmesh import Replicate, Shard, distribute_tensor
from longmesh.attention import masks
from longmesh.attention.scope.cut_block_mask import create_block_mask_cached, rewrite_mask_mod
from longmesh.attention.scope.flex import create_cp_block_mask, flex_attention
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


def with_lse(mesh, attend, exchange) -> list[torch.Tensor]:
    """Output, log-sum-exp and the gradients of both, over a cut sequence."""
    q, k, v, _ = inputs()
    parts = [q.clone(), k.clone(), v.clone(), *(t.clone() for t in weights())]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 5, exchange=exchange):
        local = [p.clone().requires_grad_() for p in parts[:3]]
        out, lse = attend(*local)
        ((out * parts[3]).sum() + (lse * parts[4]).sum()).backward()
        found = [out.detach(), lse.detach(), *(t.grad for t in local)]
        return context_parallel_unshard(mesh, found, [2] * 5)


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return torch.randn(2, 4, LENGTH, 8, generator=draw), torch.randn(2, 4, LENGTH, generator=draw)


def dense_with_lse(mask_mod, slopes) -> list[torch.Tensor]:
    q, k, v = (t.double().requires_grad_() for t in inputs()[:3])
    slopes = slopes.detach().double().requires_grad_()
    at = torch.arange(LENGTH)
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5 + slopes[:, None, None] * (at[:, None] - at).abs()
    scores = scores.masked_fill(~dense(mask_mod, 4), -torch.inf)
    out, lse = scores.softmax(-1) @ v.repeat_interleave(2, 1), scores.logsumexp(-1)
    (out * weights()[0]).sum().add((lse * weights()[1]).sum()).backward()
    return [t.detach().float() for t in (out, lse, q.grad, k.grad, v.grad, slopes.grad)]


def lse_of_every_way(ranks: int) -> dict[str, float]:
    mesh, worst = cpu_mesh(ranks), {}
    whole = create_block_mask(by_head, None, 4, LENGTH, LENGTH, device="cpu")
    options = {"block_mask": whole, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
    for exchange in ("ring", "ulysses", "sparse"):
        slopes = inputs()[3].requires_grad_()

        def attend(*qkv, slopes=slopes):
            out, aux = flex_attention(*qkv, lambda s, b, h, i, j: s + slopes[h] * (i - j).abs(), **options)
            assert aux.max_scores is None
            return out, aux.lse

        found = with_lse(mesh, attend, exchange)
        torch.distributed.all_reduce(slopes.grad)
        worst[exchange] = largest_difference([*found, slopes.grad], dense_with_lse(by_head, slopes))
    parts = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in inputs()[:3]]
    of_out, of_lse = (distribute_tensor(t, mesh, [Shard(2)]) for t in weights())
    out, lse = longmesh.flex_attention(*parts, None, whole, enable_gqa=True, return_lse=True)
    assert lse.placements == (Shard(2),)
    ((out * of_out).sum() + (lse * of_lse).sum()).backward()
    found = [t.full_tensor().detach() for t in (out, lse, *(p.grad for p in parts))]
    worst["DTensor"] = largest_difference(found, dense_with_lse(by_head, torch.zeros(4))[:5])
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_log_sum_exp_and_its_gradient(pool, ranks):
    for worst in pool.run(lse_of_every_way, ranks, ranks=ranks):
        assert len(worst) == 4 and max(worst.values()) < 1e-4, worst


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_the_log_sum_exp_is_returned_as_torch_returns_it():
    q, k, v, _ = inputs(4)
    (out, lse), (_, aux) = (flex_attention(q, k, v, **{n: a}) for n, a in RETURNED.items())
    expected, theirs = torch_flex_attention(q, k, v, return_aux=AuxRequest(lse=True))
    assert torch.equal(lse, aux.lse)
    torch.testing.assert_close((out, lse), (expected, theirs.lse))
    assert flex_attention(q, k, v, return_aux=AuxRequest())[1] == AuxOutput()
    q.requires_grad_()
    flex_attention(q, k, v, return_lse=True)[1].sum().backward()  # of the log-sum-exp alone
    scores = q.detach().clone().requires_grad_()
    (scores @ k.mT / 8**0.5).logsumexp(-1).sum().backward()
    torch.testing.assert_close(q.grad, scores.grad)


RETURNED = {"return_lse": True, "return_aux": AuxRequest(lse=True)}


def recomputed(ranks: int) -> list[torch.Tensor]:
    """Gradients through a checkpoint inside a scope; afterwards, and where it is reentrant, it is refused."""
    mesh, parts = cpu_mesh(ranks), [t.clone() for t in inputs(4)[:3]]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
        local = [p.clone().requires_grad_() for p in parts]
        checkpoint(flex_attention, *local, use_reentrant=False).square().sum().backward()
        late = checkpoint(flex_attention, *local, use_reentrant=False).square().sum()
        with pytest.raises(LongmeshError, match="use_reentrant=False"):
            checkpoint(flex_attention, *local, use_reentrant=True)
        found = context_parallel_unshard(mesh, [p.grad for p in local], [2] * 3)
    if ranks > 1:
        with pytest.raises(torch.utils.checkpoint.CheckpointError):
            late.backward()
    return found


def test_checkpoints_recompute_inside_the_scope_and_raise_after_it(pool):
    q, k, v = (t.double().requires_grad_() for t in inputs(4)[:3])
    F.scaled_dot_product_attention(q, k, v).square().sum().backward()
    expected = [t.grad.float() for t in (q, k, v)]
    for ranks in (1, 2):
        for found in pool.run(recomputed, ranks, ranks=ranks):
            assert largest_difference(found, expected) < 1e-4


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


def masks_again(ranks: int) -> bool:
    """A mask is made once, and again after what its function captured has changed: so are the plans from it."""
    mesh, length = cpu_mesh(ranks), 300  # several blocks of a BlockMask
    document = (torch.arange(length) >= 44).long()
    q, k, v = (torch.randn(1, 2, length, 8) for _ in range(3))
    parts = context_parallel_shard(mesh, [q, k, v], [2, 2, 2])

    def own_documents(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    def attend() -> torch.Tensor:
        with context_parallel(mesh, buffers=[torch.zeros(length)], buffer_seq_dims=[0]):
            mine = create_cp_block_mask(own_documents, None, None, length, length, mesh)
            assert create_cp_block_mask(own_documents, None, None, length, length, mesh) is mine
            return context_parallel_unshard(mesh, [flex_attention(*parts, block_mask=mine)], [2])[0]

    kept = masks.mask_mod(own_documents) & masks.full()

    def attend_with_mask() -> torch.Tensor:
        with context_parallel(mesh, buffers=[torch.zeros(length)], buffer_seq_dims=[0], mask=kept):
            return context_parallel_unshard(mesh, [F.scaled_dot_product_attention(*parts)], [2])[0]

    for _ in range(2):
        seen = document[:, None] == document
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        torch.testing.assert_close(attend(), expected)
        torch.testing.assert_close(attend_with_mask(), expected)
        document.copy_(document.flip(0).clone())
    return True


def test_masks_of_functions_that_captured_something_else_now(pool):
    assert pool.run(masks_again, 2, ranks=2) == [True] * 2


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
    text(lambda: flex_attention(q, k, v, **RETURNED))
    text(lambda: flex_attention(q, k, v, return_aux=AuxRequest(max_scores=True)))
    text(lambda: flex_attention(q, k[:, :2], v[:, :2]))
    text(lambda: create_cp_block_mask(causal, None, None, 8, 9, mesh))
    text(lambda: context_parallel_shard(mesh, [q, k[:, :, :5]], [2, 2]))
    with context_parallel(mesh, buffers=[torch.zeros(LENGTH)], buffer_seq_dims=[0]):
        text(lambda: flex_attention(q, k, v))
        text(lambda: flex_attention(*parts, block_mask=wrong))
    return texts


def test_bad_input_is_told_with_the_fix(pool):
    expected = [
        "return_aux=AuxRequest(lse=True) alone",
        "max_scores",
        "enable_gqa=True",
        "how the keys are cut",
    ]
    expected += ["lengths [37, 5]", "uncut", "Q_LEN=37"]
    for texts in pool.run(refusals, 2, ranks=2):
        assert len(texts) == len(expected)
        for text, part in zip(texts, expected, strict=True):
            assert part in text


def style_refusal(ranks: int) -> str:
    model = nn.Sequential(nn.Identity())
    parallelize_module(model, cpu_mesh(ranks), {"0": AttentionParallel(seq_dim=3)})
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
