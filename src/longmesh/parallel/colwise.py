"""ColwiseParallel: every rank computes some of a module's output features."""

from __future__ import annotations

from longmesh.parallel.cut import CutStyle
from longmesh.spec import Replicate, Shard


class ColwiseParallel(CutStyle):
    """Cut an nn.Linear or nn.Embedding by its output features.

    A plain input is taken to lie as `input_layouts` (default: whole on every rank); the output lies as
    `output_layouts` (default: cut along its last dim) and is this rank's plain tensor, or with
    `use_local_output=False` a DTensor. With `overlap=True` a Linear whose input is cut along another dim than
    its last multiplies the parts of the input as they arrive.

    >>> linear = parallelize_module(nn.Linear(4, 5), mesh, ColwiseParallel())
    >>> linear(torch.ones(2, 4)).shape  # three of five features
    torch.Size([2, 3])
    """

    by_rows = False
    default_input = Replicate()
    default_output = Shard(-1)
