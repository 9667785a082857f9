"""Layouts as values: interned, checked, printable, and right about who holds what."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, strategies as st

from longmesh.errors import LongmeshError
from longmesh.spec import (
    DTensorSpec,
    Layout,
    MaskPartial,
    MeshShape,
    Partial,
    Replicate,
    Shard,
    ShardOrderEntry,
    TensorMeta,
    chunk_interval,
)
from support.layouts import layouts, meshes, shapes

S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
META = TensorMeta(torch.Size((8, 6)), (6, 1), torch.float32)


def test_equal_layouts_are_one_object():
    mesh = MeshShape((2, 2), ("dp", "tp"))
    layout = Layout(mesh, [S0, S0], [(0, (1, 0))])
    assert layout is Layout(
        MeshShape([2, 2], ["dp", "tp"]), (Shard(0), Shard(0)), (ShardOrderEntry(0, (1, 0)),)
    )
    assert layout is not Layout(mesh, [S0, S0])
    assert copy.copy(layout) is copy.deepcopy(layout) is pickle.loads(pickle.dumps(layout)) is layout
    assert copy.deepcopy(mesh) is copy.copy(mesh) is pickle.loads(pickle.dumps(mesh)) is mesh


@pytest.mark.parametrize(
    ("placements", "order", "text"),
    [
        ((S0, S0, R), [(0, (1, 0))], "S(0)[1,0]R"),
        ((S0, S0, R), None, "S(0)[0,1]R"),
        ((S0, R, S0), None, "S(0)[0,2]R"),
        ((S1, S0, Partial("max")), None, "S(1)S(0)P(max)"),
        ((P, MaskPartial(), R), None, "PMaskPR"),
    ],
)
def test_how_it_prints(placements, order, text):
    layout = Layout(MeshShape((2, 3, 4)), placements, order)
    assert str(layout) == text
    assert repr(layout) == f"Layout({text} on MeshShape((2, 3, 4)))"


def test_how_placements_print():
    assert [repr(p) for p in (S0, R, P, MaskPartial())] == [
        "Shard(dim=0)",
        "Replicate()",
        "Partial(sum)",
        "MaskPartial()",
    ]
    assert (
        S0.is_shard()
        and S0.is_shard(0)
        and not S0.is_shard(1)
        and not S0.is_partial()
        and not S0.is_replicate()
    )
    assert (
        R.is_replicate()
        and not R.is_shard()
        and P.is_partial()
        and P.is_partial("sum")
        and not P.is_partial("max")
    )


def test_chunking_is_torchs():
    for size in range(12):
        for parts in range(1, 6):
            lengths = [len(c) for c in torch.arange(size).chunk(parts)] if size else [0]
            lengths += [0] * (parts - len(lengths))
            assert [chunk_interval(size, parts, i)[1] for i in range(parts)] == lengths


@given(st.data())
def test_shards_of_any_order_tile_the_tensor(data):
    mesh = data.draw(meshes())
    shape = data.draw(shapes())
    layout = data.draw(layouts(mesh, len(shape), partials=()))
    count = torch.zeros(shape, dtype=torch.int64)
    for where in mesh.coordinates():
        index = tuple(
            slice(o, o + n)
            for o, n in zip(layout.local_offset(shape, where), layout.local_shape(shape, where), strict=True)
        )
        count[index] += 1
    assert bool((count == mesh.num_ranks // layout.num_shards).all())


@given(st.data())
def test_nested_cuts_cut_the_pieces_in_order(data):
    """Order (1, 0) on a mesh equals order (0, 1) on the mesh with its axes swapped."""
    a, b, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(0, 20))
    turned = Layout(MeshShape((a, b)), (S0, S0), [(0, (1, 0))])
    swapped = Layout(MeshShape((b, a)), (S0, S0))
    for i in range(a):
        for j in range(b):
            assert turned.interval(0, size, (i, j)) == swapped.interval(0, size, (j, i))


def test_a_changed_axis_cuts_innermost():
    layout = Layout(MeshShape((2, 2, 2)), (S0, R, S0))
    assert str(layout.with_placement(1, S0)) == "S(0)[0,2,1]"
    assert str(layout.with_placement(0, P)) == "PRS(0)"


def test_thousands_of_ranks():
    mesh = MeshShape((16, 16, 16), ("pp", "dp", "tp"))
    layout = Layout(mesh, (S0, S0, S1), [(0, (1, 0))])
    assert mesh.num_ranks == 4096
    assert layout.num_shards == 4096
    assert layout.local_shape((1000, 100), (15, 15, 15)) == (0, 0)
    assert layout.local_offset((1000, 100), (1, 0, 3)) == (4, 21)
    assert mesh.index((1, 2, 3)) == list(mesh.coordinates()).index((1, 2, 3))


def test_spec():
    mesh = MeshShape((2, 3))
    spec = DTensorSpec(mesh, (S1, P), META)
    assert spec == DTensorSpec(mesh, [Shard(1), Partial()], META)
    assert hash(spec) == hash(DTensorSpec(mesh, [Shard(1), Partial()], META))
    assert str(spec) == "Spec(S(1)P on (8, 6))"
    assert (spec.shape, spec.stride, spec.dtype, spec.ndim) == ((8, 6), (6, 1), torch.float32, 2)
    assert (spec.dim_map, spec.sums, spec.num_shards, spec.num_shards_map) == ([-1, 0], [1], 2, [1, 2])
    assert (spec.local_shape((1, 0)), spec.local_offset((1, 2))) == ((8, 3), (0, 3))
    assert DTensorSpec.from_dim_map(mesh, spec.dim_map, spec.sums, META) == spec
    assert not spec.is_replicated()
    assert spec.is_sharded()
    assert spec.device_mesh is mesh
    smaller = TensorMeta(torch.Size((4, 6)), (6, 1), torch.float32)
    assert spec.shallow_copy_with_tensor_meta(smaller).layout is spec.layout
    assert str(DTensorSpec(mesh, (R, R))) == "Spec(RR)"
    turned = DTensorSpec(mesh, (S0, S0), META, shard_order=[(0, (1, 0))])
    assert turned.shard_order == (ShardOrderEntry(0, (1, 0)),)


def test_symbolic_sizes():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    symbol = env.create_symbol(
        10, source=torch._dynamo.source.ConstantSource("s"), dynamic_dim=DimDynamic.DYNAMIC
    )
    size = env.create_symintnode(symbol, hint=10)
    layout = Layout(MeshShape((4,)), [S0])
    lengths = [layout.local_shape((size,), (i,))[0] for i in range(4)]
    assert isinstance(lengths[0], torch.SymInt)
    assert [int(n) for n in lengths] == [3, 3, 3, 1]


MESH = MeshShape((2, 2), ("dp", "tp"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: Layout(MESH, [S0]),
            "1 placements (Shard(dim=0),) for a mesh of 2 axes (2, 2); give one placement per",
        ),
        (lambda: Partial("mean"), "Partial('mean') is not a reduction; allowed: sum, avg, product, min, max"),
        (lambda: MaskPartial("max"), "MaskPartial reduces by sum, got 'max'; write MaskPartial()"),
        (lambda: Shard("0"), "Shard(dim) takes an int, got '0'; write e.g. Shard(0)"),
        (
            lambda: Layout(MESH, [Shard(-1), R]),
            "Shard(-1) on axis 'dp': a layout does not know how many dims the tensor has",
        ),
        (
            lambda: Layout(MESH, [P, Partial("max")]),
            "mix pending reductions sum and max, whose result depends on the order",
        ),
        (lambda: Layout(MESH, [S0, S0], [(0, (0, 1)), (0, (1, 0))]), "shard_order names dim 0 twice"),
        (
            lambda: Layout(MESH, [S0, R], [(0, (0, 1))]),
            "dim 0 is sharded over axes [0, 1], but the placements",
        ),
        (lambda: Layout(MESH, [S0, R], [(1, (0,))]), "shard it over axes none; name exactly those"),
        (lambda: MeshShape(()), "a mesh needs at least one axis"),
        (lambda: MeshShape((2, 0)), "one rank on each, got sizes (2, 0)"),
        (lambda: MeshShape((2, 2), ("a",)), "a mesh of sizes (2, 2) needs 2 axis names, got ('a',)"),
        (
            lambda: DTensorSpec(MESH, [Shard(2), R], META),
            "Shard(2) on axis 'dp' is out of range for a tensor of shape (8, 6)",
        ),
        (
            lambda: DTensorSpec(MESH, [S0, S0], META).dim_map,
            "dim 0 is sharded over axes [0, 1] and a dim map holds one axis",
        ),
        (lambda: DTensorSpec(MESH, [S0, R]).shape, "this spec has no tensor_meta"),
        (lambda: DTensorSpec.from_dim_map(MESH, [2, -1]), "dim 0 names axis 2 of a mesh with 2 axes (2, 2)"),
        (
            lambda: DTensorSpec.from_dim_map(MESH, [0, -1], [0]),
            "axis 'dp' is asked to be both pending sum and dim 0",
        ),
    ],
)
def test_mistakes(make, text):
    with pytest.raises(LongmeshError) as error:
        make()
    assert text in str(error.value)


def test_a_spec_knows_how_many_dims_there_are():
    spec = DTensorSpec(MeshShape((4,)), [Shard(-1)], META)
    assert spec.placements == (Shard(1),)
    assert spec.local_shape((3,)) == (8, 0)
    with pytest.raises(
        LongmeshError, match=r"DTensorSpec: Shard\(dim=-3\) is out of range for a tensor of 2 dims"
    ):
        DTensorSpec(MeshShape((4,)), [Shard(-3)], META)
    with pytest.raises(
        LongmeshError, match=r"give a dim of 0 or more \(DTensorSpec with a tensor_meta takes it"
    ):
        Layout(MeshShape((4,)), [Shard(-1)])
