"""Numbers that are not finite and copies that drift apart, in the trainer on real ranks."""

import contextlib
import io
import math
import socket

import pytest
import torch
import torch.distributed as dist

from longmesh import DTensor
from longmesh.errors import NumbersError
from longmesh.testing import cpu_mesh
from longmesh.train import loop
from longmesh.train.data import Corpus
from longmesh.train.loop import train
from longmesh.train.number_checks import StepNumbers, describe_drift, sum_bits
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import slice_mesh
from longmesh.train.progress import say_nothing
from longmesh.train.state import load_state, open_checkpoints

SIZES = {"seq_len": 67, "batch": 2, "dim": 16, "layers": 1, "heads": 4, "kv_heads": 2}
HOST = socket.gethostname()
WQ = "blocks.0.attention.wq.weight"


def run(mesh_shape, told, spoil):
    """A run that `spoil(model, step)` looks at after the backward of each step: its losses, lines, error and states."""
    data, context, tensor = mesh_shape
    options = TrainOptions(data=data, context=context, tensor=tensor, **SIZES, **told)
    axes = slice_mesh(cpu_mesh(*mesh_shape, names=("data", "context", "tensor")))
    kept, steps = loop.gradient_norms, [0]

    def gradient_norms(model):  # called once a step, between backward and the sum over ranks
        steps[0] += 1
        spoil(model, steps[0])
        return kept(model)

    told_lines, error = io.StringIO(), None
    record_losses = []
    loop.gradient_norms = gradient_norms
    try:
        with contextlib.redirect_stderr(told_lines):
            record_losses = train(options, axes, Corpus(0), say_nothing).losses
    except NumbersError as caught:
        error = str(caught)
    finally:
        loop.gradient_norms = kept
    model, optimizer = loop.build(options, axes)
    more = TrainOptions(data=data, context=context, tensor=tensor, **SIZES, **{**told, "steps": 99})
    saved = open_checkpoints(options.out, options)
    losses = load_state(saved, model, optimizer, more)
    state = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.state_dict().items()}
    return {
        "losses": record_losses,
        "lines": told_lines.getvalue().splitlines(),
        "error": error,
        "saved": (len(losses), saved.steps(), state),
    }


class SpoilGradient:
    def __init__(self, rank, steps, value):
        self.rank, self.steps, self.value = rank, steps, value

    def __call__(self, model, step):
        if step in self.steps and dist.get_rank() == self.rank:
            grad = model.get_parameter(WQ).grad
            (grad.to_local() if isinstance(grad, DTensor) else grad).view(-1)[3] = self.value


def spoiled(mesh_shape, told, rank, steps, value):
    return run(mesh_shape, told, SpoilGradient(rank, steps, value))


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    told = {"steps": 5, "save_every": 1, "keep": 9, "out": str(tmp_path_factory.mktemp("alone"))}
    (result,) = pool.run(spoiled, (1, 1, 1), told, 0, [3], math.nan, ranks=1)
    return result


def test_the_update_is_skipped_and_nothing_else(pool, alone, tmp_path):
    """The losses before and at the step are those of a run without it; after it, the optimizer is as it was before."""
    (plain,) = pool.run(spoiled, (1, 1, 1), {"steps": 3, "out": str(tmp_path)}, 0, [], 0.0, ranks=1)
    assert alone["losses"][:3] == plain["losses"]
    assert all(map(math.isfinite, alone["losses"]))
    assert alone["error"] is None
    assert alone["saved"][:2] == (5, [1, 2, 3, 4, 5])
    assert all(bool(t.isfinite().all()) for t in alone["saved"][2].values())
    source = f"step 3: the gradient of {WQ} is not finite on rank 0 ({HOST})"
    assert alone["lines"] == [f"{source}; the update was skipped, 1 in a row of at most 2"]


@pytest.mark.parametrize(
    ("mesh_shape", "rank", "value"),
    [((1, 2, 1), 1, math.nan), ((1, 1, 2), 1, math.inf), ((2, 1, 1), 0, -math.inf), ((1, 2, 2), 2, math.nan)],
    ids=str,
)
def test_one_rank_skips_and_so_do_all(pool, alone, tmp_path, mesh_shape, rank, value):
    told = {"steps": 5, "save_every": 1, "keep": 9, "out": str(tmp_path)}
    results = pool.run(spoiled, mesh_shape, told, rank, [3], value, ranks=math.prod(mesh_shape))
    line = f"step 3: the gradient of {WQ} is not finite on rank {rank} ({HOST}); the update was skipped, 1 in a row of"
    for number, result in enumerate(results):
        assert result["losses"] == results[0]["losses"]
        assert max(abs(a - b) for a, b in zip(result["losses"], alone["losses"], strict=True)) < 1e-5
        assert [text.startswith(line) for text in result["lines"]] == ([True] if number == 0 else [])
        for name, weight in alone["saved"][2].items():
            torch.testing.assert_close(result["saved"][2][name], weight, rtol=0, atol=1e-4, msg=name)


def test_after_some_in_a_row_the_run_stops_with_its_checkpoints(pool, tmp_path):
    told = {"steps": 9, "save_every": 1, "keep": 9, "out": str(tmp_path)}
    results = pool.run(spoiled, (1, 2, 1), told, 1, [2, 4, 5, 6], math.nan, ranks=2)
    for result in results:
        assert result["error"] == (
            f"step 6: the gradient of {WQ} is not finite on rank 1 ({HOST}); the update was skipped, 3 in a row; "
            "the checkpoints are from earlier steps: resume from one with a smaller learning rate, or look for the "
            "cause on that rank"
        )
        assert result["saved"][:2] == (5, [1, 2, 3, 4, 5])
        assert all(bool(t.isfinite().all()) for t in result["saved"][2].values())
    assert [line[:7] for line in results[0]["lines"]] == ["step 2:", "step 4:", "step 5:"]


