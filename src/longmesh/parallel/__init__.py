"""Parallelise a model by a plan of module styles; names, arguments and defaults as torch's."""

from longmesh.parallel.apply import parallelize_module
from longmesh.parallel.attention import AttentionParallel
from longmesh.parallel.loss import loss_parallel
from longmesh.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput
from longmesh.parallel.sequence import SequenceParallel
from longmesh.parallel.sharded import ColwiseParallel, RowwiseParallel
from longmesh.parallel.style import ParallelStyle

__all__ = [
    "AttentionParallel",
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "loss_parallel",
    "parallelize_module",
]
