"""Walk one tensor through several layouts on 4 ranks, with every plan in words and every layout drawn.

    longmesh run --ranks 4 examples/layouts_demo.py

Each step is checked: the whole tensor must be what it was, and the bytes sent what the plan promised.
"""

import torch
import torch.distributed as dist
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from torch.distributed.device_mesh import init_device_mesh

from longmesh import Layout, Partial, Replicate, Shard, distribute_tensor, plan_redistribute
from longmesh.comm import record_comm

SHAPE = (6, 10)

WALK = (
    ("rows over both axes", [Shard(0), Shard(0)], None),
    ("the same cut, the other axis first", [Shard(0), Shard(0)], [(0, (1, 0))]),
    ("columns over both axes", [Shard(1), Shard(1)], None),
    ("a block each", [Shard(0), Shard(1)], None),
    ("terms of a sum on axis 'dp'", [Partial(), Shard(1)], None),
    ("everything everywhere", [Replicate(), Replicate()], None),
)


def draw(layout: Layout) -> Columns:
    """One panel a rank: the cells of the tensor that it holds (+ where they are terms of a sum)."""
    panels: list[Panel] = []
    for where in layout.mesh.coordinates():
        (top, height), (left, width) = (layout.interval(d, SHAPE[d], where) for d in (0, 1))
        mark = "++" if layout.partial_axes else "██"
        rows = (
            "".join(
                mark if top <= i < top + height and left <= j < left + width else "· "
                for j in range(SHAPE[1])
            )
            for i in range(SHAPE[0])
        )
        panels.append(Panel("\n".join(rows), title=f"rank {layout.mesh.index(where)}", expand=False))
    return Columns(panels)


def main() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    console = Console(width=108, color_system=None, highlight=False, markup=False, quiet=dist.get_rank() != 0)
    whole = torch.arange(60.0).view(SHAPE)

    x = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    layout = Layout(mesh, x.placements)
    console.print(f"A {SHAPE} tensor on a 2 x 2 mesh, rows over 'dp': {layout}", draw(layout))
    for number, (title, placements, order) in enumerate(WALK, 1):
        source, layout = layout, Layout(mesh, placements, order)
        plan = plan_redistribute(source, layout, shape=SHAPE)
        with record_comm() as log:
            x = x.redistribute(placements=placements, shard_order=order)
        sent = torch.tensor(log.total_bytes)
        dist.all_reduce(sent)
        assert torch.equal(x.full_tensor(), whole), f"step {number} changed the tensor"
        assert int(sent) == plan.total_bytes, f"step {number} sent {int(sent)} bytes, not {plan.total_bytes}"
        console.print(f"\n{number}. {title}", plan.explain(), draw(layout), sep="\n")
    ranks = dist.get_world_size()
    console.print(
        f"\n{len(WALK)} moves, each checked on {ranks} ranks: the tensor is whole, the bytes are as planned."
    )


if __name__ == "__main__":
    main()
