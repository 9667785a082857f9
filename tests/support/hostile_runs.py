"""Loading checkpoints that somebody made up: what must be true of it."""

import resource
import shutil
from pathlib import Path
from random import Random

import torch

from longmesh.checkpoint import load, load_safetensors, save_safetensors
from longmesh.checkpoint.directory_reader import find_damage
from longmesh.errors import CheckpointError
from support.checkpoints import save_one, state
from support.hostile_files import attack_directory, attack_index, attack_safetensors

MOST_GROWTH = 300 << 20  # bytes of memory


def attack_many(folder: Path, *, seed: int, directories: int, files: int, indexes: int) -> int:
    """How many were refused. Nothing runs, nothing but our error is raised, and memory does not grow."""
    ran = folder / "it-ran"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = sum(_attack_directory(folder, f"{seed}.{n}", ran) for n in range(directories))
    refused += sum(_attack_file(folder, f"{seed}.{n}") for n in range(files))
    refused += sum(_attack_index(folder, f"{seed}.{n}") for n in range(indexes))
    assert not ran.exists(), "a file ran something"
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < MOST_GROWTH
    return refused


def _attack_directory(folder: Path, seed: str, ran: Path) -> bool:
    random = Random(seed)
    good, path = folder / f"good{random.random() < 0.5}", folder / "bad" / "step-00000001"
    if not good.exists():
        save_one(good, by_torch=good.name.endswith("True"))
    shutil.rmtree(path.parent, ignore_errors=True)
    shutil.copytree(good, path)
    try:
        what = attack_directory(path, random, ran)
    except FileNotFoundError:  # torch's have no checksums to change
        return False
    found = state()
    try:
        list(find_damage(path))
        load(found, path)
    except CheckpointError:
        return True
    except BaseException as error:
        raise AssertionError(f"seed {seed!r}: {what}") from error
    assert found["w"].shape == (4, 3), (seed, what)
    return False


def _attack_file(folder: Path, seed: str) -> bool:
    random, path = Random(seed), folder / "x.safetensors"
    save_safetensors({"w": torch.arange(4.0)}, path)
    what = attack_safetensors(path, random)
    return _is_refused(path, seed, what)


def _attack_index(folder: Path, seed: str) -> bool:
    path = folder / "indexed"
    shutil.rmtree(path, ignore_errors=True)
    save_safetensors({"w": torch.arange(4.0)}, path)
    return _is_refused(path, seed, attack_index(path, Random(seed)))


def _is_refused(path: Path, seed: str, what: str) -> bool:
    found = {"w": torch.zeros(4)}
    try:
        load_safetensors(found, path)
    except CheckpointError:
        return True
    except BaseException as error:
        raise AssertionError(f"seed {seed!r}: {what}") from error
    return False
