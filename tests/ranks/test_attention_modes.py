"""Attention inside what users wrap around it, and that what travels is what the plan says."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from longmesh.attention import ContextParallel, Hybrid, Ulysses, masks
from longmesh.attention.execute.op import attend
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.testing.mesh import cpu_mesh


def layer(cp, x, weight):
    """A small attention layer on local tokens (batch, tokens, 16)."""
    q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (x @ weight).chunk(3, -1))
    return cp(q, k, v).transpose(1, 2).flatten(-2)


def under_modes(exchange):
    cp = ContextParallel(cpu_mesh(2), seq_len=29, layout="zigzag", exchange=exchange)
    x = cp.shard(torch.randn(2, 29, 16), dim=1)
    weight = torch.randn(16, 48, requires_grad=True)
    plain = layer(cp, x, weight)
    (want,) = torch.autograd.grad(plain.square().sum(), weight)
    again = checkpoint(layer, cp, x, weight, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(again.square().sum(), weight)[0], want)
    with torch.no_grad():
        silent = layer(cp, x, weight)
    assert not silent.requires_grad
    torch.testing.assert_close(silent, plain)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(cp, x, weight)
        (grad,) = torch.autograd.grad(low.float().square().sum(), weight)
    assert low.dtype == torch.bfloat16 and grad.dtype == torch.float32
    torch.testing.assert_close(low, layer(cp, x.bfloat16(), weight.bfloat16()))
    assert "kernel: cpu_flash" in cp.explain()
    return True


def test_checkpointing_no_grad_and_autocast(pool):
    for exchange in ("ring", "sparse", "ulysses"):
        assert pool.run(under_modes, exchange, ranks=2, timeout=300.0) == [True] * 2


def second_derivatives(with_lse):
    """What a second derivative is told, and the first one that a graph was made for."""
    cp = ContextParallel(cpu_mesh(2), seq_len=9)
    q = cp.shard(torch.randn(1, 2, 9, 4), dim=2).requires_grad_()
    found = cp.with_lse(q, q, q) if with_lse else (cp(q, q, q),)
    loss = sum(t.sum() for t in found) + (q**3).sum()
    (want,) = torch.autograd.grad(loss, q, retain_graph=True)
    (grad,) = torch.autograd.grad(loss, q, create_graph=True)
    torch.testing.assert_close(grad, want)
    with pytest.raises(
        LongmeshError
    ) as error:  # the loss is linear in the output: its gradient there is a constant
        grad.square().sum().backward()
    return str(error.value)


@pytest.mark.parametrize("with_lse", [False, True])
def test_a_second_derivative_is_refused(pool, with_lse):
    for text in pool.run(second_derivatives, with_lse, ranks=2):
        assert text.startswith(
            "attention over a cut sequence has no second derivative: its gradient is computed"
        )
        assert "compute attention from matrix products and softmax" in text


def bytes_of_plan_and_run(mesh_shape, mask, layout, exchange):
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "chunk": 64, "check_kernels": False}
    with record_comm() as log:
        cp = ContextParallel(
            cpu_mesh(*mesh_shape), seq_len=1021, mask=mask, layout=layout, exchange=exchange, **options
        )
    assert not log.events
    q, k = torch.randn(1, 4, cp.num_tokens, 8), torch.randn(1, 2, cp.num_tokens, 8)
    with record_comm() as log:
        cp(q, k, k)
    moved = [e.sent_bytes for e in log.events if e.kind in ("all_to_all", "send_receive")]
    # The rest is the ranks' word that the call is in order: two numbers.
    assert log.counts["all_reduce"] == 1 and log.total_bytes - sum(moved) <= 64
    return sum(moved), cp.plan.stats()[cp.rank].sent_bytes


def test_what_is_sent_is_what_the_plan_says(pool):
    documents = masks.documents([300, 21, 400, 300])
    for mesh_shape, mask, layout, exchange in (
        ((3,), documents, "solve", "sparse"),
        ((3,), documents, "zigzag", "ring"),
        ((3,), masks.sliding_window(50), "contiguous", "ring"),
        ((3,), masks.causal(), "zigzag", "allgather"),
        ((3,), masks.causal(), "zigzag", "ulysses"),
        ((3,), masks.causal(), "zigzag", Ulysses(groups=2)),
        ((2, 2), documents, "zigzag", "hybrid"),
        ((2, 2), documents, "zigzag", Hybrid(groups=2)),
    ):
        ranks = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
        results = pool.run(
            bytes_of_plan_and_run, mesh_shape, mask, layout, exchange, ranks=ranks, timeout=300.0
        )
        for sent, planned in results:
            assert sent == planned, (mask, layout, exchange)


def compiled(exchange, layout, backend, batches=(2,)):
    """Forward and backward in one graph; a second batch size makes the batch a symbol."""
    torch._dynamo.reset()
    mask = masks.documents([11, 18])
    cp = ContextParallel(cpu_mesh(2), seq_len=29, mask=mask, layout=layout, exchange=exchange, chunk=4)
    weight = torch.randn(16, 48, requires_grad=True)
    fn = torch.compile(layer, backend=backend, fullgraph=True)
    for batch in batches:
        x = cp.shard(torch.randn(batch, 29, 16), dim=1)
        want, out = layer(cp, x, weight), fn(cp, x, weight)
        torch.testing.assert_close(out, want)
        expected, found = (torch.autograd.grad(t.square().sum(), weight)[0] for t in (want, out))
        torch.testing.assert_close(found, expected)
    return True


# torch itself warns of torch.jit when it loads its compiler.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_is_one_graph(pool):
    for case in (
        ("ring", "zigzag", "aot_eager", (2, 3)),
        (Ulysses(groups=2), "zigzag", "aot_eager"),
        ("sparse", "solve", "aot_eager"),
    ):
        assert pool.run(compiled, *case, ranks=2, timeout=300.0) == [True] * 2


def check_op(exchange):
    """torch's own checks of a custom op: schema, fake kernel, autograd, ahead-of-time tracing."""
    cp = ContextParallel(cpu_mesh(2), seq_len=13, layout="zigzag", exchange=exchange)
    q, k, v = (torch.randn(1, h, cp.num_tokens, 8, requires_grad=True) for h in (4, 2, 2))
    torch.library.opcheck(attend, (q, k, v, torch.randn(4, requires_grad=True), cp._name, None))
    return True


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_the_op_keeps_what_it_declares(pool):
    for exchange in ("ring", Ulysses(groups=2)):
        assert pool.run(check_op, exchange, ranks=2, timeout=120.0) == [True] * 2


