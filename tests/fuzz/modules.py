"""Modules of torch's own that programs call, as they are or with DTensors for parameters."""

import random

import torch
from torch import nn

from longmesh import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


def _mlp(n):
    return nn.Sequential(nn.Linear(n, 5), nn.GELU(), nn.Linear(5, 2))


KINDS = {
    "linear": lambda n: nn.Linear(n, 3), "mlp": _mlp, "lstm": lambda n: nn.LSTM(n, 3, batch_first=True),
    "gru": lambda n: nn.GRU(n, 3), "rnn": lambda n: nn.RNN(n, 2, bidirectional=True),
    "mha": lambda n: nn.MultiheadAttention(n, 1, batch_first=True),
    "encoder": lambda n: nn.TransformerEncoderLayer(n, 1, 5, dropout=0.0, batch_first=True),
    "decoder": lambda n: nn.TransformerDecoderLayer(n, 1, 5, dropout=0.0, batch_first=True),
    "conv": lambda n: nn.Conv1d(1, 2, 1), "norm": nn.LayerNorm, "group": lambda n: nn.GroupNorm(1, n),
    "prelu": lambda n: nn.PReLU(), "batch": nn.BatchNorm1d, "bilinear": lambda n: nn.Bilinear(n, n, 2), "styled": _mlp,
    "styled norm": nn.LayerNorm, "styled sequence": lambda n: nn.Sequential(nn.LayerNorm(n), nn.Dropout(0.0)),
}  # fmt: skip


def make(kind, seed, size):
    torch.manual_seed(seed)
    return KINDS[kind](size).double()


def distribute(kind, seed, module, mesh):
    """By styles on a mesh of one axis, else each parameter laid out anyhow."""
    rng = random.Random(seed)
    if kind.startswith("styled") and mesh.ndim == 1:
        given, wanted = rng.choice(
            [(Replicate(), Replicate()), (Shard(0), Shard(0)), (Shard(0), Replicate())]
        )
        norm = SequenceParallel(sequence_dim=0, use_local_output=False)
        plans = {
            "styled": {
                "0": ColwiseParallel(input_layouts=given),
                "2": RowwiseParallel(output_layouts=wanted, use_local_output=False),
            },
            "styled norm": norm,
            "styled sequence": {"0": norm},
        }
        return parallelize_module(module, mesh, plans[kind])

    def shard(name, part, mesh):
        for key, parameter in list(part.named_parameters(recurse=False)):
            layout = [rng.choice([Replicate(), *map(Shard, range(parameter.ndim))]) for _ in range(mesh.ndim)]
            part.register_parameter(key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, layout)))

    return distribute_module(module, mesh, shard)


def run(kind, module, x):
    """The module's result, and added to it one number that all parameters' gradients are in."""
    rows = x.reshape(-1, x.shape[-1])
    inputs = {
        "lstm": (rows[None],), "gru": (rows[:, None],), "rnn": (rows[:, None],), "mha": (rows[None],) * 3,
        "encoder": (rows[None],), "decoder": (rows[None], rows[None] * 2), "conv": (rows[:, None],), "group": (rows,),
        "batch": (rows,), "bilinear": (rows, rows),
    }.get(kind, (x,))  # fmt: skip
    result = module(*inputs)
    result = result[0] if isinstance(result, tuple) else result
    grads = torch.autograd.grad(result.square().sum(), list(module.parameters()), retain_graph=True)
    energy = sum(_whole(g).square().sum().item() for g in grads)
    return result + energy / (1 + energy)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
