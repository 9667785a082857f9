"""The host reads no value of a tensor for an op whose result's shape does not depend on data.

On CPUs indices and classes are looked at, as torch's own kernels do, so that a wrong one raises; a device reports it.
"""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.profiler import profile

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.debug import explain
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from longmesh.testing.device import DeviceCounts
from longmesh.testing.mesh import world_mesh

MASK = torch.ones(6, 6, dtype=torch.bool).tril()
# The host's own generator is read for a seed, and so does torch's kernel of std on whole tensors read.
NOT_ON_CPU = ("std", "dropout", "attention, dropout")
READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero")


def attention_programs(x, mesh):
    """Those that torch computes op by op."""
    q = x.view(6, 2, 6).transpose(0, 1)  # two heads, six tokens
    four = x.view(1, 6, 2, 6).transpose(1, 2)
    mask = distribute_tensor(MASK.to(x.device), mesh, [Replicate()])
    return {
        "attention": lambda: F.scaled_dot_product_attention(four, four, four, attn_mask=mask),
        "attention, 3 dims": lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
        "attention, dropout": lambda: F.scaled_dot_product_attention(
            four, four, four, attn_mask=mask, dropout_p=0.1
        ),
    }


def programs(x, mesh):
    w = distribute_tensor(torch.ones(12, 12, device=x.device), mesh, [Shard(1)])
    return {
        "pointwise": lambda: (x * 2 + x.relu()).exp().clamp(max=3),
        "where": lambda: torch.where(x > 0, x, 0.0),
        "std": lambda: x.std(),
        "reductions": lambda: x.mean() + x.amax(0).sum() + x.norm() + x.logsumexp(0).mean(),
        "scans": lambda: x.cumsum(0) + x.cummax(0)[0],
        "sort": lambda: x.sort(0)[0] + x.topk(6, 0)[0],
        "views": lambda: torch.cat([x[1:4].flip(0), x.roll(1, 0)]).reshape(18, 6),
        "products": lambda: F.linear(x, w).matmul(w).softmax(-1),
        "norm": lambda: F.layer_norm(x, (12,)),
        "dropout": lambda: F.dropout(x, 0.5),
        "convolution": lambda: F.max_pool2d(F.conv2d(x.view(1, 1, 6, 12), w[:3, :3].view(1, 1, 3, 3)), 2),
        "masked": lambda: x.masked_fill(x > 1, 0.0).tril(),
        "redistribute": lambda: x.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]),
        **attention_programs(x, mesh),
    }


def made(mesh, dim):
    placement = Replicate() if dim is None else Shard(dim)
    torch.manual_seed(0)
    whole = torch.randn(6, 12).to(mesh.device_type)
    return distribute_tensor(whole, mesh, [placement]).requires_grad_()


def num_reads(program):
    """Under no mode, which would hide reads: two runs, since the first is planned too."""
    with profile(use_kineto=False) as seen:
        program()
        program()
    events = {event.key: event.count for event in seen.key_averages()}
    assert len(events) > 3, "the profiler saw nothing"
    return sum(events.get(name, 0) for name in READS)


def reads_on_cpu(dim):
    mesh = cpu_mesh(2)
    x = made(mesh, dim)
    chosen = {name: program for name, program in programs(x, mesh).items() if name not in NOT_ON_CPU}
    found = {name: num_reads(lambda p=program: p().sum().backward()) for name, program in chosen.items()}
    assert num_reads(lambda: x.detach().sum().item()) > 0
    return {name: count for name, count in found.items() if count}


def reads_on_device(dim):
    mesh = world_mesh(2)
    x = made(mesh, dim)
    found = {}
    for name, program in programs(x, mesh).items():
        with DeviceCounts() as counts:
            program().sum().backward()
        if counts.host_reads:
            found[name] = counts.where
    return found


@pytest.mark.parametrize("dim", [0, 1, None])
def test_none_on_cpus(pool, dim):
    assert pool.run(reads_on_cpu, dim, ranks=2) == [{}] * 2


@pytest.mark.parametrize("dim", [0, 1, None])
def test_none_on_a_device(pool, dim):
    assert pool.run(reads_on_device, dim, ranks=2, device="sim") == [{}] * 2


def plain_operand():
    """A plain operand that looks like a mask on one rank only, of a sum and of attention."""
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.zeros(4, 6), mesh, [Replicate()])
    plain = torch.zeros(4, 6) if mesh.get_local_rank() == 0 else torch.ones(4, 6)
    q = distribute_tensor(torch.randn(2, 4, 4), mesh, [Shard(0)])
    F.scaled_dot_product_attention(q, q, q, attn_mask=plain[:, :4].contiguous())
    with pytest.raises(LongmeshError) as raised:
        x + plain
    return str(raised.value)


def test_values_decide_nothing(pool):
    for text in pool.run(plain_operand, ranks=2):
        assert "mixes a DTensor with a plain tensor" in text
        assert "pass attn_mask= as a DTensor, also instead of is_causal" in text


def plain_masks():
    """Masks and biases are known in any layout: the largest error, and how many reads."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    whole = torch.randn(2, 5, 4)
    worst = reads = 0
    causal, masked, biased = (
        {"is_causal": True},
        {"attn_mask": MASK[:5, :5]},
        {"attn_mask": torch.randn(5, 5)},
    )
    for dim, mask in itertools.product((0, 1, 2), (causal, masked, biased)):
        q = distribute_tensor(whole, mesh, [Shard(dim)]).requires_grad_(dim == 0)
        reads += num_reads(lambda q=q, mask=mask: F.scaled_dot_product_attention(q, q, q, **mask))
        attend = functools.partial(F.scaled_dot_product_attention, q, q, q, **mask)
        explain(attend)
        found = attend().full_tensor()
        worst = max(worst, (found - F.scaled_dot_product_attention(whole, whole, whole, **mask)).abs().max())
    return float(worst), reads


def test_plain_masks_of_sharded_tokens(pool):
    for difference, reads in pool.run(plain_masks, ranks=2):
        assert difference < 1e-5 and reads == 0
