"""One rank calls a function of checkpoints with other arguments: an error on all ranks, and nobody waits."""

import re

import pytest
import torch
import torch.distributed as dist

from longmesh import DTensor, Replicate, Shard, distribute_tensor
from longmesh.checkpoint import Directory, load, load_safetensors, save, save_safetensors
from longmesh.errors import CheckpointError, LongmeshError
from longmesh.testing import cpu_mesh


def state():
    mesh = cpu_mesh(dist.get_world_size())
    return {"w": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)], src_data_rank=None)}


CALLS = {
    "save": lambda path, last: save(state(), f"{path}-{last}"),
    "load": lambda path, last: load(state(), f"{path}-{last}"),
    "load allow": lambda path, last: load(state(), path, allow=[complex] if last else [bytes]),
    "load not allowed": lambda path, last: load(state(), path, allow=["complex"] if last else []),
    "save_safetensors": lambda path, last: save_safetensors(state(), path, max_file_bytes=9 + last),
    "save_safetensors wrong": lambda path, last: save_safetensors(state(), path, max_file_bytes=1 - last),
    "load_safetensors": lambda path, last: load_safetensors(state(), f"{path}-{last}"),
    "step": lambda path, last: Directory(path).save(state(), 3 + last),
    "no step": lambda path, last: Directory(path).save(state(), 0 - last),
    "keep": lambda path, last: Directory(path, keep=1 + last).save(state(), 3),
    "other function": lambda path, last: (load if last else save)(state(), path),
    "save nothing": lambda path, last: save(None if last else state(), path),
    "load nothing": lambda path, last: load(None if last else state(), path),
    "save_safetensors nothing": lambda path, last: save_safetensors([] if last else state(), path),
    "load_safetensors nothing": lambda path, last: load_safetensors(None if last else state(), path),
    "keep nothing": lambda path, last: Directory(path).save(None if last else state(), 3),
    "keys": lambda path, last: load({"w": 1, 2: 3} if last else state(), path),
    "no bytes": lambda path, last: save_safetensors(state(), path, max_file_bytes=None if last else 9),
    "no allow": lambda path, last: load(state(), path, allow=None if last else ()),
    "no path": lambda path, last: load(state(), None if last else path),
}
DIFFERENT = "the ranks were called with different arguments"
GIVE = (
    r"give a dict of tensors, plain values and dicts or lists of them, e.g. {'model': model.state_dict\(\)}"
)
TEXTS = {
    "save": rf"checkpoint.save: {DIFFERENT}: rank 0 with CheckpointCall\(function='save', path='.*x-0', ",
    "load": r"checkpoint.load: the ranks were called with different arguments: ",
    "load allow": r"options=\('builtins.bytes',\)\), rank \d with .* options=\('builtins.complex',\)",
    "load not allowed": r"takes classes, got 'complex'; write e.g. allow=\[MyClass\]",
    "save_safetensors": r"options=\(9,\)\), rank \d with .* options=\(10,\)\); every rank must pass the same",
    "save_safetensors wrong": r"max_file_bytes=0\): give a positive number of bytes",
    "load_safetensors": r"checkpoint.load_safetensors: the ranks were called with different arguments: ",
    "step": rf"Directory.save: {DIFFERENT}: rank 0 with _DirectoryCall\(path=.*, step=3,.*step=4,",
    "no step": r"step=-1: a checkpoint's step is a whole number, 0 or more",
    "keep": r"Directory.save: the ranks were called with different arguments: .* keep=1,.* keep=2,",
    "save nothing": f"the state of a checkpoint is a NoneType; {GIVE}",
    "load nothing": f"the state of a checkpoint is a NoneType; {GIVE}",
    "save_safetensors nothing": f"the state of a checkpoint is a list; {GIVE}",
    "load_safetensors nothing": f"the state of a checkpoint is a NoneType; {GIVE}",
    "keep nothing": f"the state of a checkpoint is a NoneType; {GIVE}",
    "keys": rf"the state of a checkpoint is a dict whose keys are of several types \(int, str\); {GIVE}",
    "no bytes": r"max_file_bytes=None\): give a positive number of bytes",
    "no allow": r"takes classes, got None; write e.g. allow=\[MyClass\]",
    "no path": rf"checkpoint.load: {DIFFERENT}",
    "other function": rf"{DIFFERENT}: rank 0 with CheckpointCall\(function='save'.* CheckpointCall\(function='load'",
}


def call(path):
    """What each call says, and that a plain one works after all of them."""
    said = {}
    for name, function in CALLS.items():
        with pytest.raises(LongmeshError) as error:
            function(path, int(dist.get_rank() == dist.get_world_size() - 1))
        assert isinstance(error.value, ValueError)
        said[name] = str(error.value)
    save(state(), path)
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_arguments_on_one_rank(pool, tmp_path, ranks):
    for said in pool.run(call, str(tmp_path / "x"), ranks=ranks):
        for name, text in TEXTS.items():
            assert re.search(text, said[name]), (name, said[name])


def other_states(path):
    """States that are not parts of one: told by all ranks."""
    last = dist.get_rank() == dist.get_world_size() - 1
    mesh = cpu_mesh(dist.get_world_size())
    wide = distribute_tensor(torch.arange(12.0), mesh, [Shard(0)], src_data_rank=None)
    states = {
        "lacks a shard": {} if last else state(),
        "other size": {"w": wide} if last else state(),
        "other type": {"w": state()["w"].double()} if last else state(),
        "other layout": {
            "w": DTensor.from_local(torch.arange(10.0), mesh, [Replicate()]) if last else state()["w"]
        },
    }
    said = {}
    for name, value in states.items():
        for way in (lambda: save(value, path), lambda: Directory(path + "-kept").save(value, 1)):  # noqa: B023
            try:
                way()
                said.setdefault(name, []).append("")
            except CheckpointError as error:
                said.setdefault(name, []).append(str(error))
    return said


def test_states_that_are_not_parts_of_one(pool, tmp_path):
    texts = {
        "lacks a shard": "the shards of 'w' that ranks hold have 5 elements, and it has 10: a rank lacks it, or has",
        "other size": "'w' is (10,) of torch.float32 on rank 0 and (12,) of torch.float32 on rank 1: the ranks save",
        "other type": "'w' is (10,) of torch.float32 on rank 0 and (10,) of torch.float64 on rank 1: the ranks save",
        "other layout": "the shards of 'w' that ranks hold have 15 elements, and it has 10: a rank lacks it, or has",
    }
    for said in pool.run(other_states, str(tmp_path / "x"), ranks=2):
        for name, text in texts.items():
            assert [text in found for found in said[name]] == [True, True], (name, said[name])
