"""The trainer on real ranks: the losses and weights of one process, on any mesh, and after a change of the mesh."""

import math
from pathlib import Path

import pytest
import torch

from longmesh import DTensor
from longmesh.checkpoint import Directory
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from longmesh.train.data import Corpus
from longmesh.train.loop import build, train
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import make_axes, slice_mesh
from longmesh.train.progress import say_nothing
from longmesh.train.state import load_state, open_checkpoints

STEPS = 6
SIZES = {"seq_len": 251, "batch": 2, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2}


def run(mesh_shape, told):
    """The losses of a run on this mesh, and its weights, whole."""
    data, context, tensor = mesh_shape
    options = TrainOptions(data=data, context=context, tensor=tensor, **told)
    axes = slice_mesh(cpu_mesh(*mesh_shape, names=("data", "context", "tensor")))
    record = train(options, axes, Corpus(0), say_nothing)
    model, optimizer = build(options, axes)
    more = TrainOptions(data=data, context=context, tensor=tensor, **{**told, "steps": options.steps + 1})
    assert load_state(open_checkpoints(options.out, more), model, optimizer, more) == record.losses
    weights = {
        name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.state_dict().items()
    }
    return record.losses, weights


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    told = {**SIZES, "steps": STEPS, "out": str(tmp_path_factory.mktemp("alone"))}
    (result,) = pool.run(run, (1, 1, 1), told, ranks=1)
    return result


def assert_same(results, alone):
    losses, weights = alone
    for own_losses, own_weights in results:
        assert own_losses == results[0][0]  # every rank tells the same
        assert max(abs(a - b) for a, b in zip(own_losses, losses, strict=True)) < 1e-5
        assert own_weights.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(own_weights[name], weight, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("mesh_shape", "exchange"),
    [
        ((1, 2, 1), "auto"),
        ((1, 3, 1), "ring"),
        ((2, 1, 1), "auto"),
        ((1, 1, 2), "auto"),
        ((2, 2, 1), "sparse"),
        ((1, 2, 2), "allgather"),
    ],
    ids=str,
)
def test_a_mesh_changes_nothing(pool, alone, tmp_path, mesh_shape, exchange):
    told = {**SIZES, "steps": STEPS, "exchange": exchange, "out": str(tmp_path)}
    assert_same(pool.run(run, mesh_shape, told, ranks=math.prod(mesh_shape)), alone)


def test_a_run_goes_on_on_other_meshes(pool, alone, tmp_path):
    out, resume = str(tmp_path), None
    meshes = [((1, 3, 1), 2), ((1, 1, 1), 3), ((1, 2, 2), 4), ((1, 2, 1), STEPS)]
    results = []
    for mesh_shape, steps in meshes:
        told = {**SIZES, "steps": steps, "out": out, "resume": resume}
        results = pool.run(run, mesh_shape, told, ranks=math.prod(mesh_shape))
        resume = out
    assert_same(results, alone)


def causal_run(mesh_shape, out):
    return run(mesh_shape, {**SIZES, "steps": 2, "mask": "causal", "seq_len": 5, "out": out})


def test_one_long_document_over_more_ranks_than_it_has_chunks(pool, tmp_path):
    (alone,) = pool.run(causal_run, (1, 1, 1), str(tmp_path / "one"), ranks=1)
    assert_same(pool.run(causal_run, (1, 4, 1), str(tmp_path / "four"), ranks=4), alone)


def resume_wrongly(out, changes):
    options = TrainOptions(**{**SIZES, "steps": 9, **changes})
    axes = slice_mesh(cpu_mesh(1, 2, 1, names=("data", "context", "tensor")))
    with pytest.raises(LongmeshError) as error:
        load_state(open_checkpoints(out, options), *build(options, axes), options)
    return str(error.value)


def test_a_checkpoint_of_another_run_is_refused(pool, tmp_path):
    out = str(tmp_path)
    pool.run(run, (1, 1, 1), {**SIZES, "steps": 1, "out": out}, ranks=1)
    seed = (
        f"{out} was trained with --dim 16 (here 32), --seed 0 (here 7); a resumed run needs the same options"
    )
    for changes, text in [
        ({"seed": 7, "dim": 32}, seed),
        (
            {"steps": 1},
            f"{out} has 1 step already; give a larger --steps than 1 to continue",
        ),
    ]:
        texts = pool.run(resume_wrongly, out, changes, ranks=2)
        assert texts == [text, text]
    (text, _) = pool.run(resume_wrongly, str(tmp_path / "nowhere"), {}, ranks=2)
    place = tmp_path / "nowhere" / "checkpoint"
    assert text == f"there is no checkpoint in {place}; leave out --resume to begin a new run"


def resume_second(out, seeds):
    """A run to step 3, then another that begins anew, to step 2, and goes on: from which step."""
    axes = slice_mesh(cpu_mesh(1, 2, 1, names=("data", "context", "tensor")))
    told = {**SIZES, "context": 2, "out": out}
    for seed, steps in zip(seeds, (3, 2), strict=True):
        train(TrainOptions(**told, seed=seed, steps=steps, save_every=1), axes, Corpus(seed), say_nothing)
    options = TrainOptions(**told, seed=seeds[1], steps=4, resume="auto")
    return [step.step for step in train(options, axes, Corpus(seeds[1]), say_nothing).steps]


@pytest.mark.parametrize("seeds", [(0, 1), (0, 0)])
def test_what_an_earlier_run_has_left_at_later_steps_is_passed_over(pool, tmp_path, seeds):
    assert pool.run(resume_second, str(tmp_path), seeds, ranks=2) == [[2, 3], [2, 3]]


def test_a_checkpoint_that_is_no_state_of_the_trainer_is_refused(pool, tmp_path):
    for text in ("[]", "{", '{"losses": 3, "curve": {}}', '{"losses": [1], "curve": 7}'):
        pool.run(save_run, str(tmp_path), text, ranks=1)
        (said, _) = pool.run(resume_wrongly, str(tmp_path), {}, ranks=2)
        assert said.endswith("understands; give the --out of a run of it")


def save_run(out, text):
    directory = Directory(Path(out, "checkpoint"))
    directory.save({"run": text}, 1)
    directory.flush()


def meet(kind):
    rank = torch.distributed.get_rank()
    digest, problem, options = "same", None, TrainOptions(context=2)
    if kind == "text" and rank == 1:
        digest = "other"
    if kind == "options" and rank == 1:
        options = TrainOptions(context=2, seq_len=8)
    if kind == "problem" and rank == 0:
        problem = LongmeshError("no baseline")
    if kind == "mesh":
        options = TrainOptions(context=3)
    with pytest.raises(LongmeshError) as error:
        make_axes(options, digest, problem, "cpu")
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "on_rank_0", "on_rank_1"),
    [
        ("text", "text='same'", "text='other'"),
        ("options", "seq_len=16384", "seq_len=8"),
        (
            "problem",
            "no baseline",
            "train: rank 0 got invalid arguments, so every rank stops: no baseline",
        ),
        ("mesh", "--data 1 x --context 3 x --tensor 1 make 3 ranks, and 2 run", "make 3 ranks, and 2 run"),
    ],
)
def test_ranks_that_can_not_train_together_say_so(pool, kind, on_rank_0, on_rank_1):
    first, second = pool.run(meet, kind, ranks=2, timeout=20)
    assert on_rank_0 in first
    assert on_rank_1 in second
