"""explain, strict and visualize_sharding on real ranks."""

import contextlib
import contextvars
import inspect
import io
import warnings
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from longmesh import Partial, Replicate, Shard, distribute_tensor, plan_redistribute
from longmesh.comm import comm_of, record_comm
from longmesh.comm.collectives import all_gather
from longmesh.debug import CommDebugMode, explain, strict, visualize_sharding
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh


def program(x, w):
    y = x @ w
    z = y.redistribute(placements=[Shard(1)])
    return (z.softmax(-1) * 2).sum()


def sharded(ranks):
    mesh = cpu_mesh(ranks, names=("tp",))
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(5, 6), mesh, [Shard(0)])
    w = distribute_tensor(torch.randn(6, 4), mesh, [Shard(1)])
    return x, w


def explained(ranks):
    x, w = sharded(ranks)
    with record_comm() as log:
        found = explain(program, x, w)
    mm = next(op for op in found.ops if op.name == "aten.mm.default")
    plan = plan_redistribute(w._layout, mm.redistributions[0].plan.dst, shape=(6, 4), itemsize=4)
    expected = program(
        *(
            distribute_tensor(t.full_tensor(), x.device_mesh, [Replicate()], src_data_rank=None)
            for t in (x, w)
        )
    )
    softmax = next(op for op in found.ops if op.name == "aten._softmax.default")
    screen = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    screen.print(found)
    return {
        "text": str(found),
        "red": [line for line in screen.file.getvalue().splitlines() if "\x1b[1;31m" in line],
        "same": torch.allclose(found.result.full_tensor(), expected.full_tensor()),
        "inputs": [str(x) for x in mm.inputs],
        "rule": mm.rule,
        "moved": [(r.kind, r.input, r.plan is plan) for r in mm.redistributions],
        "site": mm.where,
        "asked": [(str(r.plan.src), str(r.plan.dst)) for r in found.redistributions if r.kind == "asked"],
        "inside": {r.kind for r in softmax.redistributions},
        "collectives": sum(len(op.collectives) for op in found.ops) + 1 == len(log.events),
        "implicit": len(found.implicit),
    }


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_op_is_told_with_its_layouts_rule_and_moves(pool, ranks):
    found = pool.run(explained, ranks, ranks=ranks)[0]
    assert found["same"]
    assert found["inputs"] == ["(5, 6) S(0)", "(6, 4) S(1)"]
    assert found["rule"] == ("axis 'tp': S(0), R -> S(0)",)
    assert found["moved"] == [("implicit", 1, True)]
    assert "test_debug_explain.py:" in found["site"]
    assert found["asked"] == [("S(0)", "S(1)")]
    assert found["inside"] == {"inside"}
    assert found["collectives"], "each collective belongs to an op, but for the one that was asked for"
    assert found["implicit"] == 1
    text = found["text"]
    assert "!! implicit redistribution of input 1" in text
    assert "all_gather" in text or "all_to_all" in text
    assert "redistribution, asked for at" in text
    assert "1 implicit redistribution," in text.splitlines()[-1]
    assert found["red"] and "!! implicit redistribution of input 1" in found["red"][0], "it stands out"
    assert "(rule, the cheapest: its moves are predicted at" in text


def explained_twins():
    """Inputs of one layout and shape, of which only the second moves."""
    mesh = cpu_mesh(2)
    a, b = (distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)], src_data_rank=None) for _ in range(2))
    (op,) = explain(torch.mm, a, b).ops
    return [r.input for r in op.redistributions], op.rule


def test_twins_are_told_apart(pool):
    assert pool.run(explained_twins, ranks=2)[0] == ([1], ("axis 0: S(1), S(0) -> P",))


def explained_backward():
    x, w = sharded(2)
    w.requires_grad_()
    found = explain(lambda: program(x, w).backward())
    return [(op.name, op.where) for op in found.ops], str(found)


def test_backward_ops_are_told_with_the_line_of_their_forward(pool):
    ops, _ = pool.run(explained_backward, ranks=2)[0]
    forward = dict(ops)["aten._softmax.default"]
    line = next(where for name, where in ops if name == "aten._softmax_backward_data.default")
    assert line == f"SoftmaxBackward0 of {forward}"


