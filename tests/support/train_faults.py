"""Training on a pool's ranks with a fault on one of them, and damaged checkpoints: cheap enough for hundreds."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest import mock

import torch.distributed as dist

from longmesh.checkpoint import directory
from longmesh.checkpoint.directory_reader import find_damage
from longmesh.checkpoint.generations import generation_path, list_steps
from longmesh.testing import RankError, RankPool, cpu_mesh
from longmesh.train import loop
from longmesh.train.data import Corpus
from longmesh.train.loop import train
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import slice_mesh
from longmesh.train.progress import say_nothing
from longmesh.watch import watch
from support.processes import is_alive

STEPS = 6
SIZES = {"seq_len": 32, "dim": 8, "layers": 1, "heads": 2, "kv_heads": 1, "resume": "auto"}
WATCH_S = 1.5
# Where a fault may happen: the function of a module before which it does.
POINTS = {
    "load": (loop, "load_state"),
    "step": (loop, "run_step"),
    "forward": (loop, "cut_cross_entropy"),
    "collective": (loop, "sum_gradients"),
    "save": (loop, "save_state"),
    "write": (directory, "write_part"),
    "commit": (directory, "commit"),
}


@dataclass(frozen=True)
class RankFault:
    """`what` happens to `rank` when it passes `point` after `skip` times."""

    rank: int
    point: str
    skip: int
    what: str

    @property
    def is_silent(self) -> bool:
        return self.what in ("SIGSTOP", "loop")


def train_on_rank(out: str, steps: int, save_every: int, fault: RankFault | None) -> tuple[int, list[float]]:
    """How many steps were loaded, and all losses."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    Path(out, f"pid{rank}").write_text(str(os.getpid()))
    options = TrainOptions(context=num_ranks, steps=steps, out=out, save_every=save_every, **SIZES)
    axes = slice_mesh(cpu_mesh(1, num_ranks, 1, names=("data", "context", "tensor")))
    with contextlib.ExitStack() as stack:
        if fault is not None and fault.is_silent:
            stack.enter_context(watch(WATCH_S))
        if fault is not None and fault.rank == rank:
            stack.enter_context(_armed(fault))
        record = train(options, axes, Corpus(0), say_nothing)
    return len(record.losses) - len(record.steps), record.losses


@contextlib.contextmanager
def _armed(fault: RankFault):
    module, name = POINTS[fault.point]
    function, left = getattr(module, name), [fault.skip]

    def passing(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            _act(fault.what)
        return function(*args, **kwargs)

    with mock.patch.object(module, name, passing):
        yield


def _act(what: str) -> None:
    if what == "loop":
        while True:
            time.sleep(0)
    if what == "raise":
        raise RuntimeError("a fault was put in here")
    os.kill(os.getpid(), getattr(signal, what))


def try_train(
    pool: RankPool,
    out: Path,
    num_ranks: int,
    fault: RankFault | None,
    steps: int = STEPS,
    save_every: int = 1,
) -> tuple[int, list[float]] | None:
    """What `train_on_rank` gives on all ranks alike; None if the run failed, after which no rank is left."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        results = pool.run(train_on_rank, str(out), steps, save_every, fault, ranks=num_ranks, timeout=120)
    except RankError as error:
        if fault is None or error.cause.kind == "hung":
            raise
        pids = [int((out / f"pid{rank}").read_text()) for rank in range(num_ranks)]
        assert not any(map(is_alive, pids)), "a rank was left behind"
        return None
    assert all(result == results[0] for result in results)
    return results[0]


def damage(out: Path, random: Random) -> str | None:
    """Damage a file of the newest checkpoint; what was done, or None if there is none."""
    generations = sorted((out / "checkpoint").glob("step-*"))
    files = sorted(path for path in generations[-1].rglob("*") if path.is_file()) if generations else []
    if not files:
        return None
    path = random.choice(files)
    data = bytearray(path.read_bytes())
    how = random.choice(["flip", "truncate", "remove"]) if data else "remove"
    if how == "remove":
        path.unlink()
    elif how == "truncate":
        path.write_bytes(data[: random.randrange(len(data))])
    else:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(data)
    return f"{how} {path.name}"


def whole_steps(out: Path) -> list[int]:
    """The steps of which every byte is there, by a look of our own."""
    root = out / "checkpoint"
    return [step for step in list_steps(root) if not any(find_damage(generation_path(root, step)))]


class Life:
    """A run in one directory, with what must be true of it: what is loaded is a prefix of the uninterrupted run."""

    def __init__(self, pool: RankPool, out: Path, expected: dict[int, list[float]]) -> None:
        self._pool, self._out, self._expected = pool, out, expected
        self.sizes: set[int] = set()

    def go(self, num_ranks: int, fault: RankFault | None, steps: int = STEPS, save_every: int = 1) -> bool:
        """Train on; whether it came to its end. What it loaded and computed is checked."""
        self.sizes.add(num_ranks)
        there = max(whole_steps(self._out), default=0)
        result = try_train(self._pool, self._out, num_ranks, fault, steps, save_every)
        if result is None:
            assert max(whole_steps(self._out), default=0) >= there, "a state was lost"
            return False
        loaded, losses = result
        assert loaded == there, f"{there} steps were saved, {loaded} were loaded"
        assert len(losses) == max(loaded, steps)
        for size in self.sizes:
            differences = [abs(a - b) for a, b in zip(losses, self._expected[size], strict=False)]
            assert max(differences) < 1e-5
        if len(self.sizes) == 1:
            assert losses == self._expected[num_ranks][: len(losses)]
        return True

    def damage(self, random: Random) -> bool:
        """Damage the newest checkpoint, if an older one is left to fall back to; whether that was done."""
        return len(whole_steps(self._out)) > 1 and damage(self._out, random) is not None


def uninterrupted(pool: RankPool, folder: Path) -> dict[int, list[float]]:
    """The losses that nothing happened to, by number of ranks."""
    found = {}
    for num_ranks in (1, 2, 3):
        result = try_train(pool, folder / f"whole{num_ranks}", num_ranks, None)
        assert result is not None
        found[num_ranks] = result[1]
    return found


KINDS = ["SIGKILL"] * 6 + ["raise"] * 2 + ["SIGABRT", "SIGSEGV", "SIGSTOP", "loop"]


def live_through(
    pool: RankPool, folder: Path, expected: dict[int, list[float]], seed: str, num_faults: int
) -> tuple[int, int]:
    """Random faults in one run after the other: how many there were, and how many runs came to their end."""
    random = Random(seed)
    done, ends = 0, 0
    while done < num_faults:
        life = Life(pool, folder / f"{seed}-{ends}", expected)
        sizes = random.choice([[2], [3], [2, 3], [1, 2, 3]])
        is_done = False
        while not is_done and done < num_faults:
            num_ranks = random.choice(sizes)
            what = random.choice(KINDS) if num_ranks > 1 else "SIGKILL"
            point = random.choice(sorted(POINTS))
            fault = RankFault(random.randrange(num_ranks), point, random.randrange(4), what)
            is_done = life.go(num_ranks, fault if random.random() < 0.9 else None)
            done += not is_done
            if not is_done and random.random() < 0.3:
                done += life.damage(random)
        if not is_done:  # the faults are used up: what is left of it must still be good
            assert life.go(random.choice(sizes), None)
        ends += 1
    return done, ends