def later(score, b, h, i, j):
    return score - 0.1 * (i - j)


def compiled_around():
    """What the op does not take runs uncompiled between two graphs."""
    torch._dynamo.reset()
    cp = ContextParallel(cpu_mesh(2), seq_len=29, layout="zigzag", exchange="ring")
    q = torch.randn(1, 2, cp.num_tokens, 8, requires_grad=True)

    def run(q):
        return cp(q + 1, q, q, score_mod=later, dropout_p=0.1, dropout_seed=3) * 2

    want, got = run(q), torch.compile(run, backend="aot_eager")(q)
    torch.testing.assert_close(got, want)
    first, second = (torch.autograd.grad(out.sum(), q)[0] for out in (want, got))
    torch.testing.assert_close(second, first)
    return True


# After a graph break torch itself asks a tensor that is no leaf for its gradient, and warns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_functions_and_dropout_break_the_graph(pool):
    assert pool.run(compiled_around, ranks=2, timeout=300.0) == [True] * 2


def compiled_wrongly():
    torch._dynamo.reset()
    cp = ContextParallel(cpu_mesh(2), seq_len=10, layout="contiguous", exchange="ring")
    k = torch.randn(1, 3 if cp.rank else 2, 5, 8)
    fn = torch.compile(lambda q, k: cp(q, k, k) + 1, backend="aot_eager", fullgraph=True)
    try:
        fn(torch.randn(1, 4, 5, 8), k)
    except LongmeshError as error:
        return str(error)
    return "no error"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_one_wrong_rank_is_an_error_on_all_when_compiled(pool):
    for text in pool.run(compiled_wrongly, ranks=2, timeout=60.0):
        assert "3 key heads do not divide 4 query heads" in text


class Layer(torch.nn.Module):
    def __init__(self, cp) -> None:
        super().__init__()
        self.cp = cp
        draw = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, 48, generator=draw, dtype=torch.float64))

    def forward(self, x):
        return x + layer(self.cp, x, self.weight)


def data_parallel(exchange):
    cp = ContextParallel(cpu_mesh(2), seq_len=29, layout="zigzag", exchange=exchange)
    x = torch.randn(2, 29, 16, dtype=torch.float64)
    model = DistributedDataParallel(Layer(cp))
    model(cp.shard(x, dim=1)).square().sum().backward()
    whole = Layer(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    whole(x).square().sum().backward()
    torch.testing.assert_close(model.module.weight.grad, whole.weight.grad / 2)
    return True


def test_inside_ddp_weight_gradients_are_those_of_the_whole_sequence(pool):
    """DDP averages over the ranks, so a loss that is summed over them comes out divided by their number."""
    for exchange in ("ring", "ulysses"):
        assert pool.run(data_parallel, exchange, ranks=2, timeout=300.0) == [True] * 2


def fully_sharded(exchange, mesh_shape):
    """Weight gradients of a model whose weights FSDP2 shards over the first axis, sequences cut over the last."""
    mesh = cpu_mesh(*mesh_shape, names=("dp", "cp")[-len(mesh_shape) :])
    cp = ContextParallel(mesh["cp"], seq_len=29, layout="zigzag", exchange=exchange)
    samples = torch.randn(mesh_shape[0] if len(mesh_shape) == 2 else 1, 29, 16, dtype=torch.float64)
    mine = samples[mesh.get_local_rank("dp")] if len(mesh_shape) == 2 else samples[0]
    model = fully_shard(Layer(cp), mesh=mesh[mesh.mesh_dim_names[0]])
    model(cp.shard(mine[None], dim=1)).square().sum().backward()
    grad = model.weight.grad.full_tensor() * mesh_shape[0]  # FSDP averages
    if len(mesh_shape) == 2:
        dist.all_reduce(grad, group=mesh.get_group("cp"))
    whole = Layer(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    whole(samples).square().sum().backward()
    torch.testing.assert_close(grad, whole.weight.grad)
    return True


def test_inside_fsdp2(pool):
    for exchange in ("ring", "ulysses"):
        assert pool.run(fully_sharded, exchange, (2,), ranks=2, timeout=300.0) == [True] * 2
    assert pool.run(fully_sharded, "sparse", (2, 2), ranks=4, timeout=300.0) == [True] * 4
