"""Cases in which torch's own DTensor (2.13, CPU) is silently wrong, hangs or dies; ours is right in each."""

import functools
import math
import time
import warnings

import pytest
import torch
from torch.nn import functional as F

import longmesh
from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.experimental import local_map
from longmesh.parallel import loss_parallel
from longmesh.tensor.dispatch import dispatch
from longmesh.testing import cpu_mesh
from support.op_check import compare_op

FOUR = (4,)


def mean_losses():
    """Ten rows over four ranks hold 3, 3, 3, 1: an average of averages is wrong."""
    torch.manual_seed(0)
    x, t = torch.rand(10, 3), torch.rand(10, 3)
    losses = [
        F.mse_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.smooth_l1_loss, F.huber_loss,
        lambda x, t: F.soft_margin_loss(x, t), lambda x, t: F.cosine_embedding_loss(x, t, t[:, 0].sign().detach()),
    ]  # fmt: skip
    return [
        text
        for loss in losses
        for text in compare_op(
            lambda x, t, f=loss: f(x, t.detach()), [x, t], FOUR, [[Shard(0)], [Shard(0)]], may_replicate=True
        )
    ]


def weighted_nll():
    torch.manual_seed(0)
    x, weight, target = torch.randn(10, 5).log_softmax(1), torch.rand(5), torch.randint(5, (10,))
    places = [[Shard(0)], [Shard(0)], [Shard(0)]]
    return [
        *compare_op(lambda x, w, t: F.nll_loss(x, t, w.detach()), [x, weight, target], FOUR, places),
        *compare_op(lambda x, w, t: F.nll_loss(x, t, ignore_index=2), [x, weight, target], FOUR, places),
        *compare_op(
            lambda x, w, t: F.nll_loss(x, t, ignore_index=2), [x, weight, target * 0 + 2], FOUR, places
        ),
    ]


def empty_shards():
    """Nine rows over four ranks hold 3, 3, 3, 0: the last takes part with identity elements."""
    torch.manual_seed(0)
    x = torch.randn(9, 5)
    ops = [
        torch.amax, torch.amin, torch.min, torch.max, torch.argmax, torch.argmin, torch.aminmax,
        lambda x: torch.amax(x, 0), lambda x: torch.min(x, 0), lambda x: torch.argmax(x, 0),
        lambda x: torch.aminmax(x, dim=0), lambda x: torch.linalg.vector_norm(x, math.inf),
        lambda x: torch.linalg.vector_norm(x, -math.inf, 0),
    ]  # fmt: skip
    return [text for op in ops for text in compare_op(op, [x], FOUR, [[Shard(0)]], may_replicate=True)]


def empty_lookups():
    """The rank without rows answers for none, and takes part."""
    torch.manual_seed(0)
    table, index = torch.randn(9, 3), torch.tensor([[0, 8, 4], [2, 2, 7]])
    along = torch.tensor([[0, 8, 4], [2, 2, 7]])
    places = [[Shard(0)], [Replicate()]]
    return [
        *compare_op(lambda w, i: F.embedding(i, w), [table, index], FOUR, places),
        *compare_op(lambda x, i: torch.take_along_dim(x, i, 0), [table, along], FOUR, places),
        *compare_op(lambda x, i: torch.gather(x, 0, i), [table, along], FOUR, places),
        *compare_op(lambda x, i: x.index_select(0, i[0]), [table, index], FOUR, places),
    ]


def convolutions():
    """Channels and rows of the image, cut in uneven and empty pieces."""
    torch.manual_seed(0)
    found = []
    for fn, image, kernel in (
        (F.conv1d, (3, 4, 9), (5, 4, 3)),
        (F.conv2d, (3, 4, 6, 5), (5, 4, 3, 2)),
        (F.conv3d, (2, 3, 4, 3, 5), (2, 3, 2, 2, 2)),
        (F.conv_transpose1d, (3, 4, 5), (4, 5, 3)),
        (F.conv_transpose2d, (2, 3, 5, 4), (3, 2, 2, 3)),
        (F.conv_transpose3d, (1, 2, 3, 3, 3), (2, 3, 2, 2, 2)),
    ):
        for dim in range(1, len(image)):
            for weight in (Replicate(), Shard(dim % 2)):
                tensors = [torch.randn(image), torch.randn(kernel)]
                found += compare_op(lambda x, w, f=fn: f(x, w), tensors, FOUR, [[Shard(dim)], [weight]])
    return found


