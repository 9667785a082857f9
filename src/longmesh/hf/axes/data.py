"""Gradients over data ranks: averaged as they are computed, each parameter's over the axes on which it is whole.

    mesh dp 2 x ep 2      a layer's weight   whole on dp and ep          summed over 4 ranks, divided by 4
                          an expert          sharded over ep             summed over 2 ranks, divided by 4

An expert has seen the tokens of all ranks of its axis already, so its gradient is divided by the number of all data
ranks, not of those that hold it.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import nn

from longmesh.comm import AxisGroup, collectives, comm_of
from longmesh.hf.axes.parallelize import mesh_of
from longmesh.spec import Partial, Replicate
from longmesh.tensor import DTensor

_SAME_TOKENS = "tp"


def average_gradients(model: nn.Module) -> nn.Module:
    """Have the gradients of a model that `parallelize` has sharded averaged over the ranks of all axes but "tp", each
    time they are computed. Collective, and so is every backward pass then: every rank of the mesh.

    It does what DDP does, for a model whose parameters lie on different meshes: scale the loss as for DDP.
    Call it last: a model that is moved to another device or dtype loses these hooks.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=9, hidden_size=12, num_hidden_layers=1, num_attention_heads=3)
    >>> data = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = average_gradients(parallelize(LlamaForCausalLM(config), data))
    """
    mesh = mesh_of(model)
    names = mesh.mesh_dim_names or ()
    data = [name for name in names if name != _SAME_TOKENS]
    ranks = math.prod(mesh[name].size() for name in data)
    comm = comm_of(mesh)
    for parameter in model.parameters():
        if parameter.requires_grad and ranks > 1:
            held = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
            axes = tuple(place for place, name in enumerate(names) if name in data and name not in held)
            group = comm.group(axes) if axes else None
            parameter.register_hook(functools.partial(_average, group=group, ranks=ranks))
    return model


def _average(gradient: torch.Tensor, *, group: AxisGroup | None, ranks: int) -> torch.Tensor:
    if isinstance(gradient, DTensor):
        # What is pending is reduced first, over its own mesh: sums of terms are not kept pending over two meshes.
        if any(isinstance(placement, Partial) for placement in gradient.placements):
            whole = [p if p.is_shard() else Replicate() for p in gradient.placements]
            gradient = gradient.redistribute(placements=whole)
        local = _average(gradient.to_local(), group=group, ranks=ranks)
        return DTensor.from_local(
            local, gradient.device_mesh, gradient.placements, shape=gradient.shape, stride=gradient.stride()
        )
    if group is not None:
        gradient = collectives.all_reduce(gradient, reduce_op="sum", group=group)
    return gradient / ranks