def explained_odd_ones():
    mesh = cpu_mesh(2, 2)
    x = distribute_tensor(torch.arange(5.0), mesh, [Shard(0), Replicate()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return str(
            explain(lambda: (x.sum().item(), torch.linalg.eigvals(torch.outer(x, x)), x.add_(1)))
        ), str(explain(lambda: 3))


def test_values_ops_without_rule_and_programs_without_ops(pool):
    odd, nothing = pool.run(explained_odd_ones, ranks=4)[0]
    assert "output  a plain value" in odd
    assert "axis 0: S(0) -> S(0); axis 1: R -> R" in odd
    assert "aten.linalg_eig" in odd
    assert nothing == "0 ops; 0 implicit redistributions, 0 B on the wire; 0 asked for, 0 B"


def footers():
    """The last lines of explanations whose ops send something, and the bytes that ranks sent."""
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    found = []
    for fn in (
        lambda: x.var(0),
        lambda: x.softmax(0),
        lambda: x.argmax(),
        lambda: x.sum().item(),
        x.full_tensor,
    ):
        with record_comm() as log:
            footer = str(explain(fn)).splitlines()[-1]
        found.append((footer, log.total_bytes))
    group = comm_of(mesh).group((0,))
    found.append((str(explain(lambda: all_gather(torch.ones(3), group=group))).splitlines()[-1], 12))
    return found


def test_the_last_line_has_everything_that_was_sent(pool):
    nothing = "0 implicit redistributions, 0 B on the wire; 0 asked for, 0 B"
    for found in pool.run(footers, ranks=2):
        assert found == [
            (f"1 op; {nothing}; 1 reduction inside ops, 32 B on the wire", 16),
            (f"1 op; {nothing}; 2 reductions inside ops, 64 B on the wire", 32),
            (f"1 op; {nothing}; 2 exchanges inside ops, 12 B from this rank", 12),
            ("2 ops; 1 implicit redistribution, 16 B on the wire; 0 asked for, 0 B", 8),
            ("0 ops; 0 implicit redistributions, 0 B on the wire; 1 asked for, 48 B", 24),
            (f"0 ops; {nothing}; 1 collective outside ops, 12 B from this rank", 12),
        ]


def strictly(ranks):
    x, w = sharded(ranks)
    texts = []
    with record_comm() as log:
        for run in (
            lambda: program(x, w),
            lambda: (x.redistribute(placements=[Partial()]) * x).sum(),
            lambda: program(x, w.detach().requires_grad_()),
        ):
            try:
                with strict():
                    run()
            except LongmeshError as error:
                texts.append(str(error))
    sent = len(log.events)
    with strict():  # asked for, local, or an op's own sum: all let through
        y = x @ w.redistribute(placements=[Replicate()])
        (y + distribute_tensor(torch.ones(5, 4), x.device_mesh, [Replicate()])).sum().full_tensor()
        y.redistribute(placements=[Shard(1)]).softmax(-1)
    weight = w.redistribute(placements=[Replicate()]).requires_grad_()
    loss = (x @ weight).pow(2).sum()
    with strict():
        loss.backward()
    y = x @ w  # outside again
    return texts, sent, str(y._layout)


@pytest.mark.parametrize("ranks", [2, 3])
def test_strict_raises_on_all_ranks_before_anything_is_sent(pool, ranks):
    results = pool.run(strictly, ranks, ranks=ranks)
    assert all(result == results[0] for result in results)
    texts, sent, _ = results[0]
    assert sent == 0
    assert len(texts) == 3
    assert texts[0].startswith(
        "strict(): aten.mm.default of (5, 6) S(0), (6, 4) S(1) would redistribute input 1 from S(1) to R and send "
    )
    assert texts[0].endswith(
        "call redistribute(placements=[Replicate()]) on it first, or give it that layout"
    )
    assert "test_debug_explain.py:" in texts[0]


def strict_backward():
    mesh = cpu_mesh(2)
    a, b, grad = (
        distribute_tensor(torch.ones(4, 4), mesh, [Shard(d)], src_data_rank=None) for d in (1, 1, 0)
    )
    try:
        with strict():
            y, line = a.requires_grad_() * b, inspect.currentframe().f_lineno
            y.backward(grad)
    except LongmeshError as error:
        return str(error), line
    return None


def strict_lookup():
    """An op settles a pending lookup before it moves it."""
    mesh = cpu_mesh(2)
    table = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)], src_data_rank=None)
    index = distribute_tensor(torch.tensor([0, 5, 3]), mesh, [Replicate()], src_data_rank=None)
    found = torch.nn.functional.embedding(index, table)
    before = str(found.placements[0])
    try:
        with record_comm() as log, strict():
            found.exp()
    except LongmeshError as error:
        return str(error), before, len(log.events)


