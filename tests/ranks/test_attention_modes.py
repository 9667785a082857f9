"""Attention inside what users wrap around it, what travels, and that it travels while computing."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from longmesh.attention import ContextParallel, masks
from longmesh.attention.driver import Task, run_forward
from longmesh.attention.kernel.base import Score
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.comm import record_comm
from longmesh.comm.p2p import Pending
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


def bytes_of_plan_and_run(mesh_shape, mask, layout, exchange):
    options = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "chunk": 64}
    with record_comm() as log:
        cp = ContextParallel(
            cpu_mesh(*mesh_shape), seq_len=1021, mask=mask, layout=layout, exchange=exchange, **options
        )
    assert not log.events
    q, k = torch.randn(1, 4, cp.num_tokens, 8), torch.randn(1, 2, cp.num_tokens, 8)
    with record_comm() as log:
        cp(q, k, k)
    return log.total_bytes, cp.plan.stats()[cp.rank].sent_bytes


def test_what_is_sent_is_what_the_plan_says(pool):
    documents = masks.documents([300, 21, 400, 300])
    for mesh_shape, mask, layout, exchange in (
        ((3,), documents, "solve", "sparse"),
        ((3,), documents, "zigzag", "ring"),
        ((3,), masks.sliding_window(50), "contiguous", "ring"),
        ((3,), masks.causal(), "zigzag", "allgather"),
        ((3,), masks.causal(), "zigzag", "ulysses"),
        ((2, 2), documents, "zigzag", "hybrid"),
    ):
        ranks = mesh_shape[0] * (mesh_shape[1] if len(mesh_shape) > 1 else 1)
        results = pool.run(
            bytes_of_plan_and_run, mesh_shape, mask, layout, exchange, ranks=ranks, timeout=300.0
        )
        for sent, planned in results:
            assert sent == planned, (mask, layout, exchange)


STEP = 0.08


class Until:
    """A piece of work that ends at a given time."""

    def __init__(self, end: float) -> None:
        self.end = end

    def wait(self) -> None:
        time.sleep(max(0.0, self.end - time.perf_counter()))


class SlowTask(Task):
    def start(self, move, source_SW) -> Pending:
        pending = super().start(move, source_SW)
        pending.works.append(Until(time.perf_counter() + STEP))  # type: ignore[arg-type]
        return pending


class SlowKernel(CpuFlash):
    def forward(self, *args, **kwargs):
        time.sleep(STEP)
        return super().forward(*args, **kwargs)


def time_of_slow_ring():
    cp = ContextParallel(cpu_mesh(4), seq_len=16, mask=masks.full(), layout="contiguous", exchange="ring")
    q = torch.randn(1, 8, 4, 64)
    cp(q, q, q)
    heads = cp._plan_heads(8, 8, 64, 4)
    task = SlowTask(heads.routes[0], SlowKernel(), Score(), heads.outer, heads.inner)
    start = time.perf_counter()
    run_forward(task, q, q, q)
    return time.perf_counter() - start


def test_transfers_are_under_way_while_computing(pool):
    """Four stages of one step each; in turn with three transfers it would be seven steps."""
    assert min(min(pool.run(time_of_slow_ring, ranks=4, timeout=300.0)) for _ in range(2)) < 5.5 * STEP


def compiled(exchange, layout, backend):
    torch._dynamo.reset()
    mask = masks.documents([11, 18])
    cp = ContextParallel(cpu_mesh(2), seq_len=29, mask=mask, layout=layout, exchange=exchange, chunk=4)
    x = cp.shard(torch.randn(2, 29, 16), dim=1)
    weight = torch.randn(16, 48, requires_grad=True)
    want = layer(cp, x, weight)
    (dwant,) = torch.autograd.grad(want.square().sum(), weight)
    fn = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        out = fn(cp, x, weight)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), weight)[0], dwant)
    return True


# torch itself warns of torch.jit when it loads its compiler.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled_is_one_graph(pool):
    for exchange, layout in (("ring", "zigzag"), ("ulysses", "zigzag"), ("sparse", "solve")):
        assert pool.run(compiled, exchange, layout, "aot_eager", ranks=2, timeout=300.0) == [True] * 2


class Layer(torch.nn.Module):
    def __init__(self, cp) -> None:
        super().__init__()
        self.cp = cp
        draw = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(16, 48, generator=draw, dtype=torch.float64))

    def forward(self, x):
        return layer(self.cp, x, self.weight)


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


def errors_against_float64(dtype):
    """The greatest errors of output and gradients: on the ranks, and by one process."""
    cp = ContextParallel(cpu_mesh(4), seq_len=500, layout="zigzag", exchange="ring")
    whole = [torch.randn(1, 4, 500, 32).to(dtype) for _ in range(4)]

    def run(attend, tensors):
        *qkv, dout = tensors
        qkv = [t.detach().requires_grad_() for t in qkv]
        out = attend(*qkv)
        return [out.detach(), *torch.autograd.grad(out, qkv, dout)]

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    exact = run(plain, [t.double() for t in whole])
    ours = [cp.unshard(t, dim=2) for t in run(cp, [cp.shard(t, dim=2) for t in whole])]
    return [
        [float((t.double() - e).abs().max()) for t, e in zip(found, exact, strict=True)]
        for found in (ours, run(plain, whole))
    ]


def test_errors_do_not_grow_with_the_ranks(pool):
    for dtype in (torch.float32, torch.bfloat16):
        ours, single = pool.run(errors_against_float64, dtype, ranks=4, timeout=300.0)[0]
        for mine, other in zip(ours, single, strict=True):
            assert mine <= 2 * other, (dtype, ours, single)
