"""Our safetensors files beside those of its own library, and damaged ones."""

import json
import os
import shutil
import struct
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from longmesh.checkpoint import load_safetensors, save_safetensors
from longmesh.checkpoint.safetensors_reader import read_stored
from longmesh.checkpoint.safetensors_writer import box_runs
from longmesh.errors import CheckpointError, LongmeshError

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.bool,
    torch.complex64,
)  # fmt: skip


def state():
    values = torch.arange(15).view(3, 5)
    found = {f"t.{str(dtype)[6:]}": (values % 2).to(dtype) for dtype in DTYPES}
    return found | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "part": torch.arange(10.0)[3:7],
        "odd": torch.ones(3, dtype=torch.bool),
        "nested": {"w": torch.ones(2, 2)},
    }


def flat(values):
    nested = values.pop("nested")
    return values | {"nested.w": nested["w"]}


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def bytes_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("max_file_bytes", [None, 1, 100])
def test_the_library_reads_what_we_write(tmp_path, max_file_bytes):
    whole, name = state(), "m.safetensors" if max_file_bytes is None else "m"
    options = {} if max_file_bytes is None else {"max_file_bytes": max_file_bytes}
    save_safetensors(whole, tmp_path / name, **options)
    found = {}
    for file in (tmp_path / name).glob("*.safetensors") if max_file_bytes else [tmp_path / name]:
        found |= load_file(file)
        with safe_open(file, "pt") as handle:
            assert handle.metadata() == {"format": "pt"}
    expected = flat(whole)
    assert found.keys() == expected.keys()
    assert all(same(found[k], expected[k]) for k in expected)
    if max_file_bytes:
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in expected.values())
    again = {k: torch.zeros_like(t) for k, t in expected.items()}
    load_safetensors(again, tmp_path / name)
    assert all(same(again[k], expected[k]) for k in expected)


def test_we_read_what_the_library_writes(tmp_path):
    expected = {k: t.contiguous().clone() for k, t in flat(state()).items()}
    save_file(expected, tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", tmp_path):
        found = {k: torch.zeros_like(t) for k, t in expected.items()}
        load_safetensors(found, path)
        assert all(same(found[k], expected[k]) for k in expected)


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    cuts = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return shape, [a for a, _ in cuts], [b - a for a, b in cuts]


@given(boxes(), st.sampled_from([1, 4]))
@settings(max_examples=100)
def test_the_bytes_of_a_box(box, itemsize):
    shape, offsets, sizes = box
    ids = torch.arange(torch.Size(shape).numel() * itemsize).view(*shape, itemsize)
    part = ids[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))]
    starts, length = box_runs(shape, offsets, sizes, itemsize)
    assert [at + i for at in starts for i in range(length)] == part.reshape(-1).tolist()


def header(entries, data=b""):
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = [
    (b"", "header too small"),
    (b"\xff" * 8 + b"{}", "header too large"),
    (struct.pack("<Q", 1 << 50) + b"{}", "header too large"),
    (struct.pack("<Q", 2) + b"[}", "invalid JSON in header"),
    (header({"a": ENTRY}, b"1234"), "incomplete metadata, file not fully covered"),
    (header({"a": ENTRY | {"dtype": "F99"}}, b"12345678"), "unknown variant `F99`"),
    (header({"a": ENTRY | {"shape": [3]}}, b"12345678"), "invalid shape, data type, or offset for tensor"),
    (
        header({"a": ENTRY | {"shape": [1 << 50], "data_offsets": [0, 1 << 52]}}, b"12345678"),
        "file not fully covered",
    ),
    (header({"a": ENTRY | {"data_offsets": [-1, 7]}}, b"12345678"), "invalid value: integer `-1`"),
    (header([1]), "invalid JSON in header"),
]


@pytest.mark.parametrize(("content", "text"), DAMAGED)
def test_damaged_files_are_told(tmp_path, content, text):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    text = "m.safetensors is damaged: .*" + text
    with pytest.raises(CheckpointError, match=text):
        read_stored(path)
    with pytest.raises(CheckpointError, match=text):
        load_safetensors({"a": torch.zeros(2)}, path)


