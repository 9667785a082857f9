"""Programs that a user would run on GPUs, functions of nothing: on ranks of any device they give the same numbers.

expected = pool.run(program, ranks=2)                    # CPU ranks
found = pool.run(program, ranks=2, device="sim")         # the made-up device
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from longmesh import DTensor, Partial, Replicate, Shard, checkpoint, distribute_tensor, flex_attention
from longmesh.attention import ContextParallel, masks
from longmesh.attention.exchange.hybrid import Hybrid
from longmesh.attention.exchange.ring import Ring
from longmesh.comm.agree import check_every_call
from longmesh.experimental import context_parallel
from longmesh.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from longmesh.testing.device import DeviceCounts, SimTensor, fake_rank
from longmesh.testing.mesh import world_mesh

Numbers = dict[str, torch.Tensor]


def here() -> str:
    return world_mesh(dist.get_world_size()).device_type


def whole(tensors: dict[str, torch.Tensor]) -> Numbers:
    """Plain CPU tensors, whole; of tensors without values their sizes."""
    found: Numbers = {}
    for name, t in tensors.items():
        full = t.detach().full_tensor() if isinstance(t, DTensor) else t.detach()
        hollow = isinstance(full, SimTensor) and full.is_hollow
        found[name] = torch.zeros(full.shape, dtype=full.dtype) if hollow else full.cpu()
    return found


def run_as(program: Callable[[], Numbers], rank: int, num_ranks: int) -> dict[str, tuple[int, ...]]:
    """The sizes that a program finds as one rank of many, alone and without values: what reads one raises."""
    world_mesh.cache_clear()
    with fake_rank(rank, num_ranks):
        return {name: tuple(t.shape) for name, t in program().items()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Block().to(here())


def _tokens() -> torch.Tensor:
    return torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(1)).to(here())


def _plan() -> dict[str, ParallelStyle]:
    return {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }


def styles(optimizer: str = "AdamW", **options: object) -> Numbers:
    """Tensor parallel styles, a parallel loss, clipped gradients, three steps of an optimizer."""
    mesh, model, tokens = world_mesh(dist.get_world_size()), _model(), _tokens()
    parallelize_module(model, mesh, _plan())
    step = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **options)
    losses = []
    for _ in range(3):
        step.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        step.step()
        losses += [loss, norm]
    return whole(
        {"losses": torch.stack([whole({"x": x})["x"] for x in losses]), **dict(model.named_parameters())}
    )


def optimizers() -> Numbers:
    found = {}
    for name, options in {
        "SGD": {"momentum": 0.9},
        "Adam": {"foreach": False},
        "AdamW": {"fused": False},
        "Adagrad": {},
    }.items():
        found |= {f"{name} {key}": value for key, value in styles(name, **options).items()}
    return found


def checkpoints() -> Numbers:
    """Saved and loaded on another layout."""
    mesh = world_mesh(dist.get_world_size())
    x = torch.arange(30.0).view(6, 5)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "saved"
    checkpoint.save(
        {"x": distribute_tensor(x.to(here()), mesh, [Shard(0)]), "n": torch.ones(3).to(here())}, path
    )
    into = {
        "x": distribute_tensor(torch.zeros(6, 5).to(here()), mesh, [Shard(1)]),
        "n": torch.zeros(3).to(here()),
    }
    checkpoint.load(into, path)
    return whole(into)


def redistributions() -> Numbers:
    """Every pair of placements, and gradients through them."""
    mesh, found = world_mesh(dist.get_world_size()), {}
    x = torch.arange(35.0).view(5, 7).to(here())
    for a in (Replicate(), Shard(0), Shard(1), Partial()):
        for b in (Replicate(), Shard(0), Shard(1)):
            start = (
                DTensor.from_local(x.clone(), mesh, [Replicate()]).redistribute(placements=[a])
                if not isinstance(a, Partial)
                else (DTensor.from_local(x / dist.get_world_size(), mesh, [Partial()]))
            )
            leaf = start.detach().requires_grad_()
            out = leaf.redistribute(placements=[b])
            (out * 2).sum().backward()
            assert leaf.grad is not None
            found |= whole({f"{a}{b}": out, f"{a}{b} grad": leaf.grad})
    return found


def scopes() -> Numbers:
    """SDPA inside a scope, with its gradient."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 4, 19, 8, generator=draw).to(here()) for _ in range(3))
    mesh, found = world_mesh(dist.get_world_size()), {}
    for causal in (False, True):
        parts = [t.clone() for t in (q, k, v)]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]) as cp:
            leaves = [t.requires_grad_() for t in parts]
            out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
            grads = torch.autograd.grad(out.square().sum(), leaves)
            wholes = [cp.unshard(t, dim=2) for t in (out.detach(), *grads)]
        found |= whole({f"{causal} {i}": t for i, t in enumerate(wholes)})
    return found


def flex() -> Numbers:
    """FlexAttention's function on a cut sequence."""
    draw = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 4, 19, 8, generator=draw).to(here()) for _ in range(3))
    mesh = world_mesh(dist.get_world_size())
    cp = ContextParallel(mesh, seq_len=19, mask=masks.causal(), num_heads=4, head_dim=8)
    leaves = [cp.shard(t, dim=2).requires_grad_() for t in (q, k, v)]
    out = cp(*leaves, score_mod=lambda s, b, h, i, j: s - (i - j) * (h + 1) / 8)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return whole({str(i): cp.unshard(t.detach(), dim=2) for i, t in enumerate((out, *grads))})


