"""CommDebugMode: which module sends what, forward and backward, as a tree, as JSON and as a trace.

    longmesh run --ranks 4 examples/comm_mode_features.py [folder]

A tensor-parallel MLP needs one all-reduce forward and none backward for its weights; the mode shows exactly that.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from longmesh.debug import CommDebugMode
from longmesh.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(10, 14)
        self.down = nn.Linear(14, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


def main() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    x = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    expected = MLP()(x)
    model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    mode = CommDebugMode()
    with mode:
        out = model(x)
        out.sum().backward()
    assert torch.allclose(out, expected, atol=1e-5)
    counts = {str(op): count for op, count in mode.get_comm_counts().items() if count}
    assert mode.get_total_counts() == sum(counts.values()) > 0

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    if rank == 0:
        print(mode)
        print(f"collectives: {counts}, {mode.get_total_bytes()} bytes sent by this rank")
        for name, placements in mode.get_sharding_info().items():
            print(f"{name}: {placements}")
        mode.generate_json_dump(folder / "comm.json", noise_level=1)
        mode.generate_chrome_trace(folder / "trace.json")
        mode.log_comm_debug_tracing_table_to_file(folder / "comm.txt", noise_level=1)
        assert json.loads((folder / "comm.json").read_text())
        assert json.loads((folder / "trace.json").read_text())
        print("wrote", ", ".join(sorted(path.name for path in folder.iterdir())))


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
