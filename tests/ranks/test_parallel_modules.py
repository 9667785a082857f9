"""Styled modules as a user meets them: prepared inputs and outputs, subclasses, tied weights, modes, mistakes."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from longmesh.parallel.modules import ParallelLinear
from longmesh.testing import cpu_mesh


class Echo(nn.Module):
    """Returns what it is given."""

    def forward(self, *args, **kwargs):
        return (*args, *kwargs.values())


def prepared():
    mesh = cpu_mesh(2)
    rank = dist.get_rank()
    whole = torch.arange(8.0).view(4, 2)
    mine = whole.chunk(2)[rank].clone().requires_grad_()
    into = PrepareModuleInput(
        input_layouts=(Shard(0), None),
        desired_input_layouts=(Replicate(), None),
        input_kwarg_layouts={"mask": Replicate()},
        desired_input_kwarg_layouts={"mask": Shard(1)},
    )
    echo = parallelize_module(Echo(), mesh, into)
    x, label, mask, other = echo(mine, "label", mask=whole, other=3)
    assert (x.placements, label, mask.placements, other) == ((Replicate(),), "label", (Shard(1),), 3)
    torch.testing.assert_close(x.to_local(), whole)
    torch.testing.assert_close(mask.full_tensor(), whole)
    (x * whole.new_full((), rank + 1.0).new_ones(())).sum().backward()
    torch.testing.assert_close(mine.grad, torch.ones(2, 2))

    out = PrepareModuleOutput(
        output_layouts=(Partial(), None), desired_output_layouts=(Shard(0), None), use_local_output=True
    )
    echo = parallelize_module(Echo(), mesh, out)
    total, label = echo(whole, "label")
    torch.testing.assert_close(total, whole.chunk(2)[rank] * 2)
    assert label == "label"

    both = PrepareModuleInputOutput(
        input_layouts=Shard(0),
        desired_input_layouts=Replicate(),
        use_local_input=True,
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
        use_local_output=False,
    )
    result = parallelize_module(Echo(), mesh, both)(distribute_tensor(whole[:3], mesh, [Shard(0)]))
    assert result.placements == (Shard(1),) and result.shape == (3, 2)
    torch.testing.assert_close(result.full_tensor(), whole[:3])
    return True


def test_prepared_inputs_and_outputs(pool):
    assert pool.run(prepared, ranks=2) == [True] * 2


class Scaled(nn.Linear):
    """A forward of its own, with a second argument."""

    def forward(self, input, factor):
        return F.linear(input, self.weight, self.bias) * factor


def subclasses():
    mesh = cpu_mesh(3)
    torch.manual_seed(0)
    x = torch.randn(2, 7)
    for style, given in ((ColwiseParallel(), Replicate()), (RowwiseParallel(), Shard(-1))):
        plain = Scaled(7, 5)
        styled = parallelize_module(copy.deepcopy(plain), mesh, style)
        assert type(styled) is Scaled
        out = styled(distribute_tensor(x, mesh, [given]).to_local(), 3.0)
        whole = DTensor.from_local(out, mesh, style.output_layouts, shape=(2, 5)).full_tensor()
        torch.testing.assert_close(whole, plain(x, 3.0))
    return True


def test_a_subclass_keeps_its_forward(pool):
    assert pool.run(subclasses, ranks=3) == [True] * 3


def mlp(mesh, **options):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
    plan = {"0": ColwiseParallel(**options), "2": RowwiseParallel()}
    return plain, parallelize_module(copy.deepcopy(plain), mesh, plan)


def under_modes():
    """Autocast, checkpointing, no_grad, a copy, a state dict, a compiler: each gives what the plain modules give."""
    mesh = cpu_mesh(2)
    plain, styled = mlp(mesh)
    x = torch.randn(3, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = styled(x), plain(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)  # two roundings to 8 bits in another order
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(styled(x), plain(x))
    x.requires_grad_()
    checkpoint(styled, x, use_reentrant=False).sum().backward()
    ours, x.grad = x.grad, None
    plain(x).sum().backward()
    torch.testing.assert_close(ours, x.grad)
    twin = copy.deepcopy(styled)
    assert type(twin[0]) is ParallelLinear and twin[0].weight is not styled[0].weight
    torch.testing.assert_close(twin(x), styled(x))
    twin.load_state_dict(styled.state_dict())
    assert list(twin.state_dict()) == list(plain.state_dict())
    file = io.BytesIO()
    torch.save(styled, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(x), styled(x))
    return True


def on_meta():
    """Made without data, cut, given memory, then loaded."""
    mesh = cpu_mesh(2)
    _, styled = mlp(mesh)
    with torch.device("meta"):
        _, empty = mlp(mesh)
    assert empty[0].weight.is_meta
    empty.to_empty(device="cpu").load_state_dict(styled.state_dict())
    x = torch.randn(3, 6)
    torch.testing.assert_close(empty(x), styled(x))
    return True


def test_made_on_meta(pool):
    assert pool.run(on_meta, ranks=2) == [True] * 2


def test_modes(pool):
    assert pool.run(under_modes, ranks=2) == [True] * 2


def frozen():
    """Without gradients for the weights or the input, nothing is computed or sent for them."""
    mesh = cpu_mesh(2)
    counts = []
    for input_grad, weight_grad in ((True, False), (False, True), (False, False)):
        plain, styled = mlp(mesh)
        for module in (plain, styled):
            module.requires_grad_(weight_grad)
        x = torch.randn(3, 6, requires_grad=input_grad)
        out, expected = styled(x), plain(x)
        assert out.requires_grad == expected.requires_grad
        if out.requires_grad:
            with record_comm() as log:
                out.sum().backward()
            counts.append(len(log.events))
            ours, x.grad = x.grad, None
            expected.sum().backward()
            if input_grad:
                torch.testing.assert_close(ours, x.grad)
        assert all((p.grad is not None) == weight_grad for p in styled.parameters())
    return counts


def test_what_needs_no_gradient_is_not_sent(pool):
    assert pool.run(frozen, ranks=2) == [[1, 0]] * 2


def averages():
    """A plain input that is this rank's term of an average counts 1/n: so does its gradient."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    for given in (Partial(), Partial("avg")):
        for out in (Partial(), Partial("avg")):
            style = ColwiseParallel(input_layouts=given, output_layouts=out)
            styled = parallelize_module(copy.deepcopy(plain), mesh, style)
            x = torch.randn(2, 4)
            y = x.clone().requires_grad_()
            DTensor.from_local(styled(y), mesh, [out]).redistribute(placements=[Replicate()]).sum().backward()
            z = x.clone().requires_grad_()
            whole = DTensor.from_local(z, mesh, [given]).redistribute(placements=[Replicate()])
            F.linear(whole.to_local(), plain.weight, plain.bias).sum().backward()
            torch.testing.assert_close(y.grad, z.grad)
    return True


