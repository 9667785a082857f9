"""Who holds what: maps of drawn layouts agree with the layouts' own arithmetic, and pictures show all of it."""

import inspect
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings, strategies as st
from torch.distributed.tensor.debug import visualize_sharding as reference

from longmesh.debug import visualize_sharding
from longmesh.debug.shard_map import panels, shard_map
from longmesh.debug.shard_picture import Picture, draw_shards, to_svg, write_picture
from longmesh.debug.visualize import render_text
from longmesh.errors import LongmeshError
from longmesh.spec import Layout, MeshShape, Partial, Replicate, Shard
from support.layouts import layouts, meshes, shapes

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def maps(draw):
    mesh = draw(meshes())
    shape = draw(shapes(max_dims=4))
    layout = draw(layouts(mesh, len(shape)))
    return shard_map(layout, shape, range(mesh.num_ranks))


@given(maps())
@settings(max_examples=100)
def test_every_element_has_its_holders_and_every_rank_its_piece(held):
    layout, mesh = held.layout, held.layout.mesh
    volume = sum(math.prod(b - a for a, b in piece.box) for piece in held.pieces)
    assert volume == math.prod(held.shape)
    seen = sorted([r for p in held.pieces for terms in p.copies for r in terms] + list(held.empty_ranks))
    assert seen == list(range(mesh.num_ranks))
    for rank, coordinate in enumerate(mesh.coordinates()):
        starts, lengths = (
            layout.local_offset(held.shape, coordinate),
            layout.local_shape(held.shape, coordinate),
        )
        if 0 in lengths:
            assert rank in held.empty_ranks
            continue
        box = tuple((a, a + n) for a, n in zip(starts, lengths, strict=True))
        (piece,) = [p for p in held.pieces if p.box == box]
        assert any(rank in terms for terms in piece.copies)


@given(maps())
@settings(max_examples=60)
def test_every_piece_is_drawn_once(held):
    shown = [number for panel in panels(held) for row in panel.cells for number in row]
    assert sorted(shown) == list(range(len(held.pieces)))
    root = ET.fromstring(to_svg(draw_shards(held, "weights <1>")))
    tips = [t.text for rect in root.iter(f"{SVG}rect") for t in rect.iter(f"{SVG}title")]
    assert len(tips) == len(held.pieces)
    texts = [t.text for t in root.iter(f"{SVG}text")]
    assert texts[0] == "weights <1>"
    for piece in held.pieces:
        assert piece.ranks in texts
    for line in held.summary:
        assert line in texts
    width, height = float(root.get("width")), float(root.get("height"))
    for rect in list(root.iter(f"{SVG}rect"))[1:]:
        assert float(rect.get("x")) + float(rect.get("width")) <= width
        assert float(rect.get("y")) + float(rect.get("height")) <= height


def test_uneven_and_empty_shards_in_the_terminal():
    held = shard_map(Layout(MeshShape((4,), ("tp",)), [Shard(0)]), (5, 2), range(4))
    text = render_text(held, "w", use_rich=False)
    assert "shape (5, 2), S(0) on MeshShape(tp=4)" in text
    assert "hold nothing: rank 3" in text
    for row in ("[0:2)", "[2:4)", "[4:5)"):
        assert row in text
    assert "\x1b[" not in text
    assert "\x1b[" in render_text(held, "w", use_rich=True)


def test_wide_meshes_are_shown_in_full():
    held = shard_map(Layout(MeshShape((64,)), [Shard(0)]), (128,), range(64))
    text = render_text(held, "", use_rich=False)
    assert "dim 0 [126:128)" in text and " 63 " in text and "…" not in text
    assert max(map(len, text.splitlines())) < 2000


def test_copies_and_pending_terms_are_told_apart():
    mesh = MeshShape((2, 2), ("dp", "tp"))
    held = shard_map(Layout(mesh, [Replicate(), Partial()]), (3,), range(4))
    assert [p.ranks for p in held.pieces] == ["0+1, 2+3"]
    assert "pending on axis 'tp'" in render_text(held, "", use_rich=False)
    assert [p.ranks for p in shard_map(Layout(mesh, [Shard(0), Replicate()]), (3,), range(4)).pieces] == [
        "0, 1",
        "2, 3",
    ]


def test_shard_order_decides_who_holds_what():
    mesh = MeshShape((2, 2))
    turned = shard_map(Layout(mesh, [Shard(0), Shard(0)], [(0, (1, 0))]), (4,), range(4))
    assert [(p.box, p.ranks) for p in turned.pieces] == [
        (((0, 1),), "0"),
        (((1, 2),), "2"),
        (((2, 3),), "1"),
        (((3, 4),), "3"),
    ]


def test_three_cut_dims_are_panels():
    mesh = MeshShape((2, 2, 2))
    held = shard_map(Layout(mesh, [Shard(0), Shard(2), Shard(3)]), (4, 7, 6, 2), range(8))
    found = panels(held)
    assert [p.title for p in found] == ["dim 0 [0:2), dim 1 [0:7)", "dim 0 [2:4), dim 1 [0:7)"]
    assert (found[0].row_dim, found[0].col_dim, found[0].rows) == (2, 3, ((0, 3), (3, 6)))


def test_scalars_and_tensors_without_elements():
    mesh = MeshShape((2,))
    assert "0, 1" in render_text(shard_map(Layout(mesh, [Replicate()]), (), range(2)), "", use_rich=False)
    nothing = shard_map(Layout(mesh, [Shard(0)]), (0, 3), range(2))
    assert nothing.empty_ranks == (0, 1)
    assert "no elements" in render_text(nothing, "", use_rich=False)
    assert "no elements" in to_svg(draw_shards(nothing))


def test_torchs_arguments_come_first():
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (visualize_sharding, reference))
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [
        (p.name, p.default, p.kind) for p in theirs
    ]


def test_other_kinds_of_file_are_refused(tmp_path):
    for suffix in ("pdf", "png"):
        with pytest.raises(LongmeshError, match=rf"a picture is written as \.svg, not as '\.{suffix}'"):
            write_picture(Picture(1, 1, ()), tmp_path / f"x.{suffix}")
