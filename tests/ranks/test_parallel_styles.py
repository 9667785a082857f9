"""Styles on real ranks: forward, gradients and layouts equal to the plain module."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from longmesh import DTensor, Replicate, Shard, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare_grads(module, plain):
    for (name, ours), theirs in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, DTensor) and ours.grad is not None, name
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=lambda m, n=name: f"{n}: {m}")


def run_style(style, module, shape, given, as_dtensor):
    """One styled module on an input of global `shape` laid out as `given`."""
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))  # plain shards of unequal sizes leave a mark on a mesh
    torch.manual_seed(1)
    plain = copy.deepcopy(module)
    styled = parallelize_module(copy.deepcopy(module), mesh, style)
    if isinstance(module, nn.Embedding):
        x = torch.randint(module.num_embeddings, shape)
    else:
        x = torch.randn(shape, requires_grad=True)
    expected = plain(x)
    target = torch.randn(expected.shape)
    (expected * target).sum().backward()

    mine = distribute_tensor(x.detach(), mesh, [given])
    if not as_dtensor:
        mine = mine.to_local()
    mine.requires_grad_(x.requires_grad)
    out = styled(mine)
    assert isinstance(out, DTensor) != style.use_local_output
    layout = getattr(style, "output_layouts", None) or style.sequence_sharding
    if not isinstance(out, DTensor):
        out = DTensor.from_local(out, mesh, layout, shape=expected.shape)
    torch.testing.assert_close(out.full_tensor(), expected)
    (out * distribute_tensor(target, mesh, out.placements)).sum().backward()
    compare_grads(styled, plain)
    if x.requires_grad:
        grad = mine.grad
        if not as_dtensor:
            grad = DTensor.from_local(grad, mesh, [given], shape=x.shape)
        torch.testing.assert_close(grad.full_tensor(), x.grad)
    return True


LINEARS = [
    (ColwiseParallel(), Replicate(), (3, 6), (5, 6)),
    (ColwiseParallel(input_layouts=Shard(0)), Shard(0), (3, 6), (12, 6)),
    (ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()), Shard(1), (3, 6), (2, 12, 6)),
    (ColwiseParallel(input_layouts=Shard(-1), use_local_output=False), Shard(-1), (3, 6), (4, 6)),
    (ColwiseParallel(input_layouts=Shard(1), overlap=True), Shard(1), (7, 6), (2, 12, 6)),
    (RowwiseParallel(), Shard(-1), (5, 6), (4, 6)),
    (RowwiseParallel(input_layouts=Replicate()), Replicate(), (5, 6), (2, 3, 6)),
    (RowwiseParallel(output_layouts=Shard(1)), Shard(-1), (5, 6), (2, 12, 6)),
    (RowwiseParallel(output_layouts=Shard(1), overlap=True), Shard(-1), (5, 6), (2, 12, 6)),
    (RowwiseParallel(output_layouts=Shard(-1), use_local_output=False), Shard(-1), (5, 6), (4, 6)),
]


def run_linears(as_dtensor):
    outcomes = []
    for number, (style, given, sizes, shape) in enumerate(LINEARS):
        if as_dtensor:  # which knows its sizes: 5 rows where a plain tensor's parts must be equal
            shape = tuple(5 if n == 12 else n for n in shape)
        linear = nn.Linear(sizes[1], sizes[0], bias=number % 3 > 0)
        outcomes.append(run_style(style, linear, shape, given, as_dtensor))
    return outcomes


@pytest.mark.parametrize("as_dtensor", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_linear(pool, ranks, as_dtensor):
    """Hidden 6 and 7 on 4 ranks, 3 outputs on 4: uneven and empty shards."""
    assert pool.run(run_linears, as_dtensor, ranks=ranks) == [[True] * 10] * ranks


EMBEDDINGS = [
    (RowwiseParallel(input_layouts=Replicate()), Replicate()),
    (RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), Replicate()),
    (RowwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0), use_local_output=False), Shard(0)),
    (ColwiseParallel(), Replicate()),
    (ColwiseParallel(output_layouts=Replicate(), use_local_output=False), Replicate()),
]


def run_embeddings(as_dtensor):
    tables = [
        nn.Embedding(7, 6),
        nn.Embedding(3, 5, padding_idx=1),
        nn.Embedding(5, 3, scale_grad_by_freq=True),
    ]
    return [
        run_style(style, table, (12, 12), given, as_dtensor)
        for style, given in EMBEDDINGS
        for table in tables
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_embedding(pool, ranks):
    """Tables of 3 rows or columns on 4 ranks among them."""
    for as_dtensor in (False, True):
        assert pool.run(run_embeddings, as_dtensor, ranks=ranks) == [[True] * 15] * ranks


class PlainRMSNorm(nn.Module):
    """The norm of the Llama tutorial: a module with no style of its own."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