def lookups_of_one_table():
    torch.manual_seed(0)
    table, index = torch.randn(10, 3), torch.randint(10, (4,))
    places = [[Shard(0)], [Replicate()]]

    def two(w, i):
        first, second = F.embedding(i, w), F.embedding(i.flip(0), w)
        return first + 2 * second

    return [
        *compare_op(two, [table, index], FOUR, places),
        *compare_op(lambda w, i: F.embedding(i, w).square().sum(), [table, index], FOUR, places),
    ]


def nested_shards():
    """A dim cut twice, unevenly: by two axes in either order, and by one axis that is both of them flattened."""
    torch.manual_seed(0)
    x = torch.randn(7, 3)
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    both = [Shard(0), Shard(0)]
    held = [
        distribute_tensor(x, mesh, both, src_data_rank=None),
        distribute_tensor(x, mesh, both, src_data_rank=None, shard_order=[(0, (1, 0))]),
        distribute_tensor(x, _flat(), [Shard(0)], src_data_rank=None),
    ]
    return [str(y.placements) for y in held if not torch.equal(y.full_tensor(), x)]


@functools.cache
def _flat():
    return cpu_mesh(2, 2, names=("dp", "tp"))._flatten("both")


def mapped_unevenly():
    """local_map on 10 rows over four ranks: they hold 3, 3, 3, 1, and so do the results."""
    torch.manual_seed(0)
    x = torch.randn(10, 3)
    fn = local_map(lambda t: t.exp() + 1, out_placements=[Shard(0)], in_placements=([Shard(0)],))
    return compare_op(lambda x: fn(x) if isinstance(x, DTensor) else x.exp() + 1, [x], FOUR, [[Shard(0)]])


def numbers():
    """One number on all ranks, of a sum that is still pending."""
    mesh = cpu_mesh(4)
    x = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)], src_data_rank=None)
    total = x.sum()
    assert total.placements == (Partial(),)
    return [v for v in (total.item(), float(total), int(total), (total == 45).item()) if v not in (45, True)]


def reshapes():
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    return [
        text
        for size in ((6, 8), (48,), (3, 16), (2, 4, 6), (8, 2, 3))
        for place in (Shard(0), Shard(1))
        for text in compare_op(lambda x, s=size: x.reshape(s), [x], FOUR, [[place]])
    ]


def values_decide_the_shape():
    torch.manual_seed(0)
    x = torch.randn(9, 4).round()
    ops = [torch.nonzero, torch.unique, lambda x: torch.masked_select(x, x > 0), lambda x: x[x > 0]]
    return [text for op in ops for text in compare_op(op, [x], FOUR, [[Shard(0)]], grad=False)]


