"""Which run a checkpoint is of: one that begins anew in a directory leaves what an earlier one saved at later steps.

    step-00000010   run 2    <- the newest: run 2 began after run 1
    step-00000020   run 1
    step-00000030   run 1

Runs are counted in their directory, and the number is in each checkpoint's description. What torch wrote has none: it
counts to the run of the step before it.
"""

from __future__ import annotations

import math
from pathlib import Path

from longmesh.checkpoint.directory_reader import read_whole_description
from longmesh.checkpoint.directory_writer import MARK, RUN
from longmesh.checkpoint.generations import generation_path, list_steps
from longmesh.errors import CheckpointError

_MOST_DIGITS = 9


class Runs:
    """The runs of the checkpoints in `root`; each description is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[tuple[int, int], int | None] = {}  # by step and inode: a step may be replaced

    def order(self) -> list[int]:
        """The steps that have a checkpoint: by run, then by step, so that the newest is the last."""
        runs = self.by_step()
        return sorted(runs, key=lambda step: (runs[step], step))

    def by_step(self) -> dict[int, float]:
        """The run of each checkpoint. One that can't be read counts as the newest: so it is looked at, and told of."""
        runs: dict[int, float] = {}
        before = 0.0
        for step in list_steps(self._root):
            try:
                run = self._read(step)
                runs[step] = before = before if run is None else run
            except (OSError, CheckpointError):
                runs[step] = math.inf
        return runs

    def run_of(self, step: int) -> int | None:
        """The run of a checkpoint, if it can be read."""
        found = self.by_step().get(step, math.inf)
        return None if found == math.inf else int(found)

    def begin(self) -> int:
        """The number of a run that begins now."""
        return 1 + int(max((run for run in self.by_step().values() if run < math.inf), default=0))

    def _read(self, step: int) -> int | None:
        path = generation_path(self._root, step)
        key = step, path.stat().st_ino
        if key not in self._known:
            self._known[key] = _read_run(path)
        return self._known[key]


def _read_run(path: Path) -> int | None:
    """The number in a checkpoint's description; None if torch wrote it."""
    meta = read_whole_description(path)[0].storage_meta
    assert meta is not None
    found = [mark.removeprefix(RUN) for mark in meta.modules if mark.startswith(RUN)]
    if not found:
        return 0 if MARK in meta.modules else None
    digits = found[0]
    return int(digits) if digits.isdecimal() and len(digits) <= _MOST_DIGITS else 0
