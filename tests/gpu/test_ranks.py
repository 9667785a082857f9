"""Several GPUs: the doctor, exchanges, transfers that run beside kernels, and memory."""

import json
import subprocess
import sys

import pytest
import torch

RANKS = torch.cuda.device_count()
several = pytest.mark.skipif(0 < RANKS < 2, reason="needs 2 GPUs; this machine has 1")

OVERLAP = """
import torch, torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from longmesh import init_device_mesh
from longmesh.attention import ContextParallel, masks
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
S = 1 << 15
how = {"layout": "zigzag", "exchange": "ring", "num_heads": 16, "head_dim": 128, "dtype": torch.bfloat16}
cp = ContextParallel(mesh, seq_len=S, mask=masks.causal(), **how)
q, k, v = (torch.randn(1, 16, cp.num_tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
cp(q, k, v)
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
with profile(activities=[ProfilerActivity.CUDA]) as trace:
    cp(q, k, v)
    torch.cuda.synchronize()
spans = [(e.name, e.time_range.start, e.time_range.end) for e in trace.events()]
sends = [s for s in spans if "nccl" in s[0].lower()]
computes = [s for s in spans if "flash" in s[0].lower() or "fmha" in s[0].lower()]
assert sends and computes, spans[:20]
assert any(a[1] < b[2] and b[1] < a[2] for a in sends for b in computes), "no transfer runs beside a kernel"
peak, own = torch.cuda.max_memory_allocated() - before, q.numel() * 2
assert peak < 12 * own, (peak, own)
dist.destroy_process_group()
"""


@several
def test_the_doctor(tmp_path):
    path = tmp_path / "doctor.json"
    done = subprocess.run(
        [sys.executable, "-m", "longmesh", "doctor", "--json", str(path)], check=False, timeout=600
    )
    problems = [f for f in json.loads(path.read_text())["findings"] if f["problem"]]
    assert done.returncode == 0 and problems == []


@several
def test_transfers_run_beside_kernels(tmp_path):
    script = tmp_path / "overlap.py"
    script.write_text(OVERLAP)
    command = [sys.executable, "-m", "longmesh", "run", "--ranks", str(RANKS), str(script)]
    subprocess.run(command, check=True, timeout=600)


@several
def test_attention_grid_on_ranks(tmp_path):
    script = tmp_path / "grid.py"
    script.write_text(GRID)
    command = [sys.executable, "-m", "longmesh", "run", "--ranks", str(RANKS), str(script)]
    subprocess.run(command, check=True, timeout=1200)


GRID = """
import torch, torch.distributed as dist
from torch.nn import functional as F
from longmesh import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from longmesh.attention import ContextParallel, masks
dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
S, draw = 509, torch.Generator().manual_seed(0)
whole = [torch.randn(1, 8, S, 64, generator=draw).bfloat16() for _ in range(3)]
leaves = [t.double().requires_grad_() for t in whole]
want = F.scaled_dot_product_attention(*leaves, is_causal=True)
grads = torch.autograd.grad(want.sum(), leaves)
for layout in ("contiguous", "zigzag", "striped", "round_robin", "solve"):
    for exchange in ("ring", "allgather", "sparse", "ulysses"):
        how = {"layout": layout, "exchange": exchange, "num_heads": 8, "dtype": torch.bfloat16}
        cp = ContextParallel(mesh, seq_len=S, mask=masks.causal(), **how)
        mine = [cp.shard(t.cuda(), dim=2).requires_grad_() for t in whole]
        out = cp(*mine)
        got = torch.autograd.grad(out.sum(), mine)
        for a, b in zip((out.detach(), *got), (want.detach(), *grads)):
            assert torch.allclose(cp.unshard(a, dim=2).double().cpu(), b, atol=0.1, rtol=0.05), (layout, exchange)
a, b = torch.randn(64, 48), torch.randn(48, 32)
for x in ([Shard(0)], [Shard(1)], [Replicate()]):
    for y in ([Shard(0)], [Shard(1)], [Replicate()]):
        c = distribute_tensor(a.cuda(), mesh, x) @ distribute_tensor(b.cuda(), mesh, y)
        assert torch.allclose(c.full_tensor().cpu(), a @ b, atol=1e-3)
dist.destroy_process_group()
"""
