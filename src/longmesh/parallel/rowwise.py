"""RowwiseParallel: every rank takes some of a module's input features, and the ranks' results are added."""

from __future__ import annotations

from longmesh.parallel.cut import CutStyle
from longmesh.spec import Replicate, Shard


class RowwiseParallel(CutStyle):
    """Cut an nn.Linear by its input features, an nn.Embedding by its rows.

    A plain input is taken to lie as `input_layouts` (default: cut along its last dim; give Replicate() for the
    indices of an Embedding); the output lies as `output_layouts` (default: whole on every rank) and is this
    rank's plain tensor, or with `use_local_output=False` a DTensor. With `overlap=True` a Linear whose output is
    cut along another dim than its last multiplies the parts of the output's gradient as they arrive.
    """

    by_rows = True
    default_input = Shard(-1)
    default_output = Replicate()
