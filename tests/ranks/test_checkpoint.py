"""Checkpoints on real ranks: onto other meshes and layouts, to and from torch, and what does not fit."""

import os
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as reference
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from longmesh import DTensor, Layout, Partial, Replicate, Shard, distribute_module, distribute_tensor
from longmesh.checkpoint import load, load_safetensors, save, save_safetensors
from longmesh.checkpoint.api import _save
from longmesh.checkpoint.directory_writer import DirectoryWriter
from longmesh.checkpoint.planner import SavePlanner
from longmesh.errors import CheckpointError
from longmesh.testing import RankError, cpu_mesh
from support.layouts import random_layout
from support.simulate import cut

SHAPES = [(7, 5), (5,), (3, 2, 4), (), (0, 3), (1,), (8, 3), (13,)]
MESHES = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2)}


def wholes():
    return {
        f"t{i}": torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
        for i, shape in enumerate(SHAPES)
    }


def laid_out(values, seed, mesh_shape=None):
    """The tensors in random layouts without pending reductions, any shard order."""
    mesh = cpu_mesh(*(mesh_shape or MESHES[dist.get_world_size()]))
    rng = random.Random(seed)
    found = {}
    for name, whole in values.items():
        layout = random_layout(rng, Layout.replicated(mesh).mesh, whole.ndim, ())
        local = cut(whole, layout, tuple(mesh.get_coordinate())).clone()
        found[name] = DTensor.from_local(
            local, mesh, layout.placements, shape=whole.shape, shard_order=layout.shard_order
        )
    return found


def nested(tensors, step):
    return {
        "model": tensors,
        "plain": torch.tensor([1.0, float(step)]),
        "progress": {"step": step, "name": "x"},
    }


def write(directory, seed):
    save(nested(laid_out(wholes(), seed), 5), f"{directory}/run")
    save_safetensors({"model": laid_out(wholes(), seed)}, f"{directory}/m.safetensors")
    save_safetensors({"model": laid_out(wholes(), seed)}, f"{directory}/m", max_file_bytes=100)


def read(directory, seed):
    """Whether everything comes back, into random layouts."""
    zeros = {name: torch.zeros_like(t) for name, t in wholes().items()}
    state = nested(laid_out(zeros, seed), 0)
    load(state, f"{directory}/run")
    rest = state["plain"].tolist(), state["progress"]
    one, many = {"model": laid_out(zeros, seed + 1)}, {"model": laid_out(zeros, seed + 2)}
    load_safetensors(one, f"{directory}/m.safetensors")
    load_safetensors(many, f"{directory}/m")
    wrong = [
        name
        for found in (state["model"], one["model"], many["model"])
        for name, whole in wholes().items()
        if not torch.equal(found[name].full_tensor(), whole)
    ]
    return wrong, rest


