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

    >>> model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    >>> model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    >>> model(torch.ones(2, 4)).shape, model[1].weight.placements
    (torch.Size([2, 3]), (Shard(dim=1),))
    """

    by_rows = True
    default_input = Shard(-1)
    default_output = Replicate()
