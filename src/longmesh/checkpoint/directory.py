"""A directory of checkpoints: the last few steps are always there, whatever happens while one is saved."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from longmesh.checkpoint.api import find_no_state, load
from longmesh.checkpoint.background import Job, commit, write_part
from longmesh.checkpoint.buffers import Buffers
from longmesh.checkpoint.directory_reader import find_damage
from longmesh.checkpoint.disk import check_room, remove, staging_path, writing
from longmesh.checkpoint.generations import (
    choose_removed,
    find_bad_step,
    generation_path,
    list_steps,
    remove_garbage,
    remove_generation,
)
from longmesh.checkpoint.pieces import Allowed
from longmesh.checkpoint.runs import Runs
from longmesh.comm.agree import fingerprint
from longmesh.comm.world import Counting, World
from longmesh.errors import CheckpointError, LongmeshError

_SHIFT = 20  # of a fingerprint's bits: numbers of all ranks are added up


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _DirectoryCall(NamedTuple):
    """What every rank must be called with alike."""

    path: str
    step: int
    keep: int
    keep_every: int
    max_failures: int
    check_finite: bool


def _raise(problem: CheckpointError) -> None:
    raise problem


@dataclass
class _UnderWay:
    """The save that is under way, if there is one. A program that drops its Directory, or ends, before a save is whole
    has lost it, and is told."""

    path: Path
    tell: Callable[[str], None]
    step: int | None = None
    is_mine_to_tell: bool = False

    def tell_unfinished(self) -> None:
        if self.step is not None and self.is_mine_to_tell:
            target = generation_path(self.path, self.step)
            self.tell(
                f"{target} is incomplete, because nothing waited for it: call flush() on every rank at the end"
            )


class Directory:
    """Checkpoints of one run, by step: the last `keep`, and those whose step is a multiple of `keep_every`.

    `save` copies the state and returns; a thread writes it. Every rank calls `poll()` once a step, and `flush()` at the
    end. A save that fails leaves the others as they are: `tell` gets a line, and the `max_failures`-th in a row is
    raised, on every rank. With `check_finite`, a state with a NaN or an infinity is not saved. Everything but `steps()`
    and `latest()` is collective: every rank of the world calls it.

    >>> checkpoints = Directory("checkpoints", keep=2)
    >>> state = {"x": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])}
    >>> for step in (10, 20, 30):
    ...     checkpoints.save(state, step)
    >>> checkpoints.flush()
    >>> checkpoints.steps()
    [20, 30]
    >>> checkpoints.load_latest(state)
    30
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int = 0,
        max_failures: int = 3,
        check_finite: bool = False,
        tell: Callable[[str], None] = _tell,
    ) -> None:
        for name, value, least in (
            ("keep", keep, 1),
            ("keep_every", keep_every, 0),
            ("max_failures", max_failures, 1),
        ):
            if value < least:
                raise LongmeshError(f"Directory({name}={value}): give {least} or more")
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise LongmeshError(f"{self.path} is a file; give the path of a directory")
        self._keep, self._keep_every, self._max_failures = keep, keep_every, max_failures
        self._check_finite, self._tell_line = check_finite, tell
        self._buffers = Buffers()
        self._runs = Runs(self.path)
        self._run: int | None = None  # ours, on rank 0, when it is known
        self._damaged: set[int] = set()
        self._cleaned = False
        self._failures = 0
        self._last_problem: str | None = None
        self._under_way = _UnderWay(self.path, tell)
        weakref.finalize(self, self._under_way.tell_unfinished)
        self._job: Job | None = None
        self._committing = False
        self._counting: Counting | None = None

    @property
    def _step(self) -> int | None:
        """Of the save that is under way."""
        return self._under_way.step

    @_step.setter
    def _step(self, step: int | None) -> None:
        self._under_way.step, self._under_way.is_mine_to_tell = step, self._world.rank == 0

    @cached_property
    def _world(self) -> World:
        """All ranks, when they are first needed: a directory may be opened before there is a process group."""
        return World()

    # -- what is there -------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, oldest first; reads the directory."""
        return list_steps(self.path)

    def step_path(self, step: int) -> Path:
        """Where the checkpoint of `step` is, or would be."""
        return generation_path(self.path, step)

    def latest(self) -> int | None:
        """The newest step that has a checkpoint; reads the directory, and not whether it is damaged.

        Of a run that began anew where an earlier one got further, it is the newest step of that run.
        """
        return next(reversed(self._runs.order()), None)

    def latest_whole(self) -> int | None:
        """The newest step whose checkpoint is whole, every byte of it; None if there is no checkpoint at all.

        What is saved from now on belongs to its run. Each rank reads a share of the files. A line tells of every
        damaged one that is passed over.
        """
        self._finish()
        seen = self._world.gather(" ".join(map(str, self._runs.order() if self._world.rank == 0 else ())))[0]
        problems: list[str] = []
        for step in map(int, reversed(seen.split())):
            found = self._find_damage(step)
            if found is None:
                for problem in problems:
                    self._tell(f"{problem}; step {step} is used instead")
                self._run = self._runs.run_of(step) if self._world.rank == 0 else None
                return step
            self._damaged.add(step)
            problems.append(found)
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.path} is complete:\n" + "\n".join(f"  {p}" for p in problems)
            )
        return None

    def load_latest(self, state_dict: dict[str, Any], *, allow: Allowed = ()) -> int | None:
        """Load the newest checkpoint that is whole, as `load` does; its step, or None if there is no checkpoint."""
        step = self.latest_whole()
        if step is not None:
            load(state_dict, generation_path(self.path, step), allow=allow)
        return step

    def _find_damage(self, step: int) -> str | None:
        share = (self._world.rank, self._world.size)
        found = next(find_damage(generation_path(self.path, step), share=share), "")
        return next((text for text in self._world.gather(found) if text), None)

    # -- saving --------------------------------------------------------------------------------------

    def save(self, state_dict: dict[str, Any], step: int) -> None:
        """Copy the state and begin to write it as the checkpoint of `step`. Waits for a save that is under way."""
        self._finish()
        call = _DirectoryCall(
            str(self.path), step, self._keep, self._keep_every, self._max_failures, self._check_finite
        )
        wrong = find_bad_step(step) or find_no_state(state_dict)
        mine = 0 if wrong else fingerprint(call) >> _SHIFT
        target = generation_path(self.path, 0 if wrong else step)
        problem = None if wrong else self._begin(target)
        told = [problem is not None, wrong is not None or not self._buffers.fits(state_dict), mine]
        failed, stale, total = self._world.count(told)
        self._step, self._committing = step, False
        if wrong or total != mine * self._world.size:
            self._drop_staged(target)
            self._world.agree("Directory.save", call, wrong)  # raises, and tells all who was called with what
        if failed:
            self._fail(problem)
            return
        try:
            if stale:
                self._buffers.make_plan(state_dict, target)
        except CheckpointError:  # on every rank: the state is no state to save
            self._drop_staged(target)
            raise
        self._job = Job(self._prepare_write(target))

    def _prepare_write(self, target: Path) -> Callable[[], None]:
        """Copy the state; what writes the copy. An error of one rank waits until all are told of it."""
        buffers, rank, check = self._buffers, self._world.rank, self._check_finite
        try:
            pieces = buffers.copy()
        except Exception as error:
            problem = CheckpointError(f"{target} could not be written: {type(error).__name__}: {error}")
            return lambda: _raise(problem)
        return lambda: write_part(target, rank, buffers.prefix, pieces, buffers.num_bytes, check)

    def poll(self) -> None:
        """Take a save that is under way further, without waiting for it. Once a step, on every rank."""
        if self._step is None:
            return
        if self._counting is None:
            self._counting = self._start_counting()
            return
        counting, self._counting = self._counting, None
        self._advance(*counting.result())
        if self._step is not None:
            self._counting = self._start_counting()

    def flush(self) -> None:
        """Wait until what was saved last is on disk; raises if it is not."""
        self._finish()
        if self._last_problem is not None:
            raise CheckpointError(self._last_problem)

    def _finish(self) -> None:
        """Wait for the save that is under way, if there is one."""
        if self._counting is not None:
            counting, self._counting = self._counting, None
            self._advance(*counting.result())
        while self._step is not None:
            assert self._job is not None
            self._job.wait()
            self._advance(*self._start_counting().result())

    def _begin(self, target: Path) -> str | None:
        """Rank 0 makes the place where all ranks write; what is wrong, if something is."""
        if self._world.rank != 0:
            return None
        try:
            with writing(target, self._buffers.total_bytes or None):
                if not self._cleaned:
                    self.path.mkdir(parents=True, exist_ok=True)
                    remove_garbage(self.path)
                    self._cleaned = True
                remove(staging_path(target))
                staging_path(target).mkdir()
            check_room(target, self._buffers.total_bytes)
        except CheckpointError as error:
            return str(error)
        return None

    def _start_counting(self) -> Counting:
        """How many ranks have done their part, and how many of them have failed."""
        assert self._job is not None
        done = self._job.is_done
        return self._world.start_count([done, done and self._job.problem is not None])

    def _advance(self, num_done: int, num_failed: int) -> None:
        if num_done < self._world.size:
            return
        assert self._step is not None and self._job is not None
        if num_failed:
            self._fail(self._job.problem)
        elif not self._committing:
            self._committing = True
            self._job = Job(self._commit if self._world.rank == 0 else lambda: None)
        else:
            self._damaged.discard(self._step)
            self._step, self._failures, self._last_problem = None, 0, None

    def _commit(self) -> None:
        """Make the checkpoint visible, then remove those that are not to stay. On rank 0, in its thread."""
        assert self._step is not None
        target, buffers = generation_path(self.path, self._step), self._buffers
        assert buffers.metadata is not None
        if self._run is None:
            self._run = self._runs.begin()
        commit(target, self._run, buffers.metadata, self._world.size, buffers.total_bytes)
        good = [step for step in self._runs.order() if step not in self._damaged]
        for step in choose_removed(good, newest=self._step, keep=self._keep, keep_every=self._keep_every):
            try:
                remove_generation(self.path, step)
            except OSError as error:  # the save itself has succeeded
                self._tell(
                    f"{generation_path(self.path, step)} could not be removed: {error.strerror or error}"
                )

    def _fail(self, problem: str | None) -> None:
        """A save has failed on some rank. Collective: every rank of the world."""
        assert self._step is not None
        problems = self._world.gather(problem or "")
        text = next(text for text in problems if text)
        self._drop_staged(generation_path(self.path, self._step))
        self._failures, self._last_problem = self._failures + 1, text
        if self._failures >= self._max_failures:
            count = (
                f"{self._failures} saves in a row have failed"
                if self._failures > 1
                else "the save has failed"
            )
            raise CheckpointError(f"{text}\n{count}; {self._describe_latest()}")
        self._tell(f"{text}; {self._describe_latest()}, and the run continues")

    def _drop_staged(self, target: Path) -> None:
        """Give up the save that is under way, and what was written of it."""
        if self._world.rank == 0:
            with contextlib.suppress(OSError):  # what has failed may fail again; the next run removes it
                remove(staging_path(target))
        self._step = None

    def _describe_latest(self) -> str:
        steps = [step for step in self._runs.order() if step not in self._damaged]
        return f"the newest checkpoint is that of step {steps[-1]}" if steps else "there is no checkpoint yet"

    def _tell(self, line: str) -> None:
        if self._world.rank == 0:
            self._tell_line(line)