def test_bad_directories_are_told(tmp_path):
    with pytest.raises(CheckpointError, match="there is no safetensors file or directory at"):
        load_safetensors({}, tmp_path / "none")
    with pytest.raises(
        CheckpointError, match=r"holds neither model.safetensors.index.json nor model.safetensors"
    ):
        load_safetensors({}, tmp_path)
    save_safetensors({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "m", max_file_bytes=8)
    index = tmp_path / "m" / "model.safetensors.index.json"
    good = index.read_text()
    index.write_text(good.replace('"b"', '"c"'))
    with pytest.raises(CheckpointError, match="'c' is in its index and in none of its files"):
        load_safetensors({"a": torch.ones(2)}, tmp_path / "m")
    index.write_text(good.replace("00002-of", "00009-of"))
    with pytest.raises(CheckpointError, match=r"m is damaged: model-00009-of-00002.safetensors is missing"):
        load_safetensors({"a": torch.ones(2)}, tmp_path / "m")
    index.write_text(good)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    shutil.copy(files[0], files[1])
    both = f"{files[0].name} and {files[1].name}"
    with pytest.raises(CheckpointError, match=f"m is damaged: 'a' is in two of its files, {both}"):
        load_safetensors({"a": torch.ones(2)}, tmp_path / "m")
    os.truncate(index, 1 << 40)
    with pytest.raises(
        CheckpointError, match=r"index.json has 1,099,511,627,776 bytes, and a description has"
    ):
        load_safetensors({"a": torch.ones(2)}, tmp_path / "m")
    index.write_text("{")
    with pytest.raises(CheckpointError, match="it is not an index of safetensors files"):
        load_safetensors({"a": torch.ones(2)}, tmp_path / "m")


def test_an_element_type_that_torch_lacks_is_named(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(header({"a": ENTRY | {"dtype": "F4", "shape": [16]}}, b"12345678"))
    with pytest.raises(CheckpointError, match="'a' has the element type F4, which is not supported"):
        load_safetensors({"a": torch.zeros(2)}, path)


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (save_safetensors, load_safetensors):
        with pytest.raises(LongmeshError, match=r"pip install 'longmesh\[safetensors\]'"):
            call({"a": torch.zeros(2)}, tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", ["../m.safetensors", "{tmp}/m.safetensors", "link.safetensors"])
def test_an_index_does_not_lead_out_of_its_directory(tmp_path, name):
    save_file({"a": torch.ones(2)}, tmp_path / "m.safetensors")
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "link.safetensors").symlink_to(tmp_path / "m.safetensors")
    weights = {"weight_map": {"a": name.format(tmp=tmp_path)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(weights))
    with pytest.raises(CheckpointError, match=r"model is refused: its .*, which is outside of its directory"):
        load_safetensors({"a": torch.zeros(2)}, directory)


def test_links_of_hugging_faces_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "3f2a")
    (snapshot / "model.safetensors").symlink_to("../../blobs/3f2a")
    found = {"a": torch.zeros(2)}
    load_safetensors(found, snapshot)
    assert found["a"].tolist() == [1.0, 1.0]


def test_what_does_not_fit_the_format_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(
        CheckpointError, match=r"holds tensors only, and 'step' is a int; take it out, or use longm"
    ):
        save_safetensors({"w": torch.ones(2), "step": 3}, path)
    with pytest.raises(CheckpointError, match=r"no element type for torch.complex128, which 'z' has"):
        save_safetensors({"z": torch.ones(2, dtype=torch.complex128)}, path)
    with pytest.raises(
        CheckpointError, match=r"save_safetensors\(max_file_bytes=0\): give a positive number"
    ):
        save_safetensors({}, tmp_path / "m", max_file_bytes=0)
    path.mkdir()
    with pytest.raises(CheckpointError, match="is a directory; give the path of a file"):
        save_safetensors({"w": torch.ones(2)}, path)
    assert list(tmp_path.iterdir()) == [path] and not list(path.iterdir()), "nothing is left behind"
