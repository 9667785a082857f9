"""The bytes that a recorder sees are the bytes of the plan, exactly: of every op, and of every module style."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn

from longmesh import Partial, Replicate, Shard, distribute_tensor
from longmesh.attention import masks, plan_attention
from longmesh.attention.execute.route import BoundRow
from longmesh.comm import record_comm
from longmesh.debug import explain
from longmesh.debug.explanation import Redistribution
from longmesh.debug.op_watch import OpWatch
from longmesh.parallel import (
    AttentionParallel,
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from longmesh.testing import cpu_mesh
from support.op_sweep import sweep_names, sweep_op

# Every tenth op: a choice of all families. tests/soak has them all.
NAMES = sweep_names()[2::10]
PARTS = 2


class ByteCheck(OpWatch):
    """Compares what each op sent with its plan."""

    def __init__(self):
        super().__init__()
        self.wrong = []
        self.num_ops = self.num_sending = 0

    def on_op(self, op):
        sent = sum(event.sent_bytes for event in op.events)
        planned = 0 if op.plan is None else op.plan.sent_bytes or 0
        self.num_ops += 1
        self.num_sending += sent > 0
        if sent != planned:
            self.wrong.append(
                f"{op.func} of {', '.join(map(str, op.inputs))}: sent {sent}, planned {planned}"
            )


def planned_bytes(names, mesh_shape):
    with ByteCheck() as check:
        for name in names:
            sweep_op(name, 1, True, mesh_shape) or sweep_op(name, 1, False, mesh_shape)
    return check.wrong, check.num_ops, check.num_sending


@pytest.mark.parametrize("part", range(PARTS))
def test_every_tenth_op(pool, part):
    for wrong, num_ops, num_sending in pool.run(
        planned_bytes, NAMES[part::PARTS], (3,), ranks=3, timeout=240.0
    ):
        assert wrong == []
        assert num_ops > 100 and num_sending > 20


def test_on_two_axes(pool):
    for wrong, num_ops, _ in pool.run(planned_bytes, NAMES[3::6], (2, 2), ranks=4, timeout=240.0):
        assert wrong == []
        assert num_ops > 50


def sending_ops():
    """Ops whose sharded dim needs an exchange: their bytes are explained, and there are some."""
    mesh = cpu_mesh(3)
    x = distribute_tensor(torch.arange(28.0).view(7, 4), mesh, [Shard(0)])
    image = distribute_tensor(torch.randn(1, 2, 7, 5), mesh, [Shard(2)])
    kernel = distribute_tensor(torch.randn(2, 2, 3, 3), mesh, [Replicate()])
    q = distribute_tensor(torch.randn(1, 2, 7, 8), mesh, [Shard(2)])
    programs = {
        "slice": lambda: x[1:6],
        "flip": lambda: x.flip(0),
        "roll": lambda: x.roll(2, 0),
        "cat": lambda: torch.cat([x, x]),
        "pad": lambda: nn.functional.pad(x, (0, 0, 1, 2)),
        "cumsum": lambda: x.cumsum(0),
        "cummax": lambda: x.cummax(0),
        "topk": lambda: x.topk(2, 0),
        "argmax": lambda: x.argmax(0),
        "reshape": lambda: x.reshape(14, 2),
        "conv": lambda: nn.functional.conv2d(image, kernel, padding=1),
        "attention": lambda: nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        "nonzero": lambda: x.nonzero(),
        "sort": lambda: x.sort(0),
        "norm": lambda: x.norm(),
        "softmax": lambda: x.softmax(0),
    }
    found = {}
    for name, program in programs.items():
        with record_comm() as log:
            told = explain(program)
        found[name] = (sum(op.sent_bytes for op in told.ops), log.total_bytes)
    return found


def test_ops_that_exchange(pool):
    results = pool.run(sending_ops, ranks=3)
    for found in results:
        assert {name for name, (planned, sent) in found.items() if planned != sent} == set()
    for name in results[0]:
        assert sum(found[name][1] for found in results) > 0, f"{name} sends nothing"


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 6), norm(6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, tokens):
        return self.down(torch.relu(self.up(self.norm(self.table(tokens)))))


LINEAR = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1))}
STYLES = {
    "rows": {"table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)), **LINEAR},
    "columns": {"table": ColwiseParallel(output_layouts=Shard(1)), **LINEAR},
    "overlapped": {
        "table": ColwiseParallel(output_layouts=Shard(1)),
        "up": ColwiseParallel(input_layouts=Shard(1), overlap=True),
        "down": RowwiseParallel(output_layouts=Shard(1), overlap=True),
    },
    "prepared": {
        "table": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "up": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "down": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
    },
}


def style_bytes(style, norm):
    """Fused and op by op, the same bytes; op by op, those of the plans and the redistributions that were asked for."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    model = parallelize_module(Block(norm), mesh, {**STYLES[style], "norm": SequenceParallel()})
    tokens = torch.tensor([[0, 3, 6, 1], [2, 2, 5, 4]])
    copy.deepcopy(model)(tokens)  # at the first call the ranks compare the sizes of plain inputs
    with record_comm() as fused:
        model(tokens).square().sum().backward()
    with record_comm() as by_ops:
        told = explain(lambda: copy.deepcopy(model)(tokens).square().sum().backward())
    planned = sum(op.sent_bytes for op in told.ops)
    asked = [step.plan for step in told.steps if isinstance(step, Redistribution)]
    return fused.total_bytes, by_ops.total_bytes, planned, sum(p.total_bytes for p in asked), len(told.ops)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("style", list(STYLES))
