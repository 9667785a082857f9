"""Who holds what: several layouts in the terminal, and one as a picture.

longmesh run --ranks 4 examples/visualize_sharding.py [picture.svg]
"""

import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.debug import visualize_sharding

LAYOUTS = (
    ("rows over both axes: 7 rows on 4 ranks", (7, 4), [Shard(0), Shard(0)]),
    ("a block each", (6, 6), [Shard(0), Shard(1)]),
    ("rows on one axis, copies on the other", (5, 3), [Shard(0), Replicate()]),
    ("fewer rows than ranks: one rank has none", (3, 2), [Shard(0), Shard(0)]),
    ("three dims", (2, 3, 4), [Shard(2), Shard(1)]),
)


def main() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    for title, shape, placements in LAYOUTS:
        tensor = distribute_tensor(torch.arange(torch.Size(shape).numel()).view(shape), mesh, placements)
        visualize_sharding(tensor, header=title, use_rich=True)
    if dist.get_rank() == 0:
        print()
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp()) / "sharding.svg"
    visualize_sharding(tensor, header=title, path=target)
    if dist.get_rank() == 0:
        drawn = ElementTree.parse(target).getroot()
        assert drawn.tag.endswith("svg") and len(drawn) > 0
        print(f"the last one as a picture: {target.name}, {target.stat().st_size} bytes")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
