"""Checkpoints that are damaged, or whose descriptions do not fit what is there."""

import io
import os
import random
import shutil
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from longmesh.checkpoint import load
from longmesh.checkpoint.description import find_bad_boxes
from longmesh.errors import CheckpointError
from support.checkpoints import archive_of, edit_metadata, replace_piece, save_one, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# -- sizes -------------------------------------------------------------------------------------------


def set_size(metadata, size):
    metadata.state_dict_metadata["w"].size = torch.Size(size)


def set_chunk(metadata, offsets, sizes):
    metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))]


def set_infos(metadata, **values):
    for info in metadata.storage_data.values():
        for name, value in values.items():
            setattr(info, name, value)


PETABYTE = 1 << 50
DESCRIPTIONS = {
    "no boxes": (lambda m: set_chunk(m, [0, 0], [2, 3]), "the pieces of 'w' have 6 elements, and it has 12"),
    "beyond": (lambda m: set_chunk(m, [1, 0], [4, 3]), r"reach beyond it: one of \(4, 3\) at \(1, 0\) in \(4, 3\)"),
    "other dims": (lambda m: set_chunk(m, [0], [12]), r"reach beyond it: one of \(12,\)"),
    "huge": (lambda m: set_size(m, [PETABYTE, 3]), r"the pieces of 'w' have 12 elements"),
    "huge, all of it": (
        lambda m: (set_size(m, [PETABYTE, 3]), set_chunk(m, [0, 0], [PETABYTE, 3]))[0],
        r"'w' has shape \(4, 3\) here and \(1125899906842624, 3\) there",
    ),
    "length": (lambda m: set_infos(m, length=PETABYTE), r"was cut off: a piece ends at byte \d+ of \d+"),
    "offset": (lambda m: set_infos(m, offset=PETABYTE), r"was cut off: a piece ends at byte \d+ of \d+"),
    "negative": (lambda m: set_infos(m, offset=-1), "-1 is not a size or offset"),
    "no number": (lambda m: set_infos(m, offset="7"), "'7' is not a size or offset"),
    "no path": (lambda m: set_infos(m, relative_path=7), "the name of a file is a int"),
    "no file": (lambda m: set_infos(m, relative_path="gone"), "is damaged: gone is missing"),
    "changed": (lambda m: set_infos(m, transform_descriptors=["zstd"]), r"its pieces went through \['zstd'\]"),
    "no pieces": (lambda m: m.storage_data.clear(), "no file has the piece of '"),
    "nothing": (lambda m: Metadata({}, storage_data={}), "'step' is not in it"),
    "another thing": (lambda m: {"a": 1}, "where Metadata should be there is dict"),
    "no list": (lambda m: setattr(m, "storage_data", None), "the list of pieces is a NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_descriptions_that_do_not_fit_are_refused(tmp_path, kind):
    change, text = DESCRIPTIONS[kind]
    path = tmp_path / "run"
    save_one(path, by_torch=True)
    edit_metadata(path, lambda m: change(m) if kind in ("nothing", "another thing") else (change(m), None)[1])
    with pytest.raises(CheckpointError, match=text):
        load(state(), path)


def test_a_piece_of_another_shape_or_type_is_refused(tmp_path):
    path = tmp_path / "run"
    for other in (torch.ones(3, 4), torch.ones(4, 3, dtype=torch.float64), "text"):
        save_one(path)
        replace_piece(path, "w", archive_of(other))
        with pytest.raises(
            CheckpointError, match=r"__9_0.distcp holds something else than \(4, 3\) of torch.float32"
        ):
            load(state(), path)


def test_an_archive_that_claims_more_than_it_has_is_refused(tmp_path):
    """Compressed entries are how a small file asks for a large memory."""
    path = tmp_path / "run"
    save_one(path)
    plain = zipfile.ZipFile(io.BytesIO(archive_of(torch.zeros(1 << 20))))
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    replace_piece(path, "w", bomb.getvalue())
    with pytest.raises(
        CheckpointError, match=r"__9_0.distcp can't be read \('archive/.*' in it claims \d+ bytes of \d+\)"
    ):
        load(state(), path)


@st.composite
def tilings(draw):
    """A tensor's size and boxes that fill it."""
    size = draw(st.lists(st.integers(0, 5), min_size=0, max_size=3))
    boxes = [([0] * len(size), list(size))]
    for _ in range(draw(st.integers(0, 5))):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [d for d, n in enumerate(sizes) if n > 1]
        if not dims:
            boxes.append((offsets, sizes))
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, sizes[dim] - 1))
        first, second = list(sizes), list(sizes)
        first[dim], second[dim] = at, sizes[dim] - at
        moved = list(offsets)
        moved[dim] += at
        boxes += [(offsets, first), (moved, second)]
    return size, draw(st.permutations(boxes))


