"""CommDebugMode on real ranks: what each module sends, forward and backward, and how it is told."""

import inspect
import json

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode as Reference
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from longmesh import Partial, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.comm import record_comm
from longmesh.debug import CommDebugMode
from longmesh.experimental import context_parallel
from longmesh.testing import cpu_mesh


class MLP(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up = nn.Linear(5, hidden, bias=False)
        self.down = nn.Linear(hidden, 5, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu()).redistribute(placements=[Replicate()]).relu()


class Model(nn.Module):
    def __init__(self, hidden, recompute):
        super().__init__()
        self.blocks = nn.ModuleList([MLP(hidden), MLP(hidden)])
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


def make_model(mesh, hidden, recompute=False):
    torch.manual_seed(0)

    def place(name, module, mesh):
        if isinstance(module, nn.Linear):
            dim = 0 if name.endswith("up") else 1
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dim)]))

    return distribute_module(Model(hidden, recompute), mesh, place)


def run_model(mode, hidden, recompute=False):
    mesh = cpu_mesh(dist.get_world_size(), names=("tp",))
    model = make_model(mesh, hidden, recompute)
    x = distribute_tensor(torch.ones(3, 5), mesh, [Replicate()]).requires_grad_()
    with record_comm() as log, mode:
        model(x).sum().backward()
    return log


def by_module(node):
    """{module: (collectives forward, backward, bytes forward, backward)} of a JSON dump."""
    found = {
        node["fqn"]: (
            sum(count for _, count in node["collectives_forward"]),
            sum(count for _, count in node["collectives_backward"]),
            node["bytes_forward"],
            node["bytes_backward"],
        )
    }
    for child in node["children"]:
        found |= by_module(child)
    return found


def names(counts):
    """Counts by the ops' names: ops themselves are not sent from rank to rank."""
    return {str(op): number for op, number in counts.items()}


def count(hidden, directory):
    mode = CommDebugMode()
    log = run_model(mode, hidden)
    path = f"{directory}/{dist.get_rank()}.json"
    mode.generate_json_dump(path)
    with open(path) as file:
        dump = json.load(file)
    assert mode.get_total_bytes() == log.total_bytes == dump["bytes_forward"] + dump["bytes_backward"]
    parameters = mode.get_parameter_info()
    assert list(parameters) == [f"Model.blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down")]
    assert parameters["Model.blocks.0.up"]["weight"].shape == (hidden, 5)
    waited = dump["waited_us_forward"] + dump["waited_us_backward"]
    return (
        names(mode.get_comm_counts()),
        mode.get_total_counts(),
        by_module(dump),
        mode.get_sharding_info(),
        waited,
    )