def test_averages(pool):
    assert pool.run(averages, ranks=2) == [True] * 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def tied():
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    plain = Tied()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    styled = parallelize_module(copy.deepcopy(plain), mesh, plan)
    assert styled.head.weight is styled.embed.weight and len(list(styled.parameters())) == 1
    tokens = torch.randint(7, (2, 3))
    torch.testing.assert_close(styled(tokens), plain(tokens))
    for net in (styled, plain):
        net(tokens).square().sum().backward()
    torch.testing.assert_close(styled.embed.weight.grad.full_tensor(), plain.embed.weight.grad)
    with pytest.raises(LongmeshError) as raised:
        parallelize_module(Tied(), mesh, {"embed": ColwiseParallel(), "head": ColwiseParallel()})
    return str(raised.value)


def test_tied_weights_stay_tied(pool):
    assert pool.run(tied, ranks=2)[1] == (
        "ParallelEmbedding.weight and ParallelLinear.weight were one parameter and the plan shards it in two ways, "
        "(Shard(dim=1),) and (Shard(dim=0),); choose styles that shard it alike (RowwiseParallel of an Embedding and "
        "ColwiseParallel of a Linear shard dim 0), or untie them"
    )


def mistakes():
    """Each is found before anything is sent but what compares plans, with the same text on every rank."""
    mesh = init_device_mesh("cpu", (2,))  # where no style has given unequal shards
    _, styled = mlp(mesh)
    texts = []

    def attempt(fn, kind=LongmeshError):
        with pytest.raises(kind) as raised:
            fn()
        texts.append(str(raised.value))

    with record_comm() as log:
        attempt(lambda: styled[2](torch.randn(3, 10)))
        attempt(lambda: styled[0](DTensor.from_local(torch.randn(3, 6), cpu_mesh(1, 2), [Replicate()] * 2)))
        attempt(lambda: parallelize_module(styled, mesh, {"0": RowwiseParallel()}))
        echo = PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
        attempt(lambda: parallelize_module(Echo(), mesh, echo)(torch.ones(2), torch.ones(2)))
        attempt(lambda: parallelize_module(Echo(), mesh, echo)("text"))
        attempt(lambda: parallelize_module(Echo(), mesh, echo)(torch.ones(())))
        attempt(lambda: parallelize_module(Echo(), mesh, SequenceParallel())(torch.ones(2, 2)))
    sent = [event.kind for event in log.events]
    return texts, sent


