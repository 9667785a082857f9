"""A transformer block under tensor and sequence parallelism sends what torch's own styles send, not more."""

from collections import Counter

import torch
import torch.distributed.tensor as reference
import torch.distributed.tensor.parallel as reference_parallel
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import longmesh
import longmesh.parallel
from longmesh.comm import record_comm
from longmesh.testing import cpu_mesh


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.ffn_norm, self.attention = nn.LayerNorm(8), nn.LayerNorm(8), nn.Module()
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self.attention, name, nn.Linear(8, 8, bias=False))
        self.attention.forward = self.attend
        self.w1, self.w2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def attend(self, x):
        a = self.attention
        q, k, v = (w(x).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (a.wq, a.wk, a.wv))
        return a.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x))))


def build(lib, styles, mesh):
    torch.manual_seed(0)
    sequence = lib.Shard(1)
    plan = {
        "norm": styles.SequenceParallel(),
        "attention": styles.PrepareModuleInput(input_layouts=sequence, desired_input_layouts=lib.Replicate()),
        "attention.w[qkv]": styles.ColwiseParallel(),
        "attention.wo": styles.RowwiseParallel(output_layouts=sequence),
        "ffn_norm": styles.SequenceParallel(),
        "w1": styles.ColwiseParallel(input_layouts=sequence),
        "w2": styles.RowwiseParallel(output_layouts=sequence),
    }
    return styles.parallelize_module(Block(), mesh, plan)


class Count(TorchDispatchMode):
    """Collectives and the elements of their buffers, for whoever issues them."""

    def __init__(self):
        super().__init__()
        self.calls, self.elements = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind in (longmesh.DTensor, reference.DTensor) for kind in types):
            return NotImplemented
        namespace, name = func._schema.name.split("::")
        if namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.calls[name] += 1
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def traffic():
    mesh = cpu_mesh(2)
    counts, grads = [], []
    for lib, styles in ((longmesh, longmesh.parallel), (reference, reference_parallel)):
        net = build(lib, styles, mesh)
        x = torch.arange(64.0).view(2, 4, 8).sin().requires_grad_()
        net(x)  # our first call on a mesh also compares the inputs of the ranks
        with Count() as count:
            net(x).square().sum().backward()
        counts.append((sum(count.calls.values()), count.elements))
        grads.append([x.grad, *(p.grad.full_tensor() for p in net.parameters())])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    net = build(longmesh, longmesh.parallel, mesh)
    with record_comm() as log:
        net(x).square().sum().backward()
    return counts, [event.kind for event in log.events]


def test_a_block_sends_no_more_than_torch(pool):
    """Two gathers and two reductions forward, and the same backward; gradients equal to torch's."""
    for (ours, theirs), kinds in pool.run(traffic, ranks=2):
        assert ours == theirs == (8, ours[1])
        assert kinds == ["all_gather", "all_to_all"] * 2 + ["all_gather", "all_to_all"] * 2