@pytest.mark.parametrize(("ranks", "hidden"), [(2, 8), (3, 7), (4, 3), (1, 4)])
def test_counts_and_bytes_by_module_and_direction(pool, tmp_path, ranks, hidden):
    counts, total, modules, sharding, waited = pool.run(count, hidden, str(tmp_path), ranks=ranks)[0]
    assert total == sum(counts.values())
    if ranks == 1:
        assert total == 0
        return
    # Each block reduces its output; in the backward pass the first reduces its output's gradient, and the
    # gradient of the model's input stays pending.
    assert counts == {"c10d_functional.all_reduce": 3}
    reduced = 2 * -(-15 // ranks) * (ranks - 1) * 4
    assert modules["Model"] == modules["Global"] == (2, 1, 2 * reduced, reduced)
    assert modules["Model.blocks.0"] == (1, 1, reduced, reduced)
    assert modules["Model.blocks.1"] == (1, 0, reduced, 0)
    assert modules["Model.blocks.0.down"][:2] == (0, 0), "redistribute() is called by the block"
    assert sharding["Model.blocks.1.down.weight"] == (Shard(1),)
    assert waited > 0


def recompute():
    mode = CommDebugMode()
    run_model(mode, 4, recompute=True)
    return [(c.module, c.is_backward) for c in mode.calls]


def test_what_a_checkpoint_recomputes_counts_as_backward_of_its_module(pool):
    calls = pool.run(recompute, ranks=2)[0]
    assert [name for name, backward in calls if not backward] == ["Model.blocks.0", "Model.blocks.1"]
    assert [name for name, backward in calls if backward] == [
        "Model.blocks.1",  # recomputed
        "Model.blocks.0",  # the gradient of its output
        "Model.blocks.0",  # recomputed
    ]


def trace(directory):
    mode = CommDebugMode()
    run_model(mode, 4)
    stem = f"{directory}/{dist.get_rank()}"
    mode.generate_chrome_trace(stem + ".trace")
    mode.log_comm_debug_tracing_table_to_file(stem + ".txt", noise_level=1)
    with open(stem + ".trace") as file, open(stem + ".txt") as text:
        return json.load(file), text.read(), str(mode), mode.generate_comm_debug_tracing_table(3)


def test_tree_table_and_chrome_trace(pool, tmp_path):
    events, table, tree, noisy = pool.run(trace, str(tmp_path), ranks=2)[1]
    spans = [e for e in events["traceEvents"] if e["ph"] == "X"]
    collectives = [e for e in spans if e["name"] == "all_reduce"]
    assert [e["cat"] for e in collectives] == ["forward", "forward", "backward"]
    assert all(e["dur"] > 0 and e["pid"] == 1 and e["args"]["axes"] == "axis 'tp'" for e in collectives)
    block = next(e for e in spans if e["name"] == "Model.blocks.0")
    first = collectives[0]
    assert block["ts"] <= first["ts"] and first["ts"] + first["dur"] <= block["ts"] + block["dur"]
    assert "test_debug_comm_mode.py" in first["args"]["call_site"]
    assert "Model (Model)" in tree and "c10d_functional.all_reduce x1" in tree and "ms waited" in tree
    assert "aten.linear_backward.default" not in tree
    assert "aten.linear_backward.default  (3, 4), (3, 5), (5, 4)  S(1), R, S(1) on MeshShape(tp=2)" in table
    assert "aten.t.default" not in table and "aten.t.default" in noisy


def mixed():
    """Collectives of ours, of torch's functional API and of torch.distributed, and an op that fails inside."""
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    ours, theirs = CommDebugMode(), Reference()
    with theirs, ours:
        x.full_tensor()
        dist.all_reduce(torch.ones(3))
        torch.distributed._functional_collectives.all_reduce(torch.ones(6), "sum", mesh).wait()
        x.redistribute(placements=[Partial()]).full_tensor()
    same = theirs.get_comm_counts() == ours.get_comm_counts()
    assert ours.get_comm_counts()[torch.ops.c10d_functional.broadcast] == 0
    counts, sent = names(ours.get_comm_counts()), [c.event.sent_bytes for c in ours.calls]
    with pytest.raises(RuntimeError), ours:
        torch.ones(2) @ torch.ones(3)
    with ours:
        pass
    return same, counts, sent, ours.get_total_counts()


def test_other_libraries_collectives_are_counted_as_torch_counts_them(pool):
    same, counts, sent, again = pool.run(mixed, ranks=2)[0]
    assert counts == {
        "c10d_functional.all_gather_into_tensor": 1,
        "c10d_functional.all_reduce": 2,
        "c10d.allreduce_": 1,
    }
    assert same
    assert sent == [8, 12, 24, 16]
    assert again == 0


@pytest.mark.parametrize(
    "name",
    [
        "get_comm_counts",
        "get_total_counts",
        "get_parameter_info",
        "get_sharding_info",
        "generate_comm_debug_tracing_table",
        "generate_json_dump",
        "log_comm_debug_tracing_table_to_file",
    ],
)
def test_methods_take_what_torchs_take(name):
    ours, theirs = (inspect.signature(getattr(c, name)).parameters for c in (CommDebugMode, Reference))
    assert [(p.name, p.default, p.kind) for p in ours.values()] == [
        (p.name, p.default, p.kind) for p in theirs.values()
    ]


def readers():
    mode = CommDebugMode()
    run_model(mode, 6)
    assert mode.comm_counts == mode.get_comm_counts()
    modules = mode.comm_module_counts
    return {name: {way: names(counts) for way, counts in ways.items()} for name, ways in modules.items()}


def test_counts_by_module_under_torchs_names(pool):
    for found in pool.run(readers, ranks=2):
        assert set(found) >= {"Global", "Model", "Model.blocks.0", "Model.blocks.1"}
        assert (
            found["Model.blocks.0"]["forward"]
            == found["Model.blocks.1"]["forward"]
            == {"c10d_functional.all_reduce": 1}
        )
        assert found["Model"]["forward"] == found["Global"]["forward"] == {"c10d_functional.all_reduce": 2}
        assert sum(found["Global"]["backward"].values()) == sum(found["Model"]["backward"].values()) > 0


class Passes(TorchFunctionMode):
    """A mode of the user's own, which hands everything on."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_a_scope(kind):
    """Counts and bytes inside a scope or a mode, where torch's own mode sees each collective once."""
    mesh = cpu_mesh(2)
    scope = (
        Passes() if kind == "mode" else context_parallel(mesh, buffers=[torch.ones(8)], buffer_seq_dims=[0])
    )
    q = torch.ones(1, 2, 4, 8, requires_grad=True)
    with scope:
        F.scaled_dot_product_attention(
            q, q, q, is_causal=True
        )  # the first call checks the kernel, behind modes' backs
    scope = (
        Passes() if kind == "mode" else context_parallel(mesh, buffers=[torch.ones(8)], buffer_seq_dims=[0])
    )
    with scope, Reference() as theirs, record_comm() as log, CommDebugMode() as ours:
        distribute_tensor(torch.ones(4), mesh, [Shard(0)]).sum().full_tensor()
        dist.all_reduce(torch.ones(3))
        F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    own = [c for c in ours.calls if c.event.axes]
    assert [c.event for c in own] == log.events
    assert all(c.event.axes or "allreduce_" in str(c.op) for c in ours.calls)
    reductions = torch.ops.c10d_functional.all_reduce
    assert ours.get_comm_counts()[reductions] == theirs.get_comm_counts()[reductions] > 0
    return len(ours.calls) - len(log.events)


@pytest.mark.parametrize("kind", ["scope", "mode"])
def test_a_scope_or_another_mode_counts_nothing_twice(pool, kind):
    assert pool.run(in_a_scope, kind, ranks=2) == [1, 1]


def as_asked_for():
    """A reduce-scatter and a gather of unequal parts are sent as all-to-alls, and counted as what they are."""
    mesh, functional, native = cpu_mesh(2), torch.ops.c10d_functional, torch.ops._c10d_functional
    x = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as mode:
        part = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        part.backward(torch.ones_like(part))
    counts = mode.get_comm_counts()
    assert counts == {functional.all_gather_into_tensor: 1, functional.reduce_scatter_tensor: 1}
    keys = (functional.reduce_scatter_tensor, native.reduce_scatter_tensor, "reduce_scatter")
    assert [counts[key] for key in (*keys, native.reduce_scatter_tensor.default)] == [1] * 4
    assert [counts[key] for key in (functional.all_reduce, "all_reduce", "broadcast", "else")] == [0] * 4
    assert torch.equal(x.grad.full_tensor(), torch.full((8, 3), 2.0))
    uneven = distribute_tensor(torch.ones(5), mesh, [Shard(0)])
    with mode:
        uneven.full_tensor()
    assert mode.get_comm_counts() == {functional.all_gather_into_tensor: 1}
    return [c.event.kind for c in mode.calls]


def test_collectives_count_as_what_was_asked_for(pool):
    assert pool.run(as_asked_for, ranks=2) == [["all_to_all"]] * 2