class SpoilParameter:
    """Changes a parameter: the loss is not finite from then on."""

    def __init__(self, step, value):
        self.step, self.value = step, value

    def __call__(self, model, step):
        if step == self.step:
            model.get_parameter("blocks.0.feed_forward.w1.weight").detach().view(-1)[0] = self.value


def lose_parameter(told):
    return run((1, 2, 1), told, SpoilParameter(3, math.nan))


def test_a_state_that_is_not_finite_is_never_saved(pool, tmp_path):
    told = {"steps": 9, "save_every": 2, "out": str(tmp_path)}
    results = pool.run(lose_parameter, told, ranks=2)
    for result in results:
        assert result["error"].startswith("step 6: the gradient of ")
        assert result["saved"][:2] == (2, [2])
        assert all(bool(t.isfinite().all()) for t in result["saved"][2].values())
    (line,) = [line for line in results[0]["lines"] if "step-00000004" in line]
    assert "was not written: 'model.blocks.0.feed_forward.w1.weight' is not finite" in line
    assert line.endswith("the newest checkpoint is that of step 2, and the run continues")
    assert "and 1 more of 2 ranks" in results[0]["error"]


# -- copies ------------------------------------------------------------------------------------------


class FlipBit:
    def __init__(self, rank, name):
        self.rank, self.name = rank, name

    def __call__(self, model, step):
        if step == 3 and dist.get_rank() == self.rank:
            parameter = model.get_parameter(self.name).detach()
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.view(torch.int32).view(-1)[1] ^= 1


def flipped(mesh_shape, told, rank, name):
    result = run(mesh_shape, told, FlipBit(rank, name))
    return result["error"], result["losses"]


@pytest.mark.parametrize(
    ("mesh_shape", "rank", "name", "who"),
    [
        ((1, 3, 1), 2, WQ, f"rank 2 ({HOST}) holds other values than 2 others"),
        ((1, 2, 1), 0, WQ, f"no majority among ranks 0 ({HOST}), 1 ({HOST})"),
        ((1, 2, 2), 3, "embedding.weight", f"rank 3 ({HOST}) holds other values than 3 others"),
        ((1, 2, 2), 3, WQ, f"no majority among ranks 1 ({HOST}), 3 ({HOST})"),
    ],
    ids=str,
)
def test_a_flipped_bit_is_found_and_named(pool, tmp_path, mesh_shape, rank, name, who):
    told = {"steps": 6, "save_every": 2, "check_replicas": 2, "out": str(tmp_path)}
    results = pool.run(flipped, mesh_shape, told, rank, name, ranks=math.prod(mesh_shape))
    for error, _ in results:
        assert error.startswith(
            f"step 4: copies of {name} differ: {who}; a bit has flipped or a kernel computes other"
        )


def test_copies_that_are_equal_pass(pool, tmp_path):
    for mesh_shape in [(1, 2, 2), (2, 1, 1), (1, 1, 1)]:
        told = {"steps": 3, "check_replicas": 1, "out": str(tmp_path / str(mesh_shape))}
        results = pool.run(spoiled, mesh_shape, told, 0, [], 0.0, ranks=math.prod(mesh_shape))
        assert all(result["error"] is None and len(result["losses"]) == 3 for result in results)


def test_any_flipped_bit_changes_the_sum():
    for dtype, bits in [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int16),
        (torch.float64, torch.int64),
    ]:
        x = torch.randn(5, 3).to(dtype)
        before = int(sum_bits(x))
        for bit in range(x.element_size() * 8 - 1):
            y = x.clone()
            y.view(bits).view(-1)[7] ^= 1 << bit
            assert int(sum_bits(y)) != before
    z = torch.randn(4, dtype=torch.complex64)
    assert int(sum_bits(z)) == int(sum_bits(z.clone()))
    assert int(sum_bits(torch.randn(3, 4).t())) != 0


def test_texts_of_drift():
    hosts = ["a", "b", "c", "d", "e"]
    one = describe_drift("w", 7, [0, 1, 2], [5, 6, 5], hosts)
    assert one == (
        "step 7: copies of w differ: rank 1 (b) holds other values than 2 others; a bit has flipped or a kernel "
        "computes otherwise; resume from a checkpoint before this step, without that host if it happens again"
    )
    two = describe_drift("w", 7, [0, 1, 2, 3, 4], [5, 6, 5, 7, 5], hosts)
    assert "ranks 1 (b), 3 (d) hold other values than 3 others" in two


def test_a_sum_that_overflows_is_told():
    """Each rank's gradient is finite and their sum is not."""
    from longmesh.train.number_checks import BadSteps

    numbers = StepNumbers(torch.tensor(1.0), torch.tensor(1.0), torch.tensor([1e38, 2.0]))
    line = BadSteps(["a", "b"]).read(4, numbers)
    assert line is not None
    assert line.startswith(
        "step 4: the sum of the gradients is not finite, though every rank's own are; the update was"
    )
    lost = StepNumbers(torch.tensor(math.inf), torch.tensor(1.0), torch.tensor([1.0, 2.0]))
    assert (BadSteps(["a", "b"]).read(4, lost) or "").startswith(
        f"step 4: the loss is not finite on rank 0 ({HOST});"
    )
