"""The made-up device itself: what it refuses and counts, on a process of its own."""

import pytest
import torch
import torch.distributed as dist

from longmesh.errors import LongmeshError
from longmesh.testing import RankError
from longmesh.testing.device import DeviceCounts, SimTensor, fake_rank, hollow, register_device


def compute() -> list[list[float]]:
    register_device()
    layer = torch.nn.Linear(4, 2, device="sim")
    x = torch.arange(8.0, device="sim").view(2, 4).requires_grad_()
    layer(x).square().sum().backward()
    assert isinstance(x.grad, SimTensor) and x.grad.device == torch.device("sim", 0)
    want = torch.nn.Linear(4, 2)
    want.load_state_dict({name: t.cpu() for name, t in layer.state_dict().items()})
    y = x.detach().cpu().requires_grad_()
    want(y).square().sum().backward()
    assert y.grad is not None and torch.equal(x.grad.cpu(), y.grad)
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    return x.tolist()


def refusals() -> list[str]:
    register_device()
    x, said = torch.ones(3, device="sim"), []
    empty = hollow(torch.empty(3))
    for wrong in (
        lambda: x + torch.ones(3),
        lambda: x.numpy(),
        lambda: empty.cpu(),
        lambda: (empty + x).sum().item(),
        lambda: torch.cat([x, torch.ones(1)]),
    ):
        try:
            wrong()
        except Exception as error:
            said.append(f"{type(error).__name__} {error}")
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]  # a scalar is taken by GPUs, too
    return said


def counted() -> list[tuple[int, int, int]]:
    register_device()
    x, found = torch.ones(3, device="sim"), []
    for what in (
        lambda: x.sum().item(),
        lambda: x.cpu(),
        lambda: torch.ones(3).to("sim"),
        lambda: x[torch.tensor([0])],
        lambda: x[x > 0],
        lambda: torch.tensor([1, 2], device="sim"),
        lambda: x.nonzero(),
        lambda: x * 2,
    ):
        with DeviceCounts() as counts:
            what()
        found.append((counts.host_reads, counts.uploads, counts.downloads))
    return found


def coordinates() -> list[tuple[int, int]]:
    found = []
    for rank in (0, 5):
        with fake_rank(rank, 64):
            x = torch.empty(4, device="sim")
            assert isinstance(x, SimTensor) and x.is_hollow
            dist.all_reduce(x)
            found.append((dist.get_rank(), dist.get_world_size()))
    return found


def nested() -> None:
    with fake_rank(0, 2), fake_rank(0, 2):
        pass


def test_it_computes_as_the_cpu_does(pool):
    assert pool.run(compute, ranks=1, device="fake") == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_it_refuses_what_a_gpu_refuses(pool):
    mixed, numpy, copied, read, joined = pool.run(refusals, ranks=1, device="fake")[0]
    assert (
        "expected all tensors to be on the same device, but found one of (3,) on cpu besides sim:0" in mixed
    )
    assert "expected all tensors to be on the same device" in joined
    assert numpy == "TypeError can't convert a tensor of device sim to numpy: use .cpu() first"
    assert copied == "RuntimeError a hollow tensor has no values to copy to the CPU"
    assert read.startswith("RuntimeError")


def test_what_the_host_waits_for_is_counted(pool):
    found = pool.run(counted, ranks=1, device="fake")[0]
    assert found == [(1, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 0), (1, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 0)]


def test_one_process_is_any_rank(pool):
    assert pool.run(coordinates, ranks=1, device="fake") == [[(0, 64), (5, 64)]]
    with pytest.raises(RankError, match="this process is in a world already"):
        pool.run(nested, ranks=1, device="fake")


def test_devices_of_a_pool(pool):
    with pytest.raises(
        LongmeshError, match=r"there are the devices cpu, sim, sim\+cpu, fake; 'fake' has 1 process"
    ):
        pool.run(compute, ranks=2, device="fake")
    with pytest.raises(LongmeshError, match="there are the devices"):
        pool.run(compute, ranks=1, device="cuda")


# -- what NCCL refuses ---------------------------------------------------------------------------------


def collective(kind: str) -> list[float]:
    rank, x = dist.get_rank(), torch.ones(2, device="sim")
    match kind:
        case "sum":
            dist.all_reduce(x)
        case "cpu":
            dist.all_reduce(torch.ones(2))
        case "type":
            dist.all_reduce(torch.ones(2, dtype=torch.int16, device="sim"))
        case "uneven":
            dist.all_gather(
                [torch.ones(n + 1, device="sim") for n in range(2)], torch.ones(rank + 1, device="sim")
            )
        case "scattered":
            parts = [torch.ones(n + 1, device="sim") for n in range(2)]
            dist.reduce_scatter(torch.ones(rank + 1, device="sim"), parts)
        case "bits":
            dist.all_reduce(x.long(), op=dist.ReduceOp.BOR)
        case "complex":
            assert dist.group.WORLD is not None
            name = dist.group.WORLD.group_name
            torch.ops._c10d_functional.all_reduce(x.to(torch.complex64), "product", name)
        case "mean":
            dist.reduce(x.bool(), 0, op=dist.ReduceOp.AVG)
        case "anyone":
            dist.all_reduce(x)
            dist.send(x, 1) if rank == 0 else dist.recv(x)
        case "order":
            dist.all_reduce(x) if rank else dist.broadcast(x, src=0)
        case "cold":
            group = dist.new_group([0, 1])
            assert isinstance(group, dist.ProcessGroup)
            dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)
        case "warm":
            dist.all_reduce(x)
            dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    return x.tolist()


@pytest.mark.parametrize("kind", ["sum", "warm"])
def test_the_group_carries_values(pool, kind):
    assert pool.run(collective, kind, ranks=2, device="sim") == [[2, 2]] * 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("cpu", "No backend type associated with device type cpu"),
        ("type", "NCCL has no element type torch.int16"),
        ("uneven", "NCCL gathers and scatters tensors of one size"),
        ("scattered", "NCCL gathers and scatters tensors of one size"),
        ("bits", "NCCL does not reduce torch.int64 by bor"),
        ("complex", "NCCL does not reduce torch.complex64 by product"),
        ("mean", "NCCL does not reduce torch.bool by avg"),
        ("anyone", "NCCL receives from a rank that is named"),
        ("order", "NCCL would hang: the ranks of a group start different collectives"),
        ("cold", "NCCL may hang: (send|recv_) is the first call in a group of 2"),
    ],
)
def test_the_group_refuses_what_nccl_refuses(pool, kind, text):
    with pytest.raises(RankError, match=text):
        pool.run(collective, kind, ranks=2, device="sim", timeout=20)
