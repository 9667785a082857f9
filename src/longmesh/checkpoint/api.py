"""save, load, save_safetensors, load_safetensors."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from longmesh.checkpoint.directory_reader import DirectoryReader
from longmesh.checkpoint.directory_writer import DirectoryWriter
from longmesh.checkpoint.disk import readable_path, remove, staging_path
from longmesh.checkpoint.pieces import Allowed, find_not_allowed
from longmesh.checkpoint.planner import LoadPlanner, SavePlanner
from longmesh.checkpoint.safetensors_reader import SafetensorsReader, find_missing_library
from longmesh.checkpoint.safetensors_writer import SafetensorsWriter
from longmesh.comm.world import World
from longmesh.errors import CheckpointError, LongmeshError

_PathLike = str | os.PathLike[str]


class CheckpointCall(NamedTuple):
    """The arguments that must be the same on every rank; the state is each rank's own."""

    function: str
    path: str
    options: tuple[object, ...] = ()


def save(state_dict: dict[str, Any], path: _PathLike) -> None:
    """Write a state dict (DTensors, tensors, plain values, nested) as the checkpoint directory `path`.

    Each rank writes the shards it holds, replicas only once, one piece in memory at a time. What was at `path` stays
    until everything is on disk, and is then replaced in one step. Collective: every rank of the world.

    >>> model = nn.Linear(3, 2)
    >>> save({"model": model.state_dict(), "step": 100}, "run")
    >>> sorted(path.name for path in Path("run").iterdir())
    ['.longmesh.json', '.metadata', '__0_0.distcp', '__1_0.distcp']
    """
    _agree(CheckpointCall("save", str(path)), find_no_state(state_dict))
    _save(state_dict, Path(path), DirectoryWriter(Path(path)), SavePlanner())


def load(state_dict: dict[str, Any], path: _PathLike, *, allow: Allowed = ()) -> None:
    """Read the checkpoint `path` into `state_dict`: tensors in place, other values replaced.

    `state_dict` says what to read and into which layouts. Layouts, mesh and number of ranks may differ from those of
    the save. Nothing in a checkpoint is run: tensors, numbers, strings and containers of them are read, and
    an object of any other class is refused, by its name, unless `allow` has the class. Collective: every rank of the
    world.

    >>> save({"x": distribute_tensor(torch.arange(5.0), mesh, [Shard(0)]), "step": 3}, "latest")
    >>> state = {"x": zeros(5, device_mesh=mesh, placements=[Replicate()]), "step": 0}
    >>> load(state, "latest")
    >>> state["x"].to_local(), state["step"]
    (tensor([0., 1., 2., 3., 4.]), 3)
    """
    problem = find_not_allowed(allow)
    names = () if problem else tuple(f"{item.__module__}.{item.__qualname__}" for item in allow)
    _agree(CheckpointCall("load", str(path), names), problem or find_no_state(state_dict))
    target = readable_path(Path(path))
    _load(state_dict, target, DirectoryReader(target, allow))


def save_safetensors(
    state_dict: dict[str, Any], path: _PathLike, *, max_file_bytes: int = 5_000_000_000
) -> None:
    """Write a state dict of tensors as safetensors: the file `path` if it ends in .safetensors, else a directory.

    A directory gets files of at most `max_file_bytes` (unless one tensor is larger) and Hugging Face's index. Tensors
    are whole in the files whatever their layouts; nothing is gathered, each rank writes its part in place.
    Replaced in one step, as by `save`. Collective: every rank of the world.

    >>> save_safetensors({"w": distribute_tensor(torch.ones(5), mesh, [Shard(0)])}, "w.safetensors")
    >>> from safetensors.torch import load_file
    >>> load_file("w.safetensors")
    {'w': tensor([1., 1., 1., 1., 1.])}
    """
    problem = find_missing_library()
    if not isinstance(max_file_bytes, int) or max_file_bytes < 1:
        problem = CheckpointError(
            f"save_safetensors(max_file_bytes={max_file_bytes}): give a positive number of bytes"
        )
    _agree(
        CheckpointCall("save_safetensors", str(path), (max_file_bytes,)), problem or find_no_state(state_dict)
    )
    target = Path(path)
    limit = None if target.suffix == ".safetensors" else max_file_bytes
    _save(state_dict, target, SafetensorsWriter(target, limit), SavePlanner(tensors_only=True))


def load_safetensors(state_dict: dict[str, Any], path: _PathLike) -> None:
    """Read a safetensors file, or a directory of them, into the tensors of `state_dict`, in place.

    Each rank reads its own parts and nothing is sent. Collective: every rank of the world.

    >>> save_safetensors({"w": torch.arange(4.0)}, "model.safetensors")
    >>> state = {"w": zeros(4, device_mesh=mesh, placements=[Shard(0)])}
    >>> load_safetensors(state, "model.safetensors")
    >>> state["w"].to_local()
    tensor([0., 1.])
    """
    _agree(CheckpointCall("load_safetensors", str(path)), find_missing_library() or find_no_state(state_dict))
    target = readable_path(Path(path))
    _load(state_dict, target, SafetensorsReader(target))


def find_no_state(state_dict: Any) -> CheckpointError | None:
    """An error for all ranks if it is no state dict: a rank that raised alone would leave the others waiting."""
    what = f"a {type(state_dict).__name__}"
    if isinstance(state_dict, Mapping):
        kinds = sorted({type(key).__name__ for key in state_dict})
        if len(kinds) < 2:
            return None
        what = f"a dict whose keys are of several types ({', '.join(kinds)})"
    return CheckpointError(
        f"the state of a checkpoint is {what}; give a dict of tensors, plain values and dicts or lists of them, e.g. "
        "{'model': model.state_dict()}"
    )


def _agree(call: CheckpointCall, problem: LongmeshError | None = None) -> None:
    """Go on on all ranks, or raise on all: one that is called otherwise would leave the others waiting."""
    World().agree(f"checkpoint.{call.function}", call, problem)


def _save(state_dict: dict[str, Any], target: Path, writer: Any, planner: SavePlanner) -> None:
    with told_clearly(f"saving {target}"):
        try:
            dcp.save(state_dict, storage_writer=writer, planner=planner)
        except CheckpointException:
            if not dist.is_initialized() or dist.get_rank() == 0:
                remove(staging_path(target))
            raise


def _load(state_dict: dict[str, Any], path: Path, reader: Any) -> None:
    with told_clearly(f"loading {path}"):
        dcp.load(state_dict, storage_reader=reader, planner=LoadPlanner(str(path), reader))


@contextlib.contextmanager
def told_clearly(doing: str) -> Iterator[None]:
    """One error for what failed on some ranks, the same on all of them."""
    try:
        with warnings.catch_warnings():
            # One process needs no process group, and none is asked for.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninit")
            yield
    except CheckpointException as error:
        told: dict[str, list[int]] = {}
        for rank, (cause, _) in sorted(error.failures.items()):
            own = isinstance(cause, CheckpointError)
            told.setdefault(str(cause) if own else f"{doing}: {type(cause).__name__}: {cause}", []).append(
                rank
            )
        everywhere = len(told) == 1 and len(error.failures) == _world_size()
        lines = [text if everywhere else f"{_ranks(ranks)}: {text}" for text, ranks in told.items()]
        raise CheckpointError("\n".join(lines)) from error


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