def test_strict_sees_pending_lookups(pool):
    (text, before, sent), other = pool.run(strict_lookup, ranks=2)
    assert other == (text, before, sent)
    assert before == "MaskP" and sent == 0
    assert "aten.exp.default of (3, 4) MaskP would redistribute input 0 from P to " in text


def strict_elsewhere():
    """As in a thread that autograd makes for a device: the mode is there, Python's context variables are not."""
    x, w = sharded(2)
    texts = []
    with strict():
        try:
            contextvars.Context().run(program, x, w)
        except LongmeshError as error:
            texts.append(str(error))
    mode = CommDebugMode()
    with mode:
        contextvars.Context().run(x.full_tensor)
    return texts, mode.get_total_counts()


def test_threads_without_context_variables_are_watched_too(pool):
    texts, counted = pool.run(strict_elsewhere, ranks=2)[0]
    assert len(texts) == 1 and counted == 1


def loose():
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.ones(3), mesh, [Shard(0)], src_data_rank=None)
    pieces = distribute_tensor(torch.ones(3, dtype=torch.int16), mesh, [Shard(0)], src_data_rank=None)
    group = comm_of(mesh).group((0,))

    def run():
        all_gather(x.to_local().new_ones(2), group=group)
        pieces.sum(dtype=torch.int16).full_tensor()  # reduced by two collectives, one redistribution

    found = explain(run)
    return [type(step).__name__ for step in found.steps], str(found)


def test_collectives_that_are_neither_an_ops_nor_a_redistributions(pool):
    steps, text = pool.run(loose, ranks=2)[0]
    assert steps[0] == "CommEvent" and steps.count("CommEvent") == 1
    assert text.splitlines()[0].startswith("   1  all_gather over axis 0, this rank sends 8 B, asked for at ")


def test_strict_holds_in_a_backward_pass(pool):
    (text, line), other = pool.run(strict_backward, ranks=2)
    assert other == (text, line)
    assert "aten.mul.Tensor of (4, 4) S(0), (4, 4) S(1) would redistribute" in text
    assert f"at MulBackward0 of {__file__}:{line};" in text


def show(path):
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    x = distribute_tensor(torch.ones(3, 5, 2), mesh, [Shard(1), Shard(0)])
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        visualize_sharding(x, header="weights")
        visualize_sharding(x, use_rich=True, path=path)
    errors = []
    for arguments in ((torch.ones(2),), (x, "", False)):
        try:
            visualize_sharding(*arguments, path="x.gif")
        except LongmeshError as error:
            errors.append(str(error))
    return dist.get_rank(), printed.getvalue(), errors


def test_one_rank_shows_what_all_hold(pool, tmp_path):
    path = tmp_path / "held.svg"
    results = pool.run(show, str(path), ranks=4)
    assert [bool(text) for _, text, _ in results] == [True, False, False, False]
    assert "weights" in results[0][1] and "[0:3)" in results[0][1] and "[2:3)" in results[0][1]
    root = ET.parse(path).getroot()
    texts = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"0", "1", "2", "3", "dim 1", "[3:5)"} <= set(texts)
    for _, _, errors in results:
        assert errors[0].startswith("visualize_sharding shows a longmesh DTensor, got Tensor")
        assert errors[1] == "a picture is written as .svg, not as '.gif': x.gif"