@pytest.mark.parametrize("ranks", [4, 3, 1])
def test_any_layout_to_any_layout_and_number_of_ranks(pool, tmp_path, ranks):
    for seed in range(2):
        pool.run(write, str(tmp_path), seed, ranks=ranks)
        for others in (2, 4):
            wrong, rest = pool.run(read, str(tmp_path), 10 * seed, ranks=others)[others - 1]
            assert wrong == []
            assert rest == ([1.0, 5.0], {"step": 5, "name": "x"})
    state = {"model": {name: torch.zeros_like(t) for name, t in wholes().items()}}
    load(state, tmp_path / "run")  # one process, no process group
    assert all(torch.equal(state["model"][name], whole) for name, whole in wholes().items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m", "m.safetensors", "run"]


def exchange_with_torch(directory):
    """torch's DTensors and ours through the same checkpoints, by torch's functions and by ours."""
    mesh = cpu_mesh(2, 2)
    whole = torch.arange(35.0).view(7, 5)
    theirs = reference.distribute_tensor(whole, mesh, [reference.Shard(0), reference.Shard(1)])
    dcp.save({"w": theirs}, checkpoint_id=f"{directory}/theirs")
    ours = distribute_tensor(whole, mesh, [Shard(1), Shard(1)], src_data_rank=None)
    dcp.save({"w": ours}, checkpoint_id=f"{directory}/ours by dcp")
    save({"w": ours}, f"{directory}/ours")
    results = []
    for name in ("theirs", "ours by dcp", "ours"):
        path = f"{directory}/{name}"
        a = reference.distribute_tensor(torch.zeros(7, 5), mesh, [reference.Replicate(), reference.Shard(0)])
        b, c = (
            distribute_tensor(torch.zeros(7, 5), mesh, p)
            for p in ([Shard(0), Shard(0)], [Shard(1), Replicate()])
        )
        plain = torch.zeros(7, 5)
        dcp.load({"w": a}, checkpoint_id=path)
        dcp.load({"w": b}, checkpoint_id=path)
        load({"w": c}, path)
        dcp.load({"w": plain}, checkpoint_id=path)
        results += [torch.equal(t, whole) for t in (a.full_tensor(), b.full_tensor(), c.full_tensor(), plain)]
    return results


def test_torch_reads_ours_and_we_read_torchs(pool, tmp_path):
    assert pool.run(exchange_with_torch, str(tmp_path), ranks=4) == [[True] * 12] * 4


def use_torchs_functions(directory):
    """torch's own way to a state dict, an asynchronous save, and a change of what was saved meanwhile."""
    mesh = cpu_mesh(2)
    model, optimizer = make_training(mesh, (0,))
    train(model, optimizer, mesh, 1)
    parts, moments = get_state_dict(model, optimizer)
    group = dist.new_group()  # a thread saves: its collectives must not mix with ours
    future = dcp.async_save(
        {"model": parts, "optimizer": moments}, checkpoint_id=f"{directory}/run", process_group=group
    )
    before = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    train(model, optimizer, mesh, 1)
    future.result()
    state = {"model": parts, "optimizer": moments}
    load(state, f"{directory}/run")
    set_state_dict(model, optimizer, model_state_dict=parts, optim_state_dict=moments)
    return all(torch.equal(p.full_tensor(), before[name]) for name, p in model.named_parameters())


def test_torchs_state_dict_functions_and_asynchronous_saves(pool, tmp_path):
    assert pool.run(use_torchs_functions, str(tmp_path), ranks=2) == [True, True]


def save_and_load_under_way(directory):
    """Tensors whose last redistribution has not ended, and parameters."""
    mesh = cpu_mesh(2)
    whole = torch.arange(7.0)
    x, zeros = (distribute_tensor(t, mesh, [Shard(0)], src_data_rank=None) for t in (whole, torch.zeros(7)))
    even = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)], src_data_rank=None)
    wait = {"placements": [Replicate()], "async_op": True}
    save({"x": x.redistribute(**wait), "even": even.redistribute(**wait)}, f"{directory}/run")
    save_safetensors({"even": even.redistribute(**wait)}, f"{directory}/m.safetensors")
    into, plain = (even * 0).redistribute(**wait), torch.zeros(8)
    weight = nn.Parameter(zeros)
    load({"x": weight, "even": into}, f"{directory}/run")
    load_safetensors({"even": plain}, f"{directory}/m.safetensors")
    wanted = [
        (weight.full_tensor(), whole),
        (into.to_local() + 0, torch.arange(8.0)),
        (plain, torch.arange(8.0)),
    ]
    return [torch.equal(a, b) for a, b in wanted] + [weight.requires_grad]


def test_tensors_under_way_and_parameters(pool, tmp_path):
    assert pool.run(save_and_load_under_way, str(tmp_path), ranks=2) == [[True] * 4] * 2


