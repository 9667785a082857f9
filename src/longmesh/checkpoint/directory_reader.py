"""Reading a checkpoint directory: nothing in it is run, believed about sizes, or followed out of it.

.metadata         sizes, and in which file each piece lies: torch's, a pickle; read as plain values
__0_0.distcp      the pieces that rank 0 wrote, one after the other; read by torch with an allow-list
.longmesh.json    CRC-32 of each piece and of .metadata; a checkpoint that torch wrote has none, but those in its pieces
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from longmesh.checkpoint.description import read_description
from longmesh.checkpoint.directory_writer import CHECKSUMS, MARK, METADATA, StorageInfo
from longmesh.checkpoint.generations import list_steps
from longmesh.checkpoint.inside import find_inside, read_inside
from longmesh.checkpoint.pickled import NotPlain
from longmesh.checkpoint.pieces import Allowed, FilePart, Refused, check_archive, read_piece
from longmesh.errors import CheckpointError

_BLOCK = 1 << 20


class PathReader(StorageReader):
    """A reader that is made for one path, and leaves plans as they are: what torch asks for besides."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class DirectoryReader(PathReader):
    """Reads a checkpoint directory; pieces are checked before they are used.

    If the description can't be read, `problem` says why and an empty one is returned: the planner tells all ranks.
    """

    def __init__(self, path: Path, allow: Allowed = ()) -> None:
        self.path = path
        self.problem: str | None = None
        self._allow = allow
        self._checksums: dict[str, dict[str, int]] | None = None
        self._metadata = Metadata({}, storage_data={})

    def read_metadata(self) -> Metadata:
        try:
            self._metadata, self._checksums = read_whole_description(self.path)
        except CheckpointError as error:
            self.problem = str(error)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        def file_of(item: ReadItem) -> str:
            return self._info(item).relative_path

        for name, items in groupby(sorted(plan.items, key=file_of), key=file_of):
            with open(find_inside(self.path, name), "rb") as file:
                for item in items:
                    self._read_item(file, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: IO[bytes], item: ReadItem, planner: Any) -> None:
        info, name = self._info(item), item.storage_index.fqn
        value = self._value(file, info, name)
        if item.type == LoadItemType.BYTE_IO:
            planner.load_object(item, value)
            return
        found = self._metadata.state_dict_metadata[name]
        assert isinstance(found, TensorStorageMetadata)
        sizes = next(c.sizes for c in found.chunks if c.offsets == item.storage_index.offset)
        dtype = found.properties.dtype
        if not isinstance(value, torch.Tensor) or value.shape != sizes or value.dtype != dtype:
            raise self._damaged(info, f"holds something else than {tuple(sizes)} of {dtype} for {name!r}")
        for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            value = value.narrow(dim, start, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(value)
        planner.commit_tensor(item, target)

    def _value(self, file: IO[bytes], info: StorageInfo, name: str) -> Any:
        """What `torch.save` wrote there, checked."""
        check_piece(self.path, file, info, self._checksums)
        part = cast("IO[bytes]", FilePart(file, info.offset, info.length))
        try:
            return read_piece(part, allow=self._allow, check_crc=self._checksums is None)
        except Refused as error:
            raise CheckpointError(
                f"checkpoint {self.path} is refused: {name!r} contains {error}, and loading that could run any "
                "code; if you trust it, name it in load(..., allow=[...])"
            ) from error
        except Exception as error:  # what is made up raises anything
            text = next(iter(str(error).splitlines()), type(error).__name__)
            raise self._damaged(info, f"can't be read ({text})") from error

    def _info(self, item: ReadItem) -> StorageInfo:
        try:
            return self._metadata.storage_data[item.storage_index]
        except KeyError:
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: no file has the piece of {item.storage_index.fqn!r} at "
                f"{tuple(item.storage_index.offset or ())}"
            ) from None

    def _damaged(self, info: StorageInfo, what: str) -> CheckpointError:
        return CheckpointError(f"checkpoint {self.path} is damaged: {info.relative_path} {what}")


