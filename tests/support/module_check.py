"""Compare a module of torch's with DTensor parameters and inputs with the plain module: outputs and all gradients."""

import copy
import warnings

import torch
from torch import nn

from longmesh import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.rules.tree import all_tensors
from longmesh.tensor.dispatch import dispatch

WEIGHTS = ("replicated", "first dim", "last dim")


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_weights(module, mesh, how):
    """Every parameter of a module sharded along its first or last dim, or whole."""

    def place(_name, part, mesh):
        for name, parameter in list(part.named_parameters(recurse=False)):
            dim = {"replicated": None, "first dim": 0, "last dim": parameter.ndim - 1}[how]
            given = distribute_tensor(parameter.detach(), mesh, [Replicate() if dim is None else Shard(dim)])
            part.register_parameter(name, nn.Parameter(given))

    return distribute_module(module, mesh, place)


def module_error(module, inputs, mesh, *, weights, dim, call, training=True):
    """The largest difference of outputs and gradients. `dim`: the dim along which inputs are sharded, None if whole.
    `call(module, inputs)` gives what is compared. An op that falls back to replication raises. Collective."""
    sharded = shard_weights(copy.deepcopy(module), mesh, weights)
    placement = Replicate() if dim is None else Shard(dim)
    plain = [t.clone().requires_grad_(training) for t in inputs]
    parts = [distribute_tensor(t, mesh, [placement]).requires_grad_(training) for t in inputs]
    dispatch.warned.clear()
    with warnings.catch_warnings(), torch.set_grad_enabled(training):
        warnings.filterwarnings("error", message=".*no sharding rule")
        want = all_tensors(call(module.train(training), plain))
        got = all_tensors(call(sharded.train(training), parts))
        pairs = list(zip(got, want, strict=True))
        if training:
            for results in (want, got):
                sum((1.5 * t).sin().sum() for t in results).backward()
            pairs += [(a.grad, b.grad) for a, b in zip(parts, plain, strict=True)]
            both = zip(sharded.parameters(), module.parameters(), strict=True)
            pairs += [(a.grad, b.grad) for a, b in both if b.grad is not None]
    return max((whole(a) - b).abs().max().item() for a, b in pairs)