def make_training(mesh, dims):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def place(name, module, mesh):
        for key, p in list(module.named_parameters(recurse=False)):
            at = [Shard(dims[0] if p.ndim > 1 else 0)] + [Replicate()] * (mesh.ndim - 1)
            module.register_parameter(
                key, nn.Parameter(distribute_tensor(p.detach(), mesh, at, src_data_rank=None))
            )

    model = distribute_module(model, mesh, place)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, mesh, steps):
    x = distribute_tensor(
        torch.linspace(-1, 1, 20).view(4, 5), mesh, [Replicate()] * mesh.ndim, src_data_rank=None
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def train_and_save(path):
    mesh = cpu_mesh(2)
    model, optimizer = make_training(mesh, (0,))
    train(model, optimizer, mesh, 2)
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return train(model, optimizer, mesh, 2)


def load_and_train(path):
    mesh = cpu_mesh(3)
    model, optimizer = make_training(mesh, (1,))
    train(model, optimizer, mesh, 1)  # other values, and an optimizer state to fill
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    load(state, path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return train(model, optimizer, mesh, 2)


def test_training_goes_on_on_other_ranks(pool, tmp_path):
    expected = pool.run(train_and_save, str(tmp_path / "run"), ranks=2)[0]
    found = pool.run(load_and_train, str(tmp_path / "run"), ranks=3)[2]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def error_of(run, *args):
    try:
        run(*args)
    except CheckpointError as error:
        return str(error)
    return None


def misfits(directory):
    mesh = cpu_mesh(2)
    ones = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)], src_data_rank=None)
    saved = {"layer.weight": ones, "layer.bias": torch.ones(3), "step": 3}
    save(saved, f"{directory}/run")
    save_safetensors({"layer.weight": ones}, f"{directory}/m.safetensors")
    wide = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)], src_data_rank=None)
    pending = ones.redistribute(placements=[Partial()])
    return {
        "missing": error_of(load, {"layers.weight": ones, "other": ones}, f"{directory}/run"),
        "shape": error_of(load, {"layer.weight": wide}, f"{directory}/run"),
        "kinds": error_of(load, {"step": torch.ones(2), "layer.bias": 7}, f"{directory}/run"),
        "pending load": error_of(load, {"layer.weight": pending}, f"{directory}/run"),
        "pending save": error_of(save, {"w": pending}, f"{directory}/run"),
        "nothing": error_of(load, {"w": ones}, f"{directory}/none"),
        "safetensors": error_of(
            load_safetensors, {"layer.weight": wide, "x": ones}, f"{directory}/m.safetensors"
        ),
        "still there": error_of(load, {"layer.weight": ones}, f"{directory}/run"),
    }


def test_what_does_not_fit_is_told_on_all_ranks(pool, tmp_path):
    found, other = pool.run(misfits, str(tmp_path), ranks=2)
    assert found == other
    run = tmp_path / "run"
    assert found == {
        "missing": f"checkpoint {run} does not fit the state to load:\n"
        "  'layers.weight' is not in it; it has 'layer.weight'\n  'other' is not in it",
        "shape": f"checkpoint {run} does not fit the state to load:\n"
        "  'layer.weight' has shape (4, 4) here and (4, 3) there",
        "kinds": f"checkpoint {run} does not fit the state to load:\n"
        "  'layer.bias' is a int here and a tensor there\n  'step' is a tensor here and an object there",
        "pending load": f"checkpoint {run} does not fit the state to load:\n"
        "  'layer.weight' has a reduction pending (P): redistribute it to Shard() or Replicate() first",
        "pending save": "'w': a tensor of layout P has a reduction pending: its parts are terms, not pieces, and can't "
        "be saved or loaded; redistribute it to Shard() or Replicate() first",
        "nothing": f"there is no checkpoint at {tmp_path / 'none'}: it has no file .metadata",
        "safetensors": f"checkpoint {tmp_path / 'm.safetensors'} does not fit the state to load:\n"
        "  'layer.weight' has shape (4, 4) here and (4, 3) there\n  'x' is not in it",
        "still there": None,
    }


def save_ones(path):
    save({"w": distribute_tensor(torch.ones(5, 3), cpu_mesh(2), [Shard(0)], src_data_rank=None)}, path)


def load_ones(path):
    w = distribute_tensor(torch.zeros(5, 3), cpu_mesh(2), [Shard(1)], src_data_rank=None)
    text = error_of(load, {"w": w}, path)
    return text or torch.equal(w.full_tensor(), torch.ones(5, 3))


