"""A small model over a cut sequence together with what else a training run uses: 20 steps as one process makes them."""

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from longmesh.experimental import context_parallel
from longmesh.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from longmesh.tensor import DTensor
from longmesh.testing import cpu_mesh

STEPS, ROWS, LENGTH, VOCABULARY, WIDTH = 20, 4, 13, 23, 16


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = [
            m(y).reshape(*y.shape[:2], -1, 4).transpose(1, 2) for m in (self.query, self.key, self.value)
        ]
        seen = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recompute = recompute

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return F.log_softmax(self.head(x), -1)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:], torch.arange(LENGTH).expand(ROWS, -1)


def share(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """This rank's part of the mean over the whole batch."""
    return F.nll_loss(scores.flatten(0, 1), labels.flatten(), reduction="sum") / (ROWS * LENGTH)


def in_scope(model: nn.Module, mesh: DeviceMesh, rows: slice, factor: float = 1.0) -> torch.Tensor:
    """Forward and backward of some rows over a cut sequence. The loss, this rank's share."""
    ids, labels, positions = (t[rows].clone() for t in batch())
    with context_parallel(mesh, buffers=[ids, labels, positions], buffer_seq_dims=[1, 1, 1]):
        loss = share(model(ids, positions), labels)
        (loss * factor).backward()
    return loss.detach()


def train(
    model: nn.Module, step: Callable[[nn.Module], torch.Tensor], clip: float | None = None
) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        loss = step(model)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if dist.is_initialized() and getattr(step, "is_share", True):
            dist.all_reduce(loss)
        losses.append(loss.item())
    return losses


def alone(clip: float | None = None) -> list[float]:
    def step(model: nn.Module) -> torch.Tensor:
        ids, labels, positions = batch()
        loss = share(model(ids, positions), labels)
        loss.backward()
        return loss.detach()

    step.is_share = False
    return train(Model(), step, clip)


def add_up(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sum gradients over ranks that hold different tokens."""
    for parameter in model.parameters():
        grad = parameter.grad
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)


def with_ddp() -> list[float]:
    mesh = cpu_mesh(2, 2, names=("outer", "inner"))
    data = mesh.get_coordinate()[0]
    # DDP averages over all four ranks, and what is wanted is the sum.
    step = functools.partial(in_scope, mesh=context_of(mesh), rows=slice(2 * data, 2 * data + 2), factor=4.0)
    return train(DistributedDataParallel(Model()), step)


def with_fsdp() -> list[float]:
    mesh = cpu_mesh(2, 2, names=("outer", "inner"))
    data = mesh.get_coordinate()[0]
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=cpu_mesh(4))
    fully_shard(model, mesh=cpu_mesh(4))
    step = functools.partial(in_scope, mesh=context_of(mesh), rows=slice(2 * data, 2 * data + 2), factor=4.0)
    return train(model, step)


def with_tensor_parallelism() -> list[float]:
    mesh = cpu_mesh(2, 2, names=("outer", "inner"))
    context, tensor = mesh["outer"], mesh["inner"]
    model = Model()
    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan |= {name: RowwiseParallel() for name in ("out", "down")}
    parallelize_module(model, tensor, {f"layers.*.{name}": style for name, style in plan.items()})

    def step(model: nn.Module) -> torch.Tensor:
        loss = in_scope(model, context, slice(None))
        add_up(model, context.get_group())
        return loss / 2  # both ranks of the tensor axis have it

    return train(model, step)


def accumulated_and_clipped() -> list[float]:
    def step(model: nn.Module) -> torch.Tensor:
        loss = in_scope(model, cpu_mesh(4), slice(0, 1)) + in_scope(model, cpu_mesh(4), slice(1, ROWS))
        add_up(model)
        return loss

    return train(Model(), step, clip=0.5)


def recomputed() -> list[float]:
    def step(model: nn.Module) -> torch.Tensor:
        loss = in_scope(model, cpu_mesh(4), slice(None))
        add_up(model)
        return loss

    return train(Model(recompute=True), step)


def compiled() -> list[float]:
    model = Model()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)

    def step(_: nn.Module) -> torch.Tensor:
        loss = in_scope(run, cpu_mesh(4), slice(None))
        add_up(model)
        return loss

    return train(model, step)


def context_of(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["inner"]


@pytest.mark.parametrize(
    ("run", "clip"),
    [
        (with_tensor_parallelism, None),
        (accumulated_and_clipped, 0.5),
    ],
)
def test_twenty_steps_are_those_of_one_process(pool, run, clip):
    expected = alone(clip)
    assert expected[-1] < 0.5 * expected[0]
    for losses in pool.run(run, ranks=4, timeout=300.0):
        assert losses == pytest.approx(expected, abs=1e-4)
