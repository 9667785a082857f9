"""A checkpoint as torch.distributed.checkpoint lays it out in a directory, with checksums beside it.

.metadata         sizes, and in which file each piece lies (torch's); a mark says that checksums belong to it
__0_0.distcp      the pieces that rank 0 wrote, one after the other
.longmesh.json    a CRC-32 of each piece and of .metadata; torch ignores it
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from longmesh._torch.bridge import storage_info_class
from longmesh.checkpoint.disk import (
    backup_path,
    check_room,
    remove,
    replace_with_staged,
    staging_path,
    writing,
)
from longmesh.errors import CheckpointError

if TYPE_CHECKING:
    from longmesh._torch.bridge import StorageInfo
else:
    StorageInfo = storage_info_class()

METADATA = ".metadata"
CHECKSUMS = ".longmesh.json"
MARK = "longmesh.checkpoint"
RUN = "longmesh.run."  # with a number: see runs.py
_OURS = re.compile(r"__\d+_\d+\.distcp|(__\d+)?\.metadata(\.tmp)?|\.longmesh\.json")


class DirectoryWriter(FileSystemWriter):
    """Writes beside `target` and takes its place at the end, on the coordinating rank, when all ranks have written."""

    def __init__(self, target: Path, run: int = 0) -> None:
        super().__init__(staging_path(target))
        self._target, self._run = target, run
        self._needed_bytes: int | None = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        needed = self._needed_bytes = sum(map(num_bytes, plans))
        with writing(self._target, needed):
            prepare_directory(self._target, is_ours=lambda name: bool(_OURS.fullmatch(name)))
            check_room(self._target, needed)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """One piece in memory at a time (torch's own writer keeps every copy it makes until the end)."""
        pieces = ((item, planner.resolve_data(item)) for item in plan.items)
        with writing(self._target, num_bytes(plan)):
            results = write_pieces(Path(self.path), plan.storage_data.prefix, pieces)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with writing(self._target, self._needed_bytes):
            self.describe(metadata, results)
            replace_with_staged(self._target)

    def describe(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the description and the checksums of what lies in the staging directory."""
        checksums: dict[str, dict[str, int]] = {}
        for result in (result for per_rank in results for result in per_rank):
            info, checksum = result.storage_data
            checksums.setdefault(info.relative_path, {})[str(info.offset)] = checksum
        plain = [[_without_checksum(result) for result in per_rank] for per_rank in results]
        super().finish(metadata, plain)
        described = zlib.crc32((Path(self.path) / METADATA).read_bytes())
        text = json.dumps({METADATA: described, "crc32": checksums})
        (Path(self.path) / CHECKSUMS).write_text(text)

    def storage_meta(self) -> StorageMeta | None:
        marks = [MARK, f"{RUN}{self._run}"] if self._run else [MARK]
        return StorageMeta(checkpoint_id=str(self._target), save_id=self.save_id, modules=marks)


def num_bytes(plan: SavePlan) -> int:
    """How much the tensors of a plan take; other values are not counted."""
    chunks = (
        (item.tensor_data.chunk, item.tensor_data.properties) for item in plan.items if item.tensor_data
    )
    return sum(chunk.sizes.numel() * properties.dtype.itemsize for chunk, properties in chunks)


def prepare_directory(target: Path, *, is_ours: Callable[[str], bool]) -> None:
    """An empty staging directory for `target`; refuses a target that holds other things, which would be lost."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, and a checkpoint is a directory; give another path")
    if not target.exists() and backup_path(target).exists():  # a replacement was cut off
        os.rename(backup_path(target), target)
    strange = sorted(p.name for p in target.iterdir() if not is_ours(p.name)) if target.exists() else []
    if strange:
        raise CheckpointError(
            f"{target} contains files that are not part of a checkpoint ({', '.join(strange[:3])}), and saving there "
            "would delete them; save to another directory"
        )
    remove(staging_path(target))
    staging_path(target).mkdir()


def write_pieces(directory: Path, prefix: str, pieces: Iterable[tuple[WriteItem, Any]]) -> list[WriteResult]:
    """Write a rank's pieces to its file, one after the other, and bring them to the disk."""
    name = f"{prefix}0.distcp"
    results: list[WriteResult] = []
    file: IO[bytes] | None = None
    try:
        for item, data in pieces:
            file = file or open(directory / name, "wb")  # noqa: SIM115 - closed below; none without pieces
            results.append(_write_item(file, name, item, data))
        if file is not None:
            file.flush()
            os.fsync(file.fileno())
    finally:
        if file is not None:
            file.close()
    return results


class _Checked:
    """A file that is written to, the CRC-32 of what is written, and what went wrong."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.checksum = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def _write_item(file: IO[bytes], name: str, item: WriteItem, data: Any) -> WriteResult:
    start = file.tell()
    checked = _Checked(file)
    if isinstance(data, torch.Tensor):
        own = data.detach().to("cpu")
        # torch.save writes the whole storage that a view lies in.
        is_view = own.untyped_storage().nbytes() != own.numel() * own.element_size()
        try:
            torch.save(own.clone() if is_view else own, cast("IO[bytes]", checked))
        except RuntimeError:
            if checked.error is not None:  # torch tells of positions in its archive
                raise checked.error from None
            raise
    else:
        # Not getbuffer(): left by a failed write, it ends the process in Python 3.12.1's garbage collection.
        checked.write(data.getvalue())
    length = file.tell() - start
    return WriteResult(item.index, length, (StorageInfo(name, start, length), checked.checksum))


def _without_checksum(result: WriteResult) -> WriteResult:
    return WriteResult(result.index, result.size_in_bytes, result.storage_data[0])