def flip_byte(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_damaged_checkpoints_are_told_on_all_ranks(pool, tmp_path):
    run = tmp_path / "run"
    pool.run(save_ones, str(run), ranks=2)
    data = run / "__1_0.distcp"
    middle = data.read_bytes().index(torch.ones(3).numpy().tobytes())
    damages = [
        (
            lambda: flip_byte(data, middle),
            r"__1_0.distcp is not what was written \(bytes 0 to \d+\); take another",
        ),
        (
            lambda: data.write_bytes(data.read_bytes()[:-40]),
            r"__1_0.distcp was cut off: a piece ends at byte",
        ),
        ((run / ".longmesh.json").unlink, r"its checksums, .longmesh.json, are missing; copy all of its"),
        (data.unlink, "__1_0.distcp is missing"),
        (lambda: (run / ".metadata").write_bytes(b"nonsense"), r"\.metadata is not what was written"),
    ]
    keep = tmp_path / "keep"
    shutil.copytree(run, keep)
    for damage, text in damages:
        shutil.rmtree(run)
        shutil.copytree(keep, run)
        damage()
        found = pool.run(load_ones, str(run), ranks=2)
        assert found[0] == found[1]
        with pytest.raises(CheckpointError, match=text):
            raise CheckpointError(found[0])


class Bomb:
    """Ends its process when it is written."""

    def __reduce__(self):
        os._exit(9)


def save_and_die(path):
    mesh = cpu_mesh(2)
    twos = distribute_tensor(torch.full((5, 3), 2.0), mesh, [Shard(0)], src_data_rank=None)
    state = {"w": twos, "z": {"late": Bomb()}} if dist.get_rank() == 1 else {"w": twos}
    save(state, path)


def test_a_rank_that_dies_while_writing_leaves_the_previous_checkpoint(pool, tmp_path):
    path = str(tmp_path / "run")
    pool.run(save_ones, path, ranks=2)
    with pytest.raises(RankError):
        pool.run(save_and_die, path, ranks=2)
    assert (tmp_path / ".run.saving").exists(), "it died while it was writing"
    assert pool.run(load_ones, path, ranks=2) == [True, True]
    pool.run(save_ones, path, ranks=2)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def refuse(directory):
    (Path(directory) / "own").mkdir(exist_ok=True)
    (Path(directory) / "own" / "notes.txt").write_text("mine")
    (Path(directory) / "file").write_text("mine")
    state = {"w": distribute_tensor(torch.ones(3), cpu_mesh(2), [Shard(0)], src_data_rank=None)}
    dist.barrier()
    return [
        error_of(save, state, f"{directory}/own"),
        error_of(save_safetensors, state, f"{directory}/own"),
        error_of(save, state, f"{directory}/file"),
    ]


def test_nothing_but_a_checkpoint_is_replaced(pool, tmp_path):
    found, other = pool.run(refuse, str(tmp_path), ranks=2)
    assert found == other
    text = (
        f"rank 0: {tmp_path / 'own'} contains files that are not part of a checkpoint (notes.txt), and saving "
        "there would delete them; save to another directory"
    )
    assert found[:2] == [text, text]
    assert (
        found[2]
        == f"rank 0: {tmp_path / 'file'} is a file, and a checkpoint is a directory; give another path"
    )
    assert (tmp_path / "own" / "notes.txt").read_text() == "mine"


MIB = 1 << 20


def peak_growth(run):
    """By how much the most memory this process had while `run()` exceeds what it has before, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before


def status(field):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def measure(directory):
    mesh = cpu_mesh(2)
    path = Path(directory) / "run"

    # 32 MiB on each rank, a part of a larger storage and not in order: writing it takes a copy.
    x = DTensor.from_local(torch.ones(2048, 4097)[:, :4096].t(), mesh, [Shard(0)])
    small = SavePlanner(chunk_bytes=4 * MIB)
    save({"w": torch.ones(2)}, path)  # what is imported and kept once
    load({"w": torch.ones(2)}, path)
    writing = peak_growth(lambda: _save({"x": x}, path, DirectoryWriter(path), small))
    y = DTensor.from_local(torch.zeros(4096, 2048), mesh, [Shard(0)])
    reading = peak_growth(lambda: load({"x": y}, path))
    return writing, reading, torch.equal(x.to_local(), y.to_local()), x.to_local().nbytes


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's peak memory counter"
)
def test_memory_is_bounded_by_the_pieces(pool, tmp_path):
    for writing, reading, same, shard_bytes in pool.run(measure, str(tmp_path), ranks=2):
        assert same
        assert shard_bytes == 32 * MIB
        assert writing < 16 * MIB, "one piece of 4 MiB at a time, with its copies"
        assert reading < 16 * MIB
