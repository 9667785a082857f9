"""SequenceParallel: a module with whole parameters works on a sequence that is cut over the ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from longmesh._torch import own_parameters
from longmesh.parallel.modules import check_unstyled, give_layer, hook
from longmesh.parallel.norm import LayerNormLayer, RMSNormLayer
from longmesh.parallel.style import (
    ParallelStyle,
    arrange,
    check_one_axis,
    distribute_parameter,
    enter,
    give,
    replicate_buffers,
)
from longmesh.spec import Replicate, Shard
from longmesh.tensor import DTensor

_LAYERS = {nn.LayerNorm: LayerNormLayer, nn.RMSNorm: RMSNormLayer}


class SequenceParallel(ParallelStyle):
    """Run an nn.LayerNorm, nn.RMSNorm, nn.Dropout or a module of the like on a sequence cut along `sequence_dim`.

    Its parameters are whole on every rank. A plain input is this rank's equal part of the sequence; a DTensor is
    redistributed to it. The output is a DTensor, or with `use_local_output=True` this rank's plain tensor.

    >>> norm = parallelize_module(nn.LayerNorm(8), mesh, SequenceParallel())
    >>> norm(torch.randn(2, 3, 8)).placements  # three tokens of each rank
    (Shard(dim=1),)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def _check(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        check_one_axis(device_mesh, "SequenceParallel")
        check_unstyled(self, name, module)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._check("", module, device_mesh)
        argument = f"SequenceParallel of {type(module).__name__}"
        for part in module.modules():
            for name in list(own_parameters(part)):
                distribute_parameter(part, name, device_mesh, Replicate(), self.src_data_rank)
        kind = _LAYERS.get(type(module))
        if kind is not None:
            (sequence,) = self.sequence_sharding
            give_layer(module, kind(device_mesh, sequence, sequence, self.use_local_output, argument))
        else:
            replicate_buffers(module, device_mesh, self.src_data_rank)
            self._hook(module, device_mesh, argument)
        return module

    def _hook(self, module: nn.Module, mesh: DeviceMesh, argument: str) -> None:
        (sequence,) = self.sequence_sharding

        def take(given: Any) -> DTensor:
            return arrange(enter(given, mesh, sequence, argument), sequence)

        def hand_over(output: DTensor) -> Any:
            return give(output, local=self.use_local_output)

        advice = "SequenceParallel takes modules that give one tensor, computed from the input"
        hook(module, take, hand_over, argument, advice)

    def __repr__(self) -> str:
        return (
            f"SequenceParallel(sequence_dim={self.sequence_sharding[0].dim}, "
            f"use_local_output={self.use_local_output})"
        )
