"""The models of torch's tensor-parallel tutorials, with only the import changed, train as one process does."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from longmesh import DTensor, Replicate, Shard
from longmesh.interop import from_torch, to_torch
from longmesh.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from longmesh.testing import cpu_mesh


class ToyMLP(nn.Module):
    def __init__(self, dim=10, hidden=6):
        super().__init__()
        self.net1, self.net2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.net2(F.relu(self.net1(x)))


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def rotate(x, turns):
    """Rotary embedding: pairs of features as complex numbers, turned by their position."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None, :]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, turns):
        batch, length, _ = x.shape
        q, k, v = (w(x).view(batch, length, self.heads, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, turns), rotate(k, turns)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim, heads, norm):
        super().__init__()
        self.attention_norm, self.ffn_norm = norm(dim), norm(dim)
        self.attention, self.feed_forward = Attention(dim, heads), FeedForward(dim, 10)

    def forward(self, x, turns):
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, norm and output over `vocab` tokens."""

    def __init__(self, vocab=13, dim=24, heads=12, layers=2, norm=RMSNorm):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, norm) for _ in range(layers))
        self.norm, self.output = norm(dim), nn.Linear(dim, vocab, bias=False)
        angles = torch.outer(torch.arange(64.0), 1.0 / 10000 ** torch.linspace(0, 1, dim // heads // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        turns = self.turns[: tokens.shape[1]]
        for layer in self.layers:
            h = layer(h, turns)
        return self.output(self.norm(h))


def parallelize_llama(model, tp_mesh, *, local_heads):
    """The plan of the tutorial: tensor and sequence parallelism, logits cut by the vocabulary."""
    model = parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        },
    )
    for block in model.layers:
        block_plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), Replicate()),
                desired_input_layouts=(Replicate(), Replicate()),
            )
            if not local_heads
            else PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.wq": ColwiseParallel(use_local_output=local_heads),
            "attention.wk": ColwiseParallel(use_local_output=local_heads),
            "attention.wv": ColwiseParallel(use_local_output=local_heads),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),),
                desired_input_layouts=(Replicate(),),
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        if local_heads:
            block.attention.heads //= tp_mesh.size()
        parallelize_module(block, tp_mesh, block_plan)
    return model


def same_parameters(state, plain, steps):
    for (name, ours), theirs in zip(state.items(), plain.parameters(), strict=True):
        assert isinstance(ours, DTensor), name
        torch.testing.assert_close(
            ours.full_tensor(),
            theirs.detach(),
            rtol=2e-5 * steps,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def average_over(model, group):
    """Data parallelism by hand: the gradients' local parts are averaged over the other mesh axis."""
    for parameter in model.parameters():
        local = parameter.grad.to_local()
        dist.all_reduce(local, group=group)
        local /= dist.get_world_size(group)


def train_mlp(shape):
    """Hidden 6 on 4 ranks: 2, 2, 2 and none."""
    mesh = cpu_mesh(*shape, names=("dp", "tp")[-len(shape) :])
    tp_mesh = mesh["tp"] if len(shape) > 1 else mesh
    torch.manual_seed(0)
    plain = ToyMLP()
    model = parallelize_module(
        copy.deepcopy(plain), tp_mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 10)
        mine = x if len(shape) == 1 else x.chunk(shape[0])[mesh.get_local_rank("dp")]
        out, expected = model(mine), plain(x)
        if len(shape) == 1:
            torch.testing.assert_close(out, expected)
        out.square().mean().backward()
        expected.square().mean().backward()
        if len(shape) > 1:
            average_over(model, mesh.get_group("dp"))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model.state_dict(), plain, 3)
    return True


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_mlp(pool, shape):
    ranks = torch.Size(shape).numel()
    assert pool.run(train_mlp, shape, ranks=ranks) == [True] * ranks


def train_llama(shape, local_heads, norm, fsdp=False):
    mesh = cpu_mesh(*shape, names=("dp", "tp")[-len(shape) :])
    tp_mesh = mesh["tp"] if len(shape) > 1 else mesh
    torch.manual_seed(0)
    plain = Llama(norm=norm)
    model = parallelize_llama(copy.deepcopy(plain), tp_mesh, local_heads=local_heads)
    if fsdp:
        to_torch(model)
        for part in (*model.layers, model):
            fully_shard(part, mesh=mesh["dp"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for step in range(2):
        torch.manual_seed(step)
        tokens, labels = torch.randint(13, (4, 12)), torch.randint(13, (4, 12))
        dp = slice(None)
        if len(shape) > 1:
            place, size = mesh.get_local_rank("dp"), 4 // shape[0]
            dp = slice(place * size, place * size + size)
        expected = F.cross_entropy(plain(tokens).flatten(0, 1), labels.flatten())
        expected.backward()
        with loss_parallel():
            logits = model(tokens[dp])
            assert logits.placements == (Shard(2),)
            loss = F.cross_entropy(logits.flatten(0, 1), labels[dp].flatten())
            loss.backward()
        if len(shape) == 1:
            torch.testing.assert_close(loss.full_tensor(), expected)
        elif not fsdp:
            average_over(model, mesh.get_group("dp"))
        for optimizer, m in zip(optimizers, (model, plain), strict=True):
            if not fsdp:  # torch's own does not clip over a mesh and a part of it
                nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(from_torch(model.state_dict()) if fsdp else model.state_dict(), plain, 2)
    return True


@pytest.mark.parametrize("local_heads", [False, True])
@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2)])
def test_llama(pool, shape, local_heads):
    """Vocabulary 13 and feed-forward width 10: uneven on every number of ranks."""
    ranks = torch.Size(shape).numel()
    norm = nn.LayerNorm if local_heads else RMSNorm
    assert pool.run(train_llama, shape, local_heads, norm, ranks=ranks) == [True] * ranks


def test_llama_under_fsdp2(pool):
    """Our styles on one mesh axis, FSDP2 on the other, through interop."""
    assert pool.run(train_llama, (2, 2), True, nn.RMSNorm, fsdp=True, ranks=4) == [True] * 4
