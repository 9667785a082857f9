"""Attention inside what users wrap around it, what travels, and that it travels while computing."""

from __future__ import annotations

import time

import torch
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