NORMS = [
    (SequenceParallel(), nn.LayerNorm(6), 1),
    (SequenceParallel(use_local_output=True), nn.LayerNorm(6, bias=False), 1),
    (SequenceParallel(sequence_dim=0), nn.LayerNorm((5, 6), elementwise_affine=True), 0),
    (SequenceParallel(), nn.RMSNorm(6), 1),
    (SequenceParallel(use_local_output=True), PlainRMSNorm(6), 1),
]


def run_norms(as_dtensor):
    for _, norm, _ in NORMS:
        for parameter in norm.parameters():
            torch.manual_seed(3)
            nn.init.normal_(parameter)
    outcomes = []
    for style, norm, dim in NORMS:
        size = 5 if as_dtensor else 12
        shape = (size, 5, 6) if dim == 0 else (2, size, 6)
        outcomes.append(run_style(style, norm, shape, Shard(dim), as_dtensor))
    return outcomes


@pytest.mark.parametrize("ranks", [2, 4])
def test_sequence_parallel(pool, ranks):
    """A DTensor of 5 rows on 4 ranks: one rank has none."""
    for as_dtensor in (False, True):
        assert pool.run(run_norms, as_dtensor, ranks=ranks) == [[True] * 5] * ranks


class SequenceBlock(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), norm(6), nn.Identity()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        h = self.first(x)
        return self.down(torch.relu(self.up(self.norm(h + self.drop(h)))))


def plain_shards_of_unequal_sizes(norm, local, tokens):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    plain = SequenceBlock(norm)
    plan = {
        "first": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "drop": SequenceParallel(use_local_output=True),
        "norm": SequenceParallel(use_local_output=local),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    x = torch.randn(2, tokens, 6)
    for _ in range(2):
        out, want = model(x), plain(x)
        torch.testing.assert_close(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
    return True


@pytest.mark.parametrize("ranks", [2, 3])
def test_plain_shards_of_unequal_sizes_between_styles(pool, ranks):
    for norm in (nn.LayerNorm, nn.RMSNorm):
        for local in (True, False):
            for tokens in (5, 1):
                args = (plain_shards_of_unequal_sizes, norm, local, tokens)
                assert pool.run(*args, ranks=ranks) == [True] * ranks


def plain_shards_that_are_no_chunks():
    """The first rank has the smaller part: refused on both."""
    mesh = init_device_mesh("cpu", (2,))
    give = parallelize_module(nn.Linear(4, 4), mesh, RowwiseParallel(output_layouts=Shard(0)))
    assert len(give(torch.ones(5, 2))) == 3 - mesh.get_rank()
    take = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel(input_layouts=Shard(0)))
    with pytest.raises(LongmeshError) as raised:
        take(torch.ones(2 + mesh.get_rank(), 4))
    return str(raised.value)


def test_plain_shards_that_are_no_chunks_are_refused(pool):
    expected = (
        "ColwiseParallel of Linear: the input laid out as S(0) on MeshShape((2,)) would have the shape (5, 4), of "
        "which coordinate (0,) holds (3, 4), but its part is (2, 4); pass the shard that chunking gives each rank, or "
        "DTensors"
    )
    assert pool.run(plain_shards_that_are_no_chunks, ranks=2) == [expected] * 2