def test_mistakes(pool):
    first, second = pool.run(mistakes, ranks=2)
    assert first == second
    texts, sent = first
    # Of plans' fingerprints, one in each parallelize_module, and of plain inputs' sizes, one for each kind of module.
    assert sorted(sent) == ["all_gather"] * 2 + ["all_reduce"] * 5
    assert texts == [
        (
            "RowwiseParallel of Linear: the input of rank 0 has 10 features and its share of 10 on 2 ranks is 5; pass "
            "the shard that chunking gives, or give input_layouts= as the input really is (Replicate() if it is "
            "whole)"
        ),
        (
            "ColwiseParallel of Linear: the input is on DeviceMesh((1, 2), 'cpu', stride=((), 1)) and the module on "
            "DeviceMesh((2,), 'cpu', stride=(1,)); put them on one mesh"
        ),
        (
            "RowwiseParallel can't take ParallelLinear '0': a style was applied to it already; name a module once in a "
            "plan"
        ),
        (
            "PrepareModuleInput of the Echo itself: input: 2 values and 1 layouts (Shard(dim=0),); give one per value, "
            "None for those to leave as they are"
        ),
        (
            "PrepareModuleInput of the Echo itself: input 0 is a str and has the layout S(0); give None for what is no "
            "tensor"
        ),
        "Shard(0) on axis 0 is out of range for a tensor of 0 dims; a scalar can't be sharded",
        (
            "SequenceParallel of Echo: its forward returned a tuple, not a DTensor; SequenceParallel takes modules "
            "that give one tensor, computed from the input"
        ),
    ]


class Block(nn.Module):
    """Every kind of style in one graph."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.other = nn.Embedding(7, 6), nn.LayerNorm(6), nn.RMSNorm(6)
        self.up, self.down, self.exit = nn.Linear(6, 10), nn.Linear(10, 6), nn.Identity()

    def forward(self, tokens):
        h = self.embed(tokens)
        return self.exit(h + self.down(F.gelu(self.up(self.other(self.norm(h))))))


def compiled():
    torch._dynamo.reset()
    mesh = cpu_mesh(2)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "other": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "exit": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
    }
    torch.manual_seed(0)
    styled = parallelize_module(Block(), mesh, plan)
    tokens = torch.randint(7, (2, 4))
    results = []
    for run in (styled, torch.compile(styled, backend="aot_eager", fullgraph=True)):
        styled.zero_grad()
        out = run(tokens)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad.full_tensor() for p in styled.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
    return True


# torch itself warns of torch.jit when it loads its compiler.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_compiled(pool):
    assert pool.run(compiled, ranks=2, timeout=300.0) == [True] * 2
