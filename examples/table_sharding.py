"""Embedding tables cut as recommender systems cut them: by rows, by columns, whole tables on ranks, and both.

    longmesh run --ranks 4 examples/table_sharding.py

Each way gives the same vectors and the same gradients as one process. Row-wise lookups stay pending until they
are reduced, and the gradient of a row-wise table never leaves its rank.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longmesh import DTensor, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm

ROWS, WIDTH, LOOKUPS = 37, 6, 50


def look_up(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(indices, table)


def sharded(mesh: DeviceMesh, placements: list, table: torch.Tensor, indices: torch.Tensor) -> str:
    """One table cut over the mesh: compare vectors and gradient, and say what it took."""
    whole = table.clone().requires_grad_()
    look_up(whole, indices).square().sum().backward()
    cut = distribute_tensor(table, mesh, placements).requires_grad_()
    with record_comm() as log:
        vectors = look_up(cut, indices)
        pending = vectors.placements
        vectors.square().sum().backward()
    assert torch.allclose(vectors.full_tensor(), look_up(table, indices))
    assert torch.allclose(cut.grad.full_tensor(), whole.grad)
    return f"{len(log.events)} collectives, vectors {pending}, gradient {cut.grad.placements}"


def table_wise(mesh: DeviceMesh, tables: list[torch.Tensor], indices: torch.Tensor) -> str:
    """Whole tables on ranks: each looks up in its own, and one exchange gives every rank all vectors of its batch."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    mine = [t.clone().requires_grad_() for t in tables[rank::ranks]]
    vectors = torch.stack([look_up(t, indices) for t in mine], dim=1)  # (lookups, my tables, width)
    assert len(tables) % ranks == 0, "each rank has as many tables"
    by_table = DTensor.from_local(vectors, mesh, [Shard(1)])
    by_batch = by_table.redistribute(placements=[Shard(0)])
    by_batch.square().sum().backward()
    for own, table in zip(mine, tables[rank::ranks], strict=True):
        whole = table.clone().requires_grad_()
        look_up(whole, indices).square().sum().backward()
        assert torch.allclose(own.grad, whole.grad)
    return f"{len(mine)} tables a rank, vectors {by_table.placements} -> {by_batch.placements}"


def main() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("rows", "columns"))
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2 * ranks)]
    indices = torch.randint(ROWS, (LOOKUPS,), generator=generator)
    told = {
        "row-wise": sharded(mesh, [Shard(0)], tables[0], indices),
        "column-wise": sharded(mesh, [Shard(1)], tables[0], indices),
        "data-parallel": sharded(mesh, [Replicate()], tables[0], indices),
        "two-dimensional": sharded(grid, [Shard(0), Shard(1)], tables[0], indices),
        "table-wise": table_wise(mesh, tables, indices),
    }
    if rank == 0:
        for name, text in told.items():
            print(f"{name}: {text}")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
