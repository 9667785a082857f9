"""A save beside the training: written by a thread that calls no collective, then made visible by rank 0's thread.

    begin   |  copy     | step | step | step | ...          every rank's own thread writes its file meanwhile
    poll    |           |  .   |  .   |  all have written   rank 0's thread writes the description and renames
    poll    |           |      |      |  .   | all know     that it is there, or why not

Each rank lists what it has written in a file beside it, `__0.written.json`: rank 0 needs no message to describe it all.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from longmesh.checkpoint.buffers import Pieces
from longmesh.checkpoint.directory_writer import DirectoryWriter, StorageInfo, write_pieces
from longmesh.checkpoint.disk import replace_with_staged, staging_path, writing
from longmesh.errors import CheckpointError

_NICER = 5  # a third of the processor where the training wants it, all of it where nobody does
_GRAIN = (
    32768  # elements that torch works on in the thread that asks: no others are woken beside the training's
)


class Job:
    """Work in a thread, and how it ended."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.problem: str | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="longmesh-save", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        _step_back()
        try:
            self._work()
        except CheckpointError as error:
            self.problem = str(error)
        except Exception as error:  # whatever it is, all ranks have to be told
            self.problem = f"{type(error).__name__}: {error}"


def _step_back() -> None:
    """Let the training have the processor first: on Linux each thread has a priority of its own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)


def write_part(
    target: Path, rank: int, prefix: str, pieces: Pieces, num_bytes: int, check_finite: bool
) -> None:
    """Write this rank's pieces of `target` into its staging directory, and the list of them."""
    staged = staging_path(target)
    checked = _finite(pieces, target) if check_finite else iter(pieces)
    with writing(target, num_bytes):
        results = write_pieces(staged, prefix, checked)
        rows = [_row(result) for result in results]
        _list_path(staged, rank).write_text(json.dumps(rows))


def commit(target: Path, run: int, metadata: Metadata, num_ranks: int, total_bytes: int) -> None:
    """Describe what all ranks of the run have written, and give it its name. For one rank."""
    staged, writer = staging_path(target), DirectoryWriter(target, run)
    with writing(target, total_bytes):
        lists = [_list_path(staged, rank) for rank in range(num_ranks)]
        results = [[_result(row) for row in json.loads(path.read_text())] for path in lists]
        writer.describe(metadata, results)
        for path in lists:
            path.unlink()
        replace_with_staged(target)


def _list_path(staged: Path, rank: int) -> Path:
    return staged / f"__{rank}.written.json"


def _row(result: WriteResult) -> list[Any]:
    info, checksum = result.storage_data
    index = result.index
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, info.relative_path, info.offset, info.length, checksum]


def _result(row: list[Any]) -> WriteResult:
    name, offset, number, path, start, length, checksum = row
    index = MetadataIndex(name, offset, number)
    return WriteResult(index, length, (StorageInfo(path, start, length), checksum))


def _finite(pieces: Pieces, target: Path) -> Iterator[tuple[WriteItem, Any]]:
    """The pieces, as long as every number in them is finite."""
    for item, data in pieces:
        if isinstance(data, torch.Tensor) and not is_finite(data):
            raise CheckpointError(
                f"{target} was not written: {item.index.fqn!r} is not finite, so the checkpoint would be useless"
            )
        yield item, data


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has neither NaN nor infinity, in the thread that asks."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    return all(
        bool(part.abs().float().amax().isfinite()) for part in tensor.reshape(-1).split(_GRAIN) if len(part)
    )
