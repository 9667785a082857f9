"""A subclass of a placement is refused wherever placements are given: it would be taken for its base class."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TheirDTensor, Replicate as TheirReplicate, Shard as TheirShard

from longmesh import DTensor, Layout, MeshShape, Partial, Replicate, Shard, distribute_tensor, interop, zeros
from longmesh.errors import LongmeshError
from longmesh.experimental import local_map, register_sharding
from longmesh.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from longmesh.spec.placement import MaskPartial
from longmesh.testing import cpu_mesh


@dataclass(frozen=True)
class Strided(Shard):
    """As fused gate and up weights are sharded by some."""

    split_factor: int = 2


class Equal(Shard):
    """One that claims to be the shard that it is derived from."""

    def __eq__(self, other):
        return isinstance(other, Shard) and other.dim == self.dim

    def __hash__(self):
        return hash(Shard(self.dim))


class Everywhere(Replicate):
    pass


class Sum(Partial):
    pass


class TheirStrided(TheirShard):
    pass


@torch.library.custom_op("placement_subclasses::double", mutates_args=())
def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


@double.register_fake
def _(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value)


GIVEN = [Strided(0), Strided(-1), Equal(0), Equal(-1), Everywhere(), Sum()]


@pytest.mark.parametrize("placement", GIVEN, ids=repr)
def test_no_layout_is_made_of_it(placement):
    mesh = MeshShape((2,))
    for known in (Shard(0), Replicate(), Partial(), MaskPartial()):
        assert Layout(mesh, [known]).placements == (known,)
    kind = type(placement)
    text = f"{kind.__name__}.* is a subclass of {kind.__bases__[0].__name__}, and would be taken for it; use Shard, "
    with pytest.raises(LongmeshError, match=text):
        Layout(mesh, [placement])
    with pytest.raises(
        LongmeshError, match=r"torch.*Shard\) is not a longmesh placement; use Shard, Replicate"
    ):
        Layout(mesh, [TheirShard(0)])


def entries(mesh, placement):
    """Every way in, as functions: none of them may let `placement` pass."""
    x = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    like = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    plain = torch.ones(4, 4)

    def style(make):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        parallelize_module(model, mesh, {"0": make}) if make else None
        return model(plain)

    def rule():
        register_sharding(torch.ops.placement_subclasses.double.default)(
            lambda value: [([placement], [placement])]
        )
        return double(like)

    def needs_grad():
        return like.clone().requires_grad_()

    return {
        "distribute_tensor": lambda: distribute_tensor(plain, mesh, [placement]),
        "from_local": lambda: DTensor.from_local(plain, mesh, [placement]),
        "from_local of a shape": lambda: DTensor.from_local(
            plain, mesh, [placement], shape=(8, 4), stride=(4, 1)
        ),
        "from_local, gradients": lambda: DTensor.from_local(
            plain.clone().requires_grad_(), mesh, [Shard(0)], grad_placements=[placement]
        ),
        "redistribute": lambda: x.redistribute(placements=[placement]),
        "to_local, gradients": lambda: needs_grad().to_local(grad_placements=[placement]),
        "full_tensor, gradients": lambda: needs_grad().full_tensor(grad_placements=[placement]),
        "zeros": lambda: zeros(4, 4, device_mesh=mesh, placements=[placement]),
        "local_map": lambda: local_map(lambda t: t, ([placement],), ([placement],), device_mesh=mesh)(like),
        "local_map, out": lambda: local_map(lambda t: t, ([placement],), None, device_mesh=mesh)(like),
        "colwise": lambda: style(ColwiseParallel(input_layouts=placement)),
        "colwise, out": lambda: style(ColwiseParallel(output_layouts=placement)),
        "rowwise": lambda: style(RowwiseParallel(input_layouts=placement)),
        "rowwise, out": lambda: style(RowwiseParallel(input_layouts=Replicate(), output_layouts=placement)),
        "input": lambda: style(
            PrepareModuleInput(input_layouts=placement, desired_input_layouts=Replicate())
        ),
        "desired input": lambda: style(
            PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=placement)
        ),
        "output": lambda: style(
            PrepareModuleOutput(output_layouts=placement, desired_output_layouts=Replicate())
        ),
        "register_sharding": rule,
    }


def try_entries():
    mesh = cpu_mesh(2)
    passed = []
    for placement in GIVEN:
        for name, call in entries(mesh, placement).items():
            try:
                call()
            except LongmeshError as error:
                if "is a subclass of" not in str(error):
                    passed.append((name, repr(placement), str(error)))
            else:
                passed.append((name, repr(placement)))
    return passed


def test_every_way_in_refuses_it(pool):
    assert pool.run(try_entries, ranks=2) == [[], []]


def kept():
    """What had lost its class before: as a parameter, and with a dim from the end."""
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(-1)])
    return str(nn.Parameter(x).placements), SequenceParallel(sequence_dim=-1) is not None


def test_placements_of_our_own_stay(pool):
    assert pool.run(kept, ranks=2) == [("(Shard(dim=1),)", True)] * 2


def from_theirs():
    mesh = cpu_mesh(2)
    made = TheirDTensor.from_local(torch.ones(2, 3), mesh, [TheirShard(0)], run_check=False)
    made._spec.placements = (TheirStrided(0),)
    fine = TheirDTensor.from_local(torch.ones(2, 3), mesh, [TheirReplicate()], run_check=False)
    try:
        interop.from_torch(made)
    except LongmeshError as error:
        return str(error), interop.from_torch(fine).placements
    return "passed"


def test_subclasses_of_torchs_placements(pool):
    for text, fine in pool.run(from_theirs, ranks=2):
        assert "has TheirStrided, which only torch can finish" in text
        assert fine == (Replicate(),)
