"""ColwiseParallel and RowwiseParallel: shard a module's parameters, and give it the layer that runs them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh.parallel.embedding import EmbeddingLayer
from longmesh.parallel.linear import LinearLayer
from longmesh.parallel.modules import PARALLEL, check_unstyled, give_layer, hook
from longmesh.parallel.style import (
    ParallelStyle,
    arrange,
    check_module,
    check_one_axis,
    check_placement,
    distribute_parameter,
    enter,
    leave,
    replicate_buffers,
)
from longmesh.spec import Placement, Replicate, Shard
from longmesh.tensor import DTensor


class ShardedStyle(ParallelStyle):
    """A style that shards an nn.Linear or nn.Embedding; `by_rows` and the default layouts are its subclass's."""

    by_rows: bool
    default_input: Placement
    default_output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        overlap: bool = False,
    ) -> None:
        name = type(self).__name__
        given = self.default_input if input_layouts is None else input_layouts
        self.input_layouts = (check_placement(given, f"{name}(input_layouts)"),)
        wanted = self.default_output if output_layouts is None else output_layouts
        self.output_layouts = (check_placement(wanted, f"{name}(output_layouts)"),)
        self.use_local_output = use_local_output
        self.overlap = overlap

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_one_axis(device_mesh, type(self).__name__)
        check_module(self, name, module, (nn.Linear, nn.Embedding))
        check_unstyled(self, name, module)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check("", module, device_mesh)
        argument = f"{type(self).__name__} of {type(module).__name__}"
        usual = (device_mesh, *self.input_layouts, *self.output_layouts, self.use_local_output, argument)
        if isinstance(module, nn.Linear):
            layer = LinearLayer(*usual, self.by_rows, self.overlap)
            distribute_parameter(module, "bias", device_mesh, layer.bias_placement, self.src_data_rank)
        else:
            layer = EmbeddingLayer(*usual, self.by_rows)
        distribute_parameter(module, "weight", device_mesh, layer.weight_placement, self.src_data_rank)
        if type(module) in PARALLEL:
            give_layer(module, layer)
        else:
            replicate_buffers(module, device_mesh, self.src_data_rank)
            self._hook(module, device_mesh, argument)
        return module

    def _hook(self, module: nn.Module, mesh: DeviceMesh, argument: str) -> None:
        """A subclass keeps its forward: its first input becomes a DTensor, its output what is asked for."""
        features = module.in_features if isinstance(module, nn.Linear) else None
        wanted = Shard(-1) if self.by_rows and features is not None else Replicate()

        def take(given: Any) -> DTensor:
            return arrange(enter(given, mesh, *self.input_layouts, argument, features), wanted)

        def give(output: DTensor) -> torch.Tensor:
            return leave(output, *self.output_layouts, local=self.use_local_output)

        advice = "a forward of your own must compute with self.weight and the input it is given"
        hook(module, take, give, argument, advice)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output}, overlap={self.overlap})"
        )


class ColwiseParallel(ShardedStyle):
    """Shard an nn.Linear or nn.Embedding by its output features.

    A plain input is taken to be laid out as `input_layouts` (default: whole on every rank); the output is laid out as
    `output_layouts` (default: sharded along its last dim) and is this rank's plain tensor, or with
    `use_local_output=False` a DTensor. With `overlap=True` a Linear whose input is sharded along another dim than
    its last multiplies the parts of the input as they arrive.

    >>> linear = parallelize_module(nn.Linear(4, 5), mesh, ColwiseParallel())
    >>> linear(torch.ones(2, 4)).shape  # three of five features
    torch.Size([2, 3])
    """

    by_rows = False
    default_input = Replicate()
    default_output = Shard(-1)


class RowwiseParallel(ShardedStyle):
    """Shard an nn.Linear by its input features, an nn.Embedding by its rows.

    A plain input is taken to be laid out as `input_layouts` (default: sharded along its last dim; give Replicate() for
    the indices of an Embedding); the output is laid out as `output_layouts` (default: whole on every rank) and is this
    rank's plain tensor, or with `use_local_output=False` a DTensor. With `overlap=True` a Linear whose output is
    sharded along another dim than its last multiplies the parts of the output's gradient as they arrive.

    >>> model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    >>> model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    >>> model(torch.ones(2, 4)).shape, model[1].weight.placements
    (torch.Size([2, 3]), (Shard(dim=1),))
    """

    by_rows = True
    default_input = Shard(-1)
    default_output = Replicate()
