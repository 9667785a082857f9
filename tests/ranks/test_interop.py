"""interop with torch's own DTensor: zero copy both ways, gradients, shard orders, FSDP2; and who is refused."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as reference
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from longmesh import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.interop import from_torch, to_torch
from longmesh.parallel import ColwiseParallel, parallelize_module
from longmesh.testing import cpu_mesh


def round_trips():
    mesh = cpu_mesh(2, 2)
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Partial(), Replicate()],
        [Partial("avg"), Shard(1)],
        [Replicate(), Partial("sum")],
    ):
        whole = torch.randn(5, 3)  # uneven on every axis
        x = distribute_tensor(whole, mesh, placements)
        out = to_torch(x)
        assert type(out) is reference.DTensor and out.to_local().data_ptr() == x.to_local().data_ptr()
        assert [repr(p) for p in out.placements] == [repr(p) for p in x.placements]
        assert out.shape == x.shape and out.stride() == x.stride()
        back = from_torch(out)
        assert (
            back._tensor_layout is x._tensor_layout and back.to_local().data_ptr() == x.to_local().data_ptr()
        )
        torch.testing.assert_close(back.full_tensor(), whole)
        if not any(p.is_partial() for p in placements):
            torch.testing.assert_close(out.full_tensor(), whole)
            out.to_local().fill_(7.0)  # seen on both sides
            assert x.full_tensor().eq(7.0).all()
    return True


def test_round_trips_share_memory(pool):
    assert pool.run(round_trips, ranks=4) == [True] * 4


def shard_orders():
    mesh = cpu_mesh(2, 2)
    whole = torch.arange(24.0).view(8, 3)
    x = distribute_tensor(whole, mesh, [Shard(0), Shard(0)], shard_order=[(0, (1, 0))])
    out = to_torch(x)
    torch.testing.assert_close(out.full_tensor(), whole)
    assert from_torch(out)._layout is x._layout
    odd = distribute_tensor(torch.ones(5), mesh, [Shard(0), Shard(0)], shard_order=[(0, (1, 0))])
    with pytest.raises(
        LongmeshError, match="into 4 unequal pieces, which torch's strided shards place elsewhere"
    ):
        to_torch(odd)
    return True


def test_shard_orders(pool):
    assert pool.run(shard_orders, ranks=4) == [True] * 4


def gradients():
    """In the middle of a computation: ours, then torch's, then ours."""
    mesh = cpu_mesh(2)
    whole = torch.randn(5, 3, requires_grad=True)
    x = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
    y = to_torch(x * 2)
    z = from_torch(y.sin())
    assert type(y) is reference.DTensor and type(z) is DTensor
    z.square().sum().backward()
    (whole * 2).sin().square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
    leaf = to_torch(nn.Parameter(x.detach()))
    assert isinstance(leaf, nn.Parameter) and leaf.is_leaf and leaf.requires_grad
    state = to_torch({"a": x.detach(), "b": [torch.ones(2), 3]})
    assert type(state["a"]) is reference.DTensor and state["b"][1] == 3
    return True


def test_gradients_and_trees(pool):
    assert pool.run(gradients, ranks=2) == [True] * 2


def cut_rows(name, module, mesh):
    if isinstance(module, nn.Linear):
        for key, parameter in list(module.named_parameters()):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))


def under_fsdp():
    """A module of ours, converted, under FSDP2 on the other mesh axis; its sharded parameters come back as ours."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    torch.manual_seed(0)
    net = nn.Linear(6, 4)
    expected = {name: p.detach().clone() for name, p in net.named_parameters()}
    distribute_module(net, mesh["tp"], cut_rows)
    net.weight.requires_grad_()
    fully_shard(to_torch(net), mesh=mesh["dp"])
    x = torch.randn(3, 6)
    out = net(reference.DTensor.from_local(x, mesh["tp"], [reference.Replicate()]))
    plain = nn.functional.linear(x, expected["weight"], expected["bias"])
    torch.testing.assert_close(out.full_tensor(), plain)
    out.sum().backward()
    ours = from_torch(net.weight)
    assert ours.placements == (Shard(0), Shard(0)) and ours.shard_order[0].mesh_dims == (1, 0)
    torch.testing.assert_close(ours.full_tensor().detach(), expected["weight"])
    return True


def test_fsdp2_of_a_converted_module(pool):
    assert pool.run(under_fsdp, ranks=4) == [True] * 4


class Scaled(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def refusals():
    mesh = cpu_mesh(2)
    texts = []
    for wrap in (
        lambda m: fully_shard(m, mesh=mesh),
        DistributedDataParallel,
        lambda m: to_torch(parallelize_module(nn.Sequential(Scaled(4, 4)), mesh, {"0": ColwiseParallel()})),
        lambda m: dist.all_reduce(m[0].weight.detach()),
    ):
        net = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
        with pytest.raises(LongmeshError) as raised:
            wrap(net)
        texts.append(str(raised.value))
    # The next collective works: nobody is left waiting in the refused one.
    total = torch.ones(())
    dist.all_reduce(total)
    return texts, total.item()


def test_refusals(pool):
    (texts, total), (others, _) = pool.run(refusals, ranks=2)
    assert texts == others and total == 2.0
    collective = (
        "torch.distributed's {} takes plain tensors, got a longmesh DTensor; use its to_local() or redistribute() it. "
        "DistributedDataParallel can't hold DTensor parameters: use FSDP2 on the module converted with "
        "longmesh.interop.to_torch, or make data parallelism an axis of your mesh"
    )
    assert texts == [
        (
            "fully_shard (FSDP2) takes plain parameters or torch's own DTensor, got a longmesh DTensor of shape "
            "(4, 4); convert the module with longmesh.interop.to_torch first, or make data parallelism an axis of "
            "your mesh"
        ),
        collective.format("broadcast"),
        (
            "to_torch: '0' is a Scaled with a forward of its own, to which a style gives longmesh DTensors; its "
            "parameters must be longmesh DTensors, too. Convert its state_dict() instead"
        ),
        collective.format("allreduce"),
    ]