def test_every_style(pool, style, norm):
    results = pool.run(style_bytes, style, norm, ranks=2)
    for fused, by_ops, _, _, num_ops in results:
        assert fused == by_ops > 0
        assert num_ops > 5
    assert sum(r[1] for r in results) == sum(r[2] for r in results) + results[0][3]


def test_partials_in_strict_and_out(pool):
    for wrong, num_ops, _ in pool.run(partial_bytes, ranks=3):
        assert wrong == [] and num_ops > 3


def partial_bytes():
    mesh = cpu_mesh(3)
    x = distribute_tensor(torch.randn(7, 4), mesh, [Shard(0)]).redistribute(placements=[Partial()])
    low = x.to(torch.bfloat16)
    with ByteCheck() as check:
        x.relu(), x.amax(0), low.exp(), low.amax(), (x > 0).all(), x.std()
    return check.wrong, check.num_ops, check.num_sending


def fused_plans(options, *layouts):
    """The plans of several ops with these options, of tensors laid out so: their keys begin with what planned them."""
    found = [item for own in layouts for item in own.plans.items() if isinstance(item[0][0], MethodType)]
    return [plan for key, plan in found if key[1][0] == options]


def loss_bytes(mesh_shape, placements, options):
    mesh = cpu_mesh(*mesh_shape)
    torch.manual_seed(0)
    logits = distribute_tensor(torch.randn(6, 7), mesh, placements).requires_grad_()
    with record_comm() as forward, loss_parallel():
        loss = nn.functional.cross_entropy(logits, torch.tensor([1, 6, 0, 2, 2, 5]), **options)
    whole = loss.redistribute(placements=[Replicate()] * mesh.ndim)
    with record_comm() as backward:
        torch.autograd.grad(loss, logits, torch.ones_like(whole))
    given = (-100, options.get("reduction", "mean"), options.get("label_smoothing", 0.0))
    plans = fused_plans(given, logits._tensor_layout, whole._tensor_layout)
    assert len(plans) == 2
    return [plan.plan.sent_bytes for plan in plans], [forward.total_bytes, backward.total_bytes]


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.1}])
@pytest.mark.parametrize(
    ("mesh_shape", "placements"), [((2,), [Shard(1)]), ((3,), [Shard(1)]), ((2, 2), [Shard(0), Shard(1)])]
)
def test_loss_parallel(pool, mesh_shape, placements, options):
    for planned, sent in pool.run(
        loss_bytes, mesh_shape, placements, options, ranks=torch.Size(mesh_shape).numel()
    ):
        assert planned == sent and sent[0] > 0


class SelfAttention(nn.Module):
    def forward(self, x):
        q, k, v = x.view(*x.shape[:2], 2, 4).transpose(1, 2).expand(3, -1, -1, -1, -1).clone()
        return nn.functional.scaled_dot_product_attention(q, k, v)


def attention_bytes(layout, exchange):
    """The rows that travel in attention, forward and backward; the rest is the ranks' word that all is in order."""
    mesh, seq_len = cpu_mesh(3), 20
    style = AttentionParallel(seq_len=seq_len, mask=masks.causal(), layout=layout, exchange=exchange)
    module = parallelize_module(SelfAttention(), mesh, style)
    sizes = {"num_heads": 2, "head_dim": 4, "dtype_bytes": 4}
    plan = plan_attention(
        seq_len=seq_len, ranks=3, mask=masks.causal(), layout=layout, exchange=exchange, **sizes
    )
    rank = mesh.get_rank()
    tokens = sum(stop - start for start, stop in plan.rows[0].ownership.pieces[rank])
    x = torch.randn(1, tokens, 8, requires_grad=True)
    sent = []
    with record_comm() as log:
        out = module(x)
    sent.append(sum(e.sent_bytes for e in log.events if e.kind in ("all_to_all", "send_receive")))
    with record_comm() as log:
        out.sum().backward()
    sent.append(log.total_bytes)
    route = BoundRow(plan.rows[0], rank, (0, 1, 2), (rank,))
    rows = sum(
        sum(move.send_counts) - move.send_counts[rank]
        for move in (*route.keys, *route.home)
        if move is not None
    )
    return sent, [plan.stats()[rank].sent_bytes, rows * 2 * (4 + 4) * 4]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("exchange", ["ring", "sparse"])
def test_attention_parallel(pool, layout, exchange):
    results = pool.run(attention_bytes, layout, exchange, ranks=3)
    for sent, planned in results:
        assert sent == planned
    assert sum(sent[0] for sent, _ in results) > 0