@given(tilings(), st.data())
def test_boxes_that_fill_a_tensor_and_those_that_do_not(tiling, data):
    size, boxes = tiling
    assert find_bad_boxes(size, boxes) is None
    if boxes and all(n > 0 for n in size) and size:
        number = data.draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes[number]
        dim = data.draw(st.integers(0, len(size) - 1))
        moved = list(offsets)
        moved[dim] += data.draw(st.sampled_from([1, 2]))
        changed = [*boxes[:number], (moved, sizes), *boxes[number + 1 :]]
        filled = torch.zeros(size)
        inside = all(a + n <= full for a, n, full in zip(moved, sizes, size, strict=True))
        for at, extent in changed:
            filled[tuple(slice(a, a + n) for a, n in zip(at, extent, strict=True))] += 1
        assert (find_bad_boxes(size, changed) is None) == (inside and bool((filled == 1).all()))


# -- damage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(tmp_path, by_torch):
    """In a checkpoint of torch's, too: its pieces have checksums in their archives."""
    keep, path = tmp_path / "keep", tmp_path / "run"
    save_one(keep, by_torch=by_torch)
    rng = random.Random(0)
    refused = 0
    for file in sorted(p.name for p in keep.iterdir()):
        size = (keep / file).stat().st_size
        for at in sorted(rng.sample(range(size), min(size, 60))):
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(keep, path)
            data = bytearray((path / file).read_bytes())
            data[at] ^= 1 << rng.randrange(8)
            (path / file).write_bytes(data)
            found = state()
            try:
                load(found, path)
            except CheckpointError:
                refused += 1
            else:
                assert found["w"].tolist() == torch.arange(12.0).view(4, 3).tolist(), (file, at)
                assert found["step"] == 7, (file, at)
    assert refused > (100 if not by_torch else 40)


@pytest.mark.parametrize("by_torch", [False, True])
def test_a_file_that_is_cut_off_anywhere_is_an_error(tmp_path, by_torch):
    keep, path = tmp_path / "keep", tmp_path / "run"
    save_one(keep, by_torch=by_torch)
    for file in sorted(p.name for p in keep.iterdir()):
        size = (keep / file).stat().st_size
        for length in {0, 1, size // 2, size - 1}:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(keep, path)
            os.truncate(path / file, length)
            with pytest.raises(CheckpointError, match=r"is damaged|is refused"):
                load(state(), path)


def test_a_damaged_list_of_checksums_is_told(tmp_path):
    path = tmp_path / "run"
    save_one(path)
    (path / ".longmesh.json").write_text('{"crc32": {"__0_0.distcp": {"0": "x"}}}')
    with pytest.raises(
        CheckpointError, match=r"its checksums, .longmesh.json, can't be read \(a checksum is not a number"
    ):
        load(state(), path)
    save_one(path)
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes() + b" ")
    with pytest.raises(CheckpointError, match=r"is damaged: .metadata is not what was written"):
        load(state(), path)
    save_one(path)
    (path / ".longmesh.json").write_text('{"crc32": {}}')
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is not what was written"):
        load(state(), path)


def test_torch_reads_ours_with_the_mark(tmp_path):
    save_one(tmp_path / "run")
    found = {"w": torch.zeros(4, 3)}
    dcp.load(found, checkpoint_id=tmp_path / "run")
    assert found["w"].sum() == 66


def test_a_piece_without_checksums_is_read(tmp_path):
    """torch can be told to write none."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_one(tmp_path / "run", by_torch=True)
    finally:
        torch.serialization.set_crc32_options(before)
    load(found := state(), tmp_path / "run")
    assert found["w"].sum() == 66
