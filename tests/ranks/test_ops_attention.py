"""F.scaled_dot_product_attention on DTensors: any layout, masks and gradients; batch rows and heads need no message."""

import pytest
import torch
from torch.nn import functional as F

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.op_check import compare_op

attend = F.scaled_dot_product_attention


def operands(batch, heads, rows, keys, size=4, kv_heads=None):
    torch.manual_seed(0)
    kv = (batch, kv_heads or heads, keys, size)
    return [torch.randn(batch, heads, rows, size), torch.randn(kv), torch.randn(kv)]


def compare(mesh_shape):
    whole = torch.randn(5, 7) > -0.5
    whole[:, 0] = True
    added = torch.randn(2, 1, 5, 7)
    cases = [
        (operands(2, 3, 5, 7), {}),
        (operands(2, 3, 7, 7), {"is_causal": True}),
        (operands(2, 3, 5, 7), {"is_causal": True, "scale": 0.3}),
        (operands(2, 3, 7, 2), {"is_causal": True}),
        (operands(2, 3, 5, 7), {"attn_mask": whole}),
        (operands(2, 4, 5, 7, kv_heads=2), {"enable_gqa": True, "is_causal": True}),
        (operands(1, 2, 2, 1), {"is_causal": True}),
    ]
    found = []
    for seed, (tensors, options) in enumerate(cases):
        found += compare_op(
            lambda q, k, v, o=options: attend(q, k, v, **o), tensors, mesh_shape, trials=3, seed=seed
        )
    masked = [*operands(2, 3, 5, 7), added]
    found += compare_op(
        lambda q, k, v, m: attend(q, k, v, attn_mask=m.detach()), masked, mesh_shape, trials=4
    )
    found += compare_op(lambda q, k, v, m: attend(q, k, v, attn_mask=m), masked, mesh_shape, trials=4)
    return found


def without_batch(mesh_shape):
    """Three dims: torch has no fused op for them, and adds the mask to the scores."""
    tensors = [torch.randn(2, 4, 5), torch.randn(2, 3, 5), torch.randn(2, 3, 5)]
    found = compare_op(attend, tensors, mesh_shape, trials=4)
    masked = [*tensors, torch.ones(4, 3).tril()]
    for mask in (lambda m: m, lambda m: m.detach(), lambda m: m > 0.5):
        found += compare_op(
            lambda q, k, v, m, of=mask: attend(q, k, v, attn_mask=of(m)), masked, mesh_shape, trials=4
        )
    return found


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (1,)])
@pytest.mark.parametrize("cases", [compare, without_batch])
def test_as_plain_torch(pool, cases, mesh_shape):
    assert pool.run(cases, mesh_shape, ranks=torch.Size(mesh_shape).numel())[0] == []


def messages():
    mesh = cpu_mesh(2)
    sent = {}
    for name, dim in (("batch", 0), ("heads", 1), ("rows", 2)):
        q, k, v = (
            distribute_tensor(t, mesh, [Shard(dim)], src_data_rank=None).requires_grad_()
            for t in operands(2, 4, 8, 8)
        )
        with record_comm() as log:
            out = attend(q, k, v, is_causal=True)
            out.sum().backward()
        sent[name] = [e.kind for e in log.events], [t.grad.placements for t in (q, k, v)]
    return sent


def test_batch_rows_and_heads_send_nothing(pool):
    for sent in pool.run(messages, ranks=2):
        assert sent["batch"] == ([], [(Shard(0),)] * 3)
        assert sent["heads"] == ([], [(Shard(1),)] * 3)
        assert sent["rows"][0]


def trained_bias():
    mesh = cpu_mesh(2)
    q, k, v = (distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in operands(1, 2, 3, 3))
    try:
        attend(q, k, v, attn_mask=torch.randn(3, 3, requires_grad=True))
    except LongmeshError as error:
        return str(error)
    return ""


def test_a_plain_bias_that_is_trained_is_refused(pool):
    for text in pool.run(trained_bias, ranks=2):
        assert "mixes a DTensor with a plain tensor" in text and "Tensor(3, 3)" in text


