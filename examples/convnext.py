"""A ConvNeXt block stack on images cut over space and batch: convolutions exchange the rows at their edges.

    longmesh run --ranks 4 examples/convnext.py

The mesh is 2 x 2: images over "dp", their rows over "space". Forward and gradients are compared with one process.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from longmesh import Replicate, Shard, distribute_module, distribute_tensor
from longmesh.comm import record_comm

WIDTHS = (8, 16)


class Block(nn.Module):
    """Depthwise convolution, norm over channels, two pointwise layers, a scaled residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, kernel_size=7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(nn.functional.gelu(self.widen(y)))
        return x + y.permute(0, 3, 1, 2)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    first, second = WIDTHS
    return nn.Sequential(
        nn.Conv2d(3, first, kernel_size=2, stride=2),
        Block(first),
        nn.Conv2d(first, second, kernel_size=2, stride=2),
        Block(second),
    )


def main() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "space"))
    images = torch.randn(3, 3, 32, 24, generator=torch.Generator().manual_seed(1))
    plain = make_model()
    expected = plain(images)
    expected.square().mean().backward()

    model = distribute_module(make_model(), mesh)
    x = distribute_tensor(images, mesh, [Shard(0), Shard(2)])
    with record_comm() as log:
        out = model(x)
        out.square().mean().backward()
    print(
        f"rank {rank}: {tuple(x.to_local().shape)} of {tuple(x.shape)}, gives {tuple(out.to_local().shape)}"
    )
    differences = [(out.full_tensor() - expected).abs().max().item()]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        whole = ours.grad.redistribute(placements=[Replicate(), Replicate()]).to_local()
        differences.append(((whole - theirs.grad).abs().max() / theirs.grad.abs().max()).item())
    assert max(differences) < 1e-4, differences
    if rank == 0:
        print(f"{len(log.events)} collectives; largest difference from one process {max(differences):.1e}")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