def read_whole_description(path: Path) -> tuple[Metadata, dict[str, dict[str, int]] | None]:
    """The description of a checkpoint, and its checksums: None if torch wrote it."""
    try:
        data = read_inside(path, METADATA)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {path} can't be read: {METADATA}: {error.strerror or error}"
        ) from error
    except CheckpointError as error:
        if "is missing" in str(error):
            steps = list_steps(path)
            hint = (
                f"; it has that of step {steps[-1]}: use Directory({str(path)!r}).load_latest"
                if steps
                else ""
            )
            raise CheckpointError(
                f"there is no checkpoint at {path}: it has no file {METADATA}{hint}"
            ) from error
        raise
    checksums = _read_checksums(path, data)
    try:
        metadata = read_description(data)
    except NotPlain as error:
        raise CheckpointError(
            f"checkpoint {path} is damaged: its description can't be read ({error})"
        ) from error
    assert metadata.storage_meta is not None
    if checksums is None and MARK in metadata.storage_meta.modules:
        raise CheckpointError(
            f"checkpoint {path} is damaged: its checksums, {CHECKSUMS}, are missing; copy all of its files, also those "
            "whose names begin with a dot"
        )
    return metadata, checksums


def _read_checksums(path: Path, description: bytes) -> dict[str, dict[str, int]] | None:
    if not os.path.lexists(path / CHECKSUMS):
        return None
    try:
        found = json.loads(read_inside(path, CHECKSUMS))
        checksums: dict[str, dict[str, int]] = found["crc32"]
        for pieces in checksums.values():
            if not all(isinstance(value, int) for value in pieces.values()):
                raise ValueError("a checksum is not a number")
        own = found.get(METADATA, zlib.crc32(description))
    except CheckpointError:
        raise
    except Exception as error:  # JSON that is not ours raises anything
        raise CheckpointError(
            f"checkpoint {path} is damaged: its checksums, {CHECKSUMS}, can't be read ({error})"
        ) from error
    if own != zlib.crc32(description):
        raise CheckpointError(f"checkpoint {path} is damaged: {METADATA} is not what was written")
    return checksums


def check_piece(
    path: Path, file: IO[bytes], info: StorageInfo, checksums: dict[str, dict[str, int]] | None
) -> None:
    """Refuse a piece that is not in its file, or not what was written."""
    end, size = info.offset + info.length, os.fstat(file.fileno()).st_size
    where = f"checkpoint {path} is damaged: {info.relative_path}"
    if end > size:
        raise CheckpointError(
            f"{where} was cut off: a piece ends at byte {end} of {size}; take another checkpoint"
        )
    if checksums is None:
        return
    expected = checksums.get(info.relative_path, {}).get(str(info.offset))
    if expected is None or _checksum(file, info) != expected:
        raise CheckpointError(
            f"{where} is not what was written (bytes {info.offset} to {end}); take another checkpoint"
        )


def find_damage(path: Path, *, share: tuple[int, int] = (0, 1)) -> Iterator[str]:
    """What is wrong with a checkpoint, from its description to every byte of its pieces.

    `share` (number, of how many) says which of its files are read.
    """
    try:
        metadata, checksums = read_whole_description(path)
        infos = sorted(metadata.storage_data.values(), key=lambda info: (info.relative_path, info.offset))
        files = [(name, list(pieces)) for name, pieces in groupby(infos, key=lambda info: info.relative_path)]
        for name, pieces in files[share[0] :: share[1]]:
            with open(find_inside(path, name), "rb") as file:
                for info in pieces:
                    check_piece(path, file, info, checksums)
                    if checksums is None:
                        part = cast("IO[bytes]", FilePart(file, info.offset, info.length))
                        check_archive(part, check_crc=True)
    except CheckpointError as error:
        text = str(error)
        yield text if str(path) in text else f"checkpoint {path} is damaged: {text}"
    except OSError as error:
        yield f"checkpoint {path} can't be read: {error.strerror or error}"


def _checksum(file: IO[bytes], info: StorageInfo) -> int:
    file.seek(info.offset)
    checksum, left = 0, info.length
    while left:
        block = file.read(min(left, _BLOCK))
        if not block:
            return -1  # the file ends too early
        checksum = zlib.crc32(block, checksum)
        left -= len(block)
    return checksum
