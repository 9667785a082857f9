"""plan_op: plans of any mesh, with no process."""

import pytest
import torch

from longmesh import DTensorSpec, MeshShape, Partial, Replicate, Shard, TensorMeta, named_cluster, plan_op
from longmesh.errors import LongmeshError
from longmesh.spec.strides import contiguous_stride

aten = torch.ops.aten
MANY = MeshShape((512, 8), ("dp", "tp"))


def spec(shape, placements, mesh=MANY, dtype=torch.float32):
    return DTensorSpec(mesh, placements, TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype))


def test_four_thousand_ranks():
    x = spec((4096, 1024), [Shard(0), Shard(1)])
    plan = plan_op(aten.cumsum.default, x, 1, mesh=MANY)
    # 8 rows of one number, to 7 others
    assert plan.sent_bytes == 8 * 4 * 7 and plan.bytes_by_axes == {("axis 'tp'",): 8 * 4 * 7}
    last = plan.at((511, 7))
    assert last.places[0].coordinate == (511, 7) and last.sent_bytes == plan.sent_bytes
    assert last.steps != plan.steps  # what comes before differs
    assert plan.at((0, 0)) == plan


def test_bytes_of_uneven_shards():
    three = MeshShape((3,))
    x = spec((7, 2), [Shard(0)], three)
    plan = plan_op(aten.flip.default, x, [0], mesh=three)
    # rows 0-2, 3-5 and 6: the last row goes to the first rank, and so on
    assert [plan.at((rank,)).sent_bytes for rank in range(3)] == [3 * 8, 2 * 8, 1 * 8]


def test_words_and_time():
    x, w = spec((64, 32), [Shard(0), Replicate()]), spec((64, 32), [Shard(1), Replicate()])
    plan = plan_op(aten.add.Tensor, x, w, mesh=MANY)
    slow = plan.predicted_us(named_cluster("cpu"))
    assert slow > 0 and plan.predicted_us() > 0
    text = plan.explain()
    assert (
        "input 1, (64, 32): S(1)R -> S(0)S(1) by all_to_all, sends 252 B" in text
        and "this rank sends" in text
    )
    assert plan_op(aten.add.Tensor, x, x, mesh=MANY).predicted_us() == 0.0


def test_attention_over_a_sharded_sequence():
    four = MeshShape((4,), ("cp",))
    q = spec((1, 2, 16, 8), [Shard(2)], four)
    call = aten._scaled_dot_product_flash_attention_for_cpu.default
    plan = plan_op(call, q, q, q, 0.0, True, mesh=four)
    assert list(plan.bytes_by_axes) == [("axis 'cp'",)]
    assert [plan.at((rank,)).sent_bytes > 0 for rank in range(4)].count(True) >= 3


def test_what_values_decide_is_unknown():
    x = spec((8,), [Shard(0)], MeshShape((2,)))
    plan = plan_op(
        aten.randint_like.Tensor,
        x,
        spec((), [Replicate()], MeshShape((2,)), torch.int64),
        mesh=MeshShape((2,)),
    )
    assert plan.sent_bytes is None and plan.bytes_by_axes is None and plan.predicted_us() is None
    assert "values decide" in plan.explain()


def test_pending_sums_stay():
    two = MeshShape((2,))
    plan = plan_op(aten.add.Tensor, spec((4,), [Partial()], two), spec((4,), [Partial()], two), mesh=two)
    assert plan.sent_bytes == 0 and plan.outputs[0].layout.placements == (Partial(),)


def test_refusals():
    two, three = MeshShape((2,)), MeshShape((3,))
    x = spec((4,), [Shard(0)], two)
    with pytest.raises(LongmeshError, match="give an op such as"):
        plan_op(torch.add, x, x, mesh=two)
    with pytest.raises(LongmeshError, match="not on MeshShape"):
        plan_op(aten.exp.default, x, mesh=three)
    with pytest.raises(LongmeshError, match="there is no such rank on"):
        plan_op(aten.exp.default, x, mesh=two).at((2,))