def log_softmax_of_any_loss():
    """The gradient over cut classes, of other losses than cross entropy too."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 7), torch.randn(5, 7)
    places = [[Shard(1)], [Shard(1)]]
    with loss_parallel():
        inside = compare_op(lambda x, w: (x.log_softmax(1) * w.detach()).sum(), [x, weight], FOUR, places)
    return [
        *inside,
        *compare_op(lambda x, w: (x.log_softmax(1) * w.detach()).sum(), [x, weight], FOUR, places),
        *compare_op(lambda x, w: x.log_softmax(1).square(), [x, weight], FOUR, places),
        *compare_op(lambda x, w: F.kl_div(x.log_softmax(1), w.softmax(1)), [x, weight], FOUR, places),
    ]


def clipped_over_two_meshes():
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    grads = [torch.arange(14.0).view(7, 2), torch.arange(5.0)]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    params = [
        torch.nn.Parameter(distribute_tensor(torch.zeros_like(g), m, [Shard(0)] * m.ndim, src_data_rank=None))
        for g, m in zip(grads, (mesh, mesh["tp"]), strict=True)
    ]
    for p, g in zip(params, grads, strict=True):
        p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)
    total = torch.nn.utils.clip_grad_norm_(params, 1.0)
    right = [torch.allclose(p.grad.full_tensor(), g / norm) for p, g in zip(params, grads, strict=True)]
    return [] if all(right) and torch.allclose(total.full_tensor(), norm) else [str(total)]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize(
    "cases",
    [
        mean_losses, weighted_nll, empty_shards, empty_lookups, convolutions, lookups_of_one_table, nested_shards,
        mapped_unevenly, numbers, reshapes, values_decide_the_shape, log_softmax_of_any_loss, clipped_over_two_meshes,
    ],
)  # fmt: skip
def test_right_where_the_reference_is_not(pool, cases):
    assert pool.run(cases, ranks=4) == [[]] * 4


def table_gradient():
    mesh = cpu_mesh(4)
    table = distribute_tensor(torch.randn(10, 3), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    index = torch.tensor([0, 3, 9, 3])
    y = F.embedding(index, table)
    with record_comm() as log:
        y.backward(distribute_tensor(torch.ones(4, 3), mesh, [Replicate()], src_data_rank=None))
    return table.grad.placements, len(log.events), tuple(table.grad.to_local().shape)


def test_the_gradient_of_a_row_cut_table_stays_cut_and_sends_nothing(pool):
    results = pool.run(table_gradient, ranks=4)
    assert results == [((Shard(0),), 0, (n, 3)) for n in (3, 3, 3, 1)]


def random_numbers():
    found = []
    for placements in ([Shard(0)], [Replicate()], [Shard(1)]):
        longmesh.manual_seed(3)
        x = longmesh.rand(8, 5, device_mesh=cpu_mesh(4), placements=placements)
        kept = F.dropout(torch.ones_like(x), 0.5)
        found.append((x.full_tensor(), kept.full_tensor()))
    return found


def test_random_numbers_do_not_depend_on_the_layout(pool):
    for results in pool.run(random_numbers, ranks=4):
        for x, kept in results[1:]:
            assert torch.equal(x, results[0][0]) and torch.equal(kept, results[0][1])
        pieces = results[0][1].chunk(4)
        assert any(not torch.equal(pieces[0], piece) for piece in pieces[1:])


def unknown_op():
    x = distribute_tensor(torch.rand(4, 5), cpu_mesh(4), [Shard(0)], src_data_rank=None)
    dispatch.warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        twice = [
            torch.ops.aten._fake_quantize_learnable_per_tensor_affine(x, x[0, :1], x[0, :1], 0, 9, 1.0)
        ] * 2
    return [str(w.message) for w in caught], twice[0].placements


def test_an_op_without_a_rule_replicates_and_says_so_once(pool):
    for texts, placements in pool.run(unknown_op, ranks=4):
        (text,) = [t for t in texts if "no sharding rule" in t]
        assert "aten._fake_quantize_learnable_per_tensor_affine.default" in text
        assert placements == (Replicate(),)


def kinds_of(placements, target):
    x = distribute_tensor(torch.randn(8, 8), cpu_mesh(2, 2), placements, src_data_rank=None)
    with record_comm() as log:
        x.redistribute(placements=target)
    return [(e.kind, e.sent_bytes) for e in log.events]


def test_another_cut_is_one_all_to_all_and_two_axes_move_together(pool):
    (events,) = {
        tuple(e) for e in pool.run(kinds_of, [Shard(0), Replicate()], [Shard(1), Replicate()], ranks=4)
    }
    assert events == (("all_to_all", 4 * 4 * 4),)
    (events,) = {tuple(e) for e in pool.run(kinds_of, [Shard(0)] * 2, [Replicate()] * 2, ranks=4)}
    assert [kind for kind, _ in events] == ["all_gather"]


def cold_ops(num):
    """The time of the fastest of `num` adds and sums, each of a shape that was not seen before, ours and torch's."""
    import torch.distributed.tensor as reference

    mesh, best = cpu_mesh(2, 2), []
    for kind, cut in ((DTensor, Shard(0)), (reference.DTensor, reference.Shard(0))):
        times = []
        for n in range(num):
            x = kind.from_local(torch.ones(40 + n, 7), mesh, [cut, cut])
            start = time.perf_counter()
            x + x
            times.append(time.perf_counter() - start)
        best.append(min(times[1:]))
    return best


def test_a_new_shape_is_no_new_search(pool):
    for ours, theirs in pool.run(cold_ops, 12, ranks=4):
        assert ours < theirs / 3  # a tenth and less on an idle machine
