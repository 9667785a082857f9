"""Checkpoints that are made up or damaged: nothing in them runs, is believed about sizes, or leads out of them."""

import contextlib
import copyreg
import json
import os
import pickle
import random
import shutil
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st

from longmesh.checkpoint import Directory, load, save
from longmesh.checkpoint.description import read_description
from longmesh.checkpoint.pickled import NotPlain, decode
from longmesh.errors import CheckpointError, LongmeshError
from support.checkpoints import archive_of, edit_metadata, replace_piece, save_one, state, write_metadata
from support.hostile_files import pickled_piece

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "it-ran"


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


# -- what is run -------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_description_does_not_run(tmp_path, ran, protocol):
    path = tmp_path / "run"
    save_one(path)
    write_metadata(path, pickle.dumps(Hostile(ran), protocol=protocol))
    with pytest.raises(CheckpointError, match=r"its description can't be read \(it "):
        load(state(), path)
    assert not ran.exists()
    if protocol > 1:
        with pytest.raises(CheckpointError, match=r"names posix.system, which no description .* was run"):
            load(state(), path)


def test_a_hostile_value_inside_a_description_does_not_run(tmp_path, ran):
    path = tmp_path / "run"
    for place in ("planner_data", "version", "storage_meta", "storage_data"):
        save_one(path)
        edit_metadata(path, lambda metadata, place=place: setattr(metadata, place, Hostile(ran)))
        with pytest.raises(CheckpointError, match=r"names posix\.system"):
            load(state(), path)
    assert not ran.exists()


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("name", ["w", "step"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_piece_does_not_run(tmp_path, ran, by_torch, name, protocol):
    path = tmp_path / "run"
    save_one(path, by_torch=by_torch)
    replace_piece(path, name, archive_of([1, Hostile(ran)], protocol))
    text = (
        rf"checkpoint {path} is refused: '{name}' contains posix.system, and loading that could run any "
        r"code; if you trust it, name it in load\(..., allow=\[...\]\)"
    )
    with pytest.raises(CheckpointError, match=text):
        load(state(), path)
    assert not ran.exists()


def test_a_bare_pickle_for_a_piece_does_not_run(tmp_path, ran):
    path = tmp_path / "run"
    for name in ("w", "step"):
        save_one(path)
        replace_piece(path, name, pickle.dumps(Hostile(ran)))
        with pytest.raises(
            CheckpointError, match=r"is damaged: __9_0.distcp can't be read \(File is not a zip file\)"
        ):
            load(state(), path)
    assert not ran.exists()


@dataclass
class Progress:
    epoch: int
    note: str = "x"


class Phase(Enum):
    WARM = 1


def test_a_class_is_read_only_if_it_is_allowed(tmp_path):
    save({"progress": Progress(3), "phase": Phase.WARM}, tmp_path / "run")
    found = {"progress": None, "phase": None}
    with pytest.raises(
        CheckpointError, match=rf"'p\w+' contains {__name__}\.P\w+, and loading that could run any code"
    ):
        load(found, tmp_path / "run")
    with pytest.raises(CheckpointError, match=rf"'phase' contains {__name__}\.Phase"):
        load(found, tmp_path / "run", allow=[Progress])
    assert found["phase"] is None
    load(found, tmp_path / "run", allow=[Progress, Phase])
    assert found == {"progress": Progress(3), "phase": Phase.WARM}
    assert not {Progress, Phase} & set(torch.serialization.get_safe_globals()), "allowed for one call"


def test_what_can_not_be_allowed(tmp_path):
    with pytest.raises(LongmeshError, match=r"takes classes, got 'Progress'; write e.g. allow=\[MyClass\]"):
        load({}, tmp_path, allow=["Progress"])
    with pytest.raises(LongmeshError, match=r"posix.system is never allowed; a checkpoint has no use for it"):
        load({}, tmp_path, allow=[os.system])


def test_a_class_that_the_caller_has_told_torch_of_stays_allowed(tmp_path):
    save({"progress": Progress(3)}, tmp_path / "run")
    with torch.serialization.safe_globals([Progress]):
        load(found := {"progress": None}, tmp_path / "run", allow=[Progress])
        assert Progress in torch.serialization.get_safe_globals()
    assert found["progress"] == Progress(3)


VALUES = {
    "numbers": [1, -2.5, True, None, 1 << 80, 2 + 3j, float("inf")],
    "text": ["a", "ä", b"bytes", bytearray(b"x")],
    "containers": [[(1, [2])], {3, 4}, frozenset([5]), range(3), slice(1, None)],
    "torch": [torch.float32, torch.device("cpu"), torch.Size([1]), (torch.ones(2, dtype=torch.bfloat16),)],
    "numpy": [np.float64(2.5), np.int32(3), np.arange(4.0), np.arange(6, dtype=np.uint32).reshape(2, 3)],
    "random": [random.Random(3).getstate(), np.random.RandomState(0).get_state()],
}


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("kind", VALUES)
def test_plain_values_are_read(tmp_path, kind, by_torch):
    values = dict(enumerate(VALUES[kind]))
    write = (lambda s, p: dcp.save(s, checkpoint_id=p)) if by_torch else save
    write({"value": values}, tmp_path / "run")
    found = {"value": {key: [None] if isinstance(value, list) else None for key, value in values.items()}}
    load(found, tmp_path / "run")
    assert repr(found["value"]) == repr(values)


def test_the_description_that_torch_writes_is_read_in_full(tmp_path):
    """Our reading of `.metadata` beside pickle's own."""
    values = {
        "a": {"w": torch.ones(3, 2), "n": [1, torch.ones(())]},
        "b": torch.ones(0, 2).to(torch.bfloat16),
        "s": "x",
    }
    for name, write in [
        ("theirs", lambda p: dcp.save(values, checkpoint_id=p)),
        ("ours", lambda p: save(values, p)),
    ]:
        write(tmp_path / name)
        data = (tmp_path / name / ".metadata").read_bytes()
        expected, found = pickle.loads(data), read_description(data)
        assert found.state_dict_metadata == expected.state_dict_metadata
        assert found.storage_data == expected.storage_data


def test_a_decoded_pickle_is_plain():
    for protocol in (2, 3, 4, 5):
        value = {"a": [1, 2.5, "x", (3, None, True)], "many": list(range(300)), "big": 1 << 3000}
        assert decode(pickle.dumps(value, protocol=protocol)).value == value
        point, names = decode(pickle.dumps(Progress(3), protocol=protocol))
        assert point.state == {"epoch": 3, "note": "x"}
        assert names[-1] == f"{__name__}.Progress"


OPCODES = [
    (b"cos\nsystem\n.", None),  # a bare name is no call
    (b"\x80\x02]q\x00K\x01b.", "gives a state to what is not an object"),
    (b"\x80\x02K\x01)R.", "calls what is not named"),
    (b"\x80\x02}K\x01a.", "appends to what is not a list"),
    (b"\x80\x02]K\x01K\x02s.", "sets items of what is not a dict"),
    (b"\x80\x02K\x01K\x02\x93.", "makes up the name of a class"),
    (b"\x80\x02\x82\x01.", "has the instruction EXT1"),
    (b"\x80\x02U\x01aQ.", "has the instruction"),
    (b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x00.", "not a pickle of plain values"),
    (b"\x80\x02\x8b\xff\xff\xff\x7f.", "not a pickle of plain values"),
    (b"\x80\x02r\xff\xff\xff\xff.", "not a pickle of plain values"),
    (b"\x80\x02K\x01", "not a pickle of plain values"),
    (b"", "not a pickle of plain values"),
]


@pytest.mark.parametrize(("data", "text"), OPCODES)
def test_odd_pickles(data, text):
    if text is None:
        assert decode(data).names == ["os.system"]
    else:
        with pytest.raises(NotPlain, match=text):
            decode(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_plain_or_refused(data):
    with contextlib.suppress(NotPlain):
        decode(data)
    with pytest.raises(NotPlain):
        read_description(data)


# A tuple of the one before, twice, 200 times: 2 ** 200 values for whoever asks for its hash.
LAUGHING = b")q\x00" + b"h\x00\x86q\x00" * 200


@pytest.mark.parametrize(
    "data", [b"\x80\x02}" + LAUGHING + b"Ns.", b"\x80\x02cbuiltins\nset\n]" + LAUGHING + b"a\x85R."]
)
def test_values_that_share_themselves_do_not_keep_anybody_busy(tmp_path, data):
    path = tmp_path / "run"
    save_one(path)
    replace_piece(path, "step", pickled_piece(data, random.Random(1)))
    with pytest.raises(CheckpointError, match=r"can't be read \(it has a tuple in itself again and again"):
        load(state(), path)
    write_metadata(path, data)
    with pytest.raises(CheckpointError, match=r"its description can't be read \(it has a tuple in itself"):
        load(state(), path)


def test_tuples_that_are_shared_a_few_times_are_read(tmp_path):
    shared = (1, (2, 3))
    value = ({(shared, number): [shared] * 100 for number in range(100)},)
    save({"x": value}, tmp_path / "run")
    load(found := {"x": None}, tmp_path / "run")
    assert found["x"] == value


@pytest.mark.parametrize("name", [".metadata", ".longmesh.json"])
def test_a_description_that_has_no_end_is_not_read(tmp_path, name):
    directory = Directory(tmp_path)
    for step in (1, 2):
        directory.save({"x": torch.full((2,), float(step))}, step)
    directory.flush()
    path = tmp_path / "step-00000002"
    os.truncate(path / name, 1 << 40)
    told = (
        f"{path} is refused: {name} has 1,099,511,627,776 bytes, and a description has at most 1,073,741,824"
    )
    with pytest.raises(CheckpointError, match=told):
        load({"x": torch.zeros(2)}, path)
    lines = []
    assert Directory(tmp_path, tell=lines.append).load_latest({"x": torch.zeros(2)}) == 1
    assert lines == [f"checkpoint {told}; step 1 is used instead"]


# -- paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("kind", ["up", "absolute", "link", "inner link", "pipe"])
def test_files_outside_of_the_directory_are_refused(tmp_path, by_torch, kind):
    path = tmp_path / "run"
    save_one(path, by_torch=by_torch)
    outside = tmp_path / "outside.distcp"
    inside = path / "__0_0.distcp"
    shutil.copy(inside, outside)
    names = {
        "up": "../outside.distcp",
        "absolute": str(outside),
        "link": "link",
        "inner link": "link",
        "pipe": "pipe",
    }
    (path / "link").symlink_to(inside if kind == "inner link" else outside)
    os.mkfifo(path / "pipe")

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = names[kind]

    edit_metadata(path, change)
    checksums = path / ".longmesh.json"
    if checksums.exists():
        found = json.loads(checksums.read_text())
        found["crc32"] = {names[kind]: found["crc32"]["__0_0.distcp"]}
        checksums.write_text(json.dumps(found))
    texts = {
        "up": r"is refused: its index names '../outside.distcp', which is outside of its directory",
        "absolute": r"is refused: its index names '/.*', which is outside of its directory",
        "link": r"is refused: its file 'link' is a link to .*outside.distcp, which is outside of its directory; copy",
        "pipe": r"is refused: 'pipe' is not a regular file",
    }
    if kind in texts:
        with pytest.raises(CheckpointError, match=texts[kind]):
            load(state(), path)
    else:
        load(found := state(), path)
        assert found["w"].sum() == 66


def test_links_that_go_round_are_told(tmp_path):
    save_one(tmp_path / "run")
    (tmp_path / "run" / ".metadata").unlink()
    (tmp_path / "run" / ".metadata").symlink_to(".metadata")
    with pytest.raises(CheckpointError, match=r"'.metadata' can't be followed|can't be read: .metadata"):
        load(state(), tmp_path / "run")


def test_a_link_to_a_whole_checkpoint_is_followed(tmp_path):
    save_one(tmp_path / "step-1")
    (tmp_path / "latest").symlink_to("step-1")
    load(found := state(), tmp_path / "latest")
    assert found["step"] == 7


def test_code_that_an_extension_registry_names_does_not_run(tmp_path, ran):
    """copyreg's numbers stand for classes that a process has registered: not used by any checkpoint."""
    path = tmp_path / "run"
    save_one(path)
    copyreg.add_extension(__name__, "Hostile", 240)
    try:
        write_metadata(path, b"\x80\x02\x82\xf0)R.")
        with pytest.raises(CheckpointError, match="has the instruction EXT1"):
            load(state(), path)
    finally:
        copyreg.remove_extension(__name__, "Hostile", 240)


def test_nothing_in_the_package_unpickles_a_checkpoint_freely():
    import longmesh.checkpoint as package

    sources = [p.read_text() for p in Path(package.__file__).parent.glob("*.py")]
    assert len(sources) > 8
    assert not [s for s in sources if "pickle.load" in s or "weights_only=False" in s]