def over_tokens(mesh_shape, placements, length, causal):
    """Output and gradients where tokens are cut, and that nobody holds all keys."""
    mesh = cpu_mesh(*mesh_shape)
    whole = [t.requires_grad_() for t in operands(2, 3, length, length)]
    expected = attend(*whole, is_causal=causal)
    expected.square().sum().backward()
    parts = [distribute_tensor(t.detach(), mesh, placements).requires_grad_() for t in whole]
    with record_comm() as log:
        out = attend(*parts, is_causal=causal)
        out.square().sum().backward()
    found = [out, *(p.grad for p in parts)]
    assert all(t.placements == parts[0].placements for t in found)
    kinds = {event.kind for event in log.events}
    pairs = zip(found, [expected, *(w.grad for w in whole)], strict=True)
    return max((f.full_tensor() - e).abs().max().item() for f, e in pairs), sorted(kinds)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((3,), [Shard(2)]),
        ((1,), [Shard(2)]),
        ((2, 2), [Shard(1), Shard(2)]),
        ((2, 2), [Shard(2), Shard(0)]),
        ((2, 2), [Shard(2), Shard(2)]),
    ],
)
@pytest.mark.parametrize(("length", "causal"), [(11, True), (6, False), (2, True)])
def test_cut_tokens_run_the_engine(pool, mesh_shape, placements, length, causal):
    ranks = torch.Size(mesh_shape).numel()
    for worst, kinds in pool.run(over_tokens, mesh_shape, placements, length, causal, ranks=ranks):
        assert worst < 2e-5
        assert "all_gather" not in kinds


def by_cuda_ops(rows):
    """What SDPA calls on CUDA: where tokens are cut the engine runs, here with its CPU kernel."""
    mesh = cpu_mesh(torch.distributed.get_world_size())
    whole = operands(2, 4, rows, rows)
    wanted = [t.clone().requires_grad_() for t in whole]
    out = attend(*wanted, is_causal=True)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, wanted, cotangent)
    q, k, v = (distribute_tensor(t, mesh, [Shard(2)]) for t in whole)
    given = distribute_tensor(cotangent, mesh, [Replicate()])
    aten = torch.ops.aten
    flash = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    efficient = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
    cudnn = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    backwards = [
        aten._scaled_dot_product_flash_attention_backward(
            given, q, k, v, *flash[:6], 0.0, True, flash[6], flash[7]
        ),
        aten._scaled_dot_product_efficient_attention_backward(
            given, q, k, v, None, *efficient, 0.0, [True, True, True, False], True
        ),
        aten._scaled_dot_product_cudnn_attention_backward(
            given, q, k, v, *cudnn[:2], cudnn[6], cudnn[7], None, *cudnn[2:6], 0.0, True
        ),
    ]
    wrong = []
    for name, made, back in zip(
        ("flash", "efficient", "cudnn"), (flash, efficient, cudnn), backwards, strict=True
    ):
        for got, want in zip((made[0], *back[:3]), (out, *grads), strict=True):
            if got.placements != (Shard(2),) or not torch.allclose(got.full_tensor(), want, atol=1e-5):
                wrong.append(name)
    return wrong, flash[4], efficient[2].placements


@pytest.mark.parametrize(("rows", "ranks"), [(7, 3), (2, 3), (5, 1), (32, 2)])
def test_cuda_ops_on_cut_tokens_run_the_engine(pool, rows, ranks):
    assert pool.run(by_cuda_ops, rows, ranks=ranks)[0] == ([], rows, (Replicate(),))


def rows_before_heads():
    """The result is in memory as the query is, and a view of it says so of the whole."""
    mesh = cpu_mesh(2)
    found = []
    for turned in (False, True):
        whole = torch.randn(4, 4, 3, 8)
        whole = whole.transpose(1, 2).contiguous().transpose(1, 2) if turned else whole
        expected = attend(whole, whole, whole).transpose(1, 2).contiguous().view(4, 3, 32)
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(whole, mesh, [placement])
            x = x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x
            result = attend(x, x, x).transpose(1, 2).contiguous().view(4, 3, 32)
            found.append(torch.allclose(result.full_tensor(), expected))
    return found


def test_rows_before_heads(pool):
    assert pool.run(rows_before_heads, ranks=2) == [[True] * 6] * 2