def flex_scope() -> Numbers:
    """FlexAttention inside a scope, with its gradient."""
    draw = torch.Generator().manual_seed(2)
    parts = [torch.randn(1, 4, 19, 8, generator=draw).to(here()) for _ in range(3)]
    mesh = world_mesh(dist.get_world_size())
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 3, mask=masks.causal()) as cp:
        leaves = [t.requires_grad_() for t in parts]
        out = flex_attention(*leaves, score_mod=lambda s, b, h, i, j: s - (i - j) * (h + 1) / 8)
        assert isinstance(out, torch.Tensor)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        wholes = [cp.unshard(t, dim=2) for t in (out.detach(), *grads)]
    return whole({str(i): t for i, t in enumerate(wholes)})


def hybrid_ring() -> Numbers:
    """On 4 ranks: a ring between groups, whose group of ranks has carried nothing before."""
    draw, mesh = torch.Generator().manual_seed(2), world_mesh(2, 2)
    how = {"layout": "zigzag", "exchange": Hybrid(outer=Ring()), "num_heads": 4, "head_dim": 8}
    cp = ContextParallel(mesh, seq_len=40, mask=masks.causal(), **how)
    tokens = [torch.randn(1, 4, 40, 8, generator=draw).to(here()) for _ in range(3)]
    leaves = [cp.shard(t, dim=2).requires_grad_() for t in tokens]
    out = cp(*leaves)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    return whole({str(i): cp.unshard(t.detach(), dim=2) for i, t in enumerate((out, *grads))})


def counted_steps() -> list[tuple[int, int, int]]:
    """Host reads, uploads and downloads of each of three train steps, attention over a cut sequence among them."""
    mesh, model, tokens = world_mesh(dist.get_world_size()), _model(), _tokens()
    parallelize_module(model, mesh, _plan())
    cp = ContextParallel(mesh, seq_len=12, num_heads=2, head_dim=4, check=False)
    step = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(3):
        with DeviceCounts() as counts:
            step.zero_grad()
            with loss_parallel():
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            rows = model.get_parameter("table.weight").full_tensor()[: cp.num_tokens]
            x = rows.view(1, cp.num_tokens, 2, 4).transpose(1, 2)
            cp(x, x, x).sum().backward()
            clip_grad_norm_(model.parameters(), 0.5)
            step.step()
        found.append((counts.host_reads, counts.uploads, counts.downloads))
    return found


def counted_trainer() -> list[dict[str, int]]:
    """What the host reads in each step of the reference trainer, and where: documents, the same, others, the first."""
    from longmesh.train.data import Corpus
    from longmesh.train.loop import build, run_step
    from longmesh.train.options import TrainOptions
    from longmesh.train.parallel import Engines, slice_mesh

    shape = (1, dist.get_world_size(), 1)
    axes = slice_mesh(world_mesh(*shape, names=("data", "context", "tensor")))
    sizes = {"seq_len": 101, "batch": 1, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "steps": 4}
    options = TrainOptions(data=1, context=shape[1], tensor=1, **sizes)
    (model, optimizer), engines = build(options, axes), Engines(options, axes)
    steps = Corpus(0).steps(options.seq_len, options.batch, first=0)
    first, other = next(steps), next(steps)
    found = []
    for rows in (first, first, other, first):
        with DeviceCounts() as counts, check_every_call(False):
            run_step(model, optimizer, rows, options, axes, engines)
        found.append({name: n for name, n in counts.where.items() if not name.startswith("uploads")})
    return found


def trainer_steps() -> Numbers:
    """Two steps of the reference trainer, and the parameters after them."""
    from longmesh.train.data import Corpus
    from longmesh.train.loop import build, run_step
    from longmesh.train.options import TrainOptions
    from longmesh.train.parallel import Engines, slice_mesh

    shape = (1, dist.get_world_size(), 1)
    axes = slice_mesh(world_mesh(*shape, names=("data", "context", "tensor")))
    sizes = {"seq_len": 101, "batch": 1, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "steps": 4}
    options = TrainOptions(data=1, context=shape[1], tensor=1, **sizes)
    (model, optimizer), engines = build(options, axes), Engines(options, axes)
    steps = Corpus(0).steps(options.seq_len, options.batch, first=0)
    for _ in range(2):
        run_step(model, optimizer, next(steps), options, axes, engines)
    return whole(dict(model.named_parameters()))


def lost_tokens() -> Numbers:
    """The loss of a cut sequence, and the log-sum-exp of attention."""
    draw = torch.Generator().manual_seed(2)
    mesh = world_mesh(dist.get_world_size())
    cp = ContextParallel(mesh, seq_len=19, mask=masks.documents([7, 12]), num_heads=4, head_dim=8)
    q, k, v = (
        cp.shard(torch.randn(1, 4, 19, 8, generator=draw).to(here()), dim=2).requires_grad_()
        for _ in range(3)
    )
    out, lse = cp.with_lse(q, k, v)
    grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    return whole({str(i): cp.unshard(t.detach(), dim=2) for i, t in enumerate((out, *grads))})


def trainer() -> Numbers:
    """Four steps of the reference trainer, data x context x tensor."""
    from longmesh.train.data import Corpus
    from longmesh.train.loop import train
    from longmesh.train.options import TrainOptions
    from longmesh.train.parallel import slice_mesh
    from longmesh.train.progress import say_nothing

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    shape = (1, dist.get_world_size(), 1)
    axes = slice_mesh(world_mesh(*shape, names=("data", "context", "tensor")))
    options = TrainOptions(
        data=1, context=shape[1], tensor=1, seq_len=101, batch=2, dim=16, layers=2, heads=4, kv_heads=2, steps=4,
        out=folder[0],
    )  # fmt: skip
    return {"losses": torch.tensor(train(options, axes, Corpus(0), say_nothing).losses)}


PROGRAMS = (styles, optimizers, checkpoints, redistributions, scopes, flex, flex_scope, lost_tokens, trainer)
