"""Losses on real ranks, forward and gradient, for random layouts and on uneven shards."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.testing import cpu_mesh
from support.op_check import compare_op

MESHES = {3: (3,), 4: (2, 2)}

TWO_OPERANDS = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": lambda x, t, **how: F.binary_cross_entropy(x.sigmoid(), t.sigmoid().detach(), **how),
    "bce_with_logits": lambda x, t, **how: F.binary_cross_entropy_with_logits(x, t.sigmoid(), **how),
    "pos_weight": lambda x, t, **how: F.binary_cross_entropy_with_logits(
        x, t.sigmoid(), pos_weight=x[0].detach() + 1, **how
    ),
    "soft_margin": lambda x, t, **how: F.soft_margin_loss(x, t.sign().detach(), **how),
    "kl_div": lambda x, t, **how: F.kl_div(x, t.sigmoid(), **how),
    "poisson_nll": F.poisson_nll_loss,
    "gaussian_nll": lambda x, t, **how: F.gaussian_nll_loss(x, t, (x * 0 + 1), **how),
    "hinge_embedding": lambda x, t, **how: F.hinge_embedding_loss(x, t.sign().detach(), **how),
    "margin_ranking": lambda x, t, **how: F.margin_ranking_loss(x, t, t.sign(), **how),
    "cosine_embedding": lambda x, t, **how: F.cosine_embedding_loss(x, t, t[:, 0].sign().detach(), **how),
    "triplet_margin": lambda x, t, **how: F.triplet_margin_loss(x, t, x * t, **how),
}


def pointwise(name, mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape, reductions in (((10, 3), ("mean", "sum", "none")), ((1, 5), ("mean",))):
        tensors = [torch.randn(shape), torch.randn(shape)]
        for reduction in reductions:
            found += compare_op(
                lambda x, t, r=reduction: TWO_OPERANDS[name](x, t, reduction=r),
                tensors, mesh_shape, trials=2, seed=len(reduction), may_replicate=True,
            )  # fmt: skip
    return found


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@pytest.mark.parametrize("ranks", MESHES)
@pytest.mark.parametrize("name", TWO_OPERANDS)
def test_pointwise_losses(pool, name, ranks):
    assert pool.run(pointwise, name, MESHES[ranks], ranks=ranks)[0] == []


def by_class(mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape in ((10, 5), (1, 3), (3, 4, 2, 2)):
        x, weight = torch.randn(shape), torch.rand(shape[1]) + 0.1
        target = torch.randint(shape[1], (shape[0], *shape[2:]))
        for how in (
            {"reduction": "mean"},
            {"reduction": "sum", "ignore_index": 1},
            {"reduction": "none"},
            {"reduction": "mean", "ignore_index": 0, "label_smoothing": 0.2},
        ):
            found += compare_op(
                lambda x, w, t, k=how: F.cross_entropy(x, t, w.detach(), **k),
                [x, weight, target], mesh_shape, trials=2, may_replicate=True,
            )  # fmt: skip
        found += compare_op(
            lambda x, t: F.cross_entropy(x, t), [x, target], mesh_shape, trials=2, may_replicate=True
        )
    probabilities = torch.randn(10, 5).softmax(1)
    x = torch.randn(10, 5)
    found += compare_op(F.cross_entropy, [x, probabilities], mesh_shape, trials=2, may_replicate=True)
    labels = torch.tensor([[2, 0, -1, 3, 1]]).repeat(10, 1)
    target = torch.randint(5, (10,))
    for reduction in ("mean", "sum", "none"):
        found += compare_op(
            lambda x, t, r=reduction: F.multi_margin_loss(x, t, reduction=r),
            [x, target],
            mesh_shape,
            trials=2,
        )
        found += compare_op(
            lambda x, t, r=reduction: F.multilabel_margin_loss(x, t, reduction=r),
            [x, labels],
            mesh_shape,
            trials=2,
        )
    return found


@pytest.mark.parametrize("ranks", MESHES)
def test_losses_by_class(pool, ranks):
    assert pool.run(by_class, MESHES[ranks], ranks=ranks)[0] == []


def ctc(mesh_shape):
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4).log_softmax(-1)
    target = torch.randint(1, 4, (3, 2))
    lengths = [((6, 6, 5), (2, 1, 2)), (torch.tensor([6, 6, 5]), torch.tensor([2, 1, 2]))]
    return [
        text
        for reduction in ("sum", "mean", "none")
        for before, after in lengths
        for text in compare_op(
            lambda x, t, b=before, a=after, r=reduction: F.ctc_loss(x, t, b, a, reduction=r),
            [x, target],
            mesh_shape,
            trials=2,
            may_replicate=True,
        )
    ]


def test_ctc(pool):
    assert pool.run(ctc, (3,), ranks=3)[0] == []


def everything_ignored():
    mesh = init_device_mesh("cpu", (4,))
    x, target = torch.randn(9, 5), torch.full((9,), -100)
    some = target.clone()
    some[0] = 2
    parts = distribute_tensor(x, mesh, [Shard(0)])
    results = [F.cross_entropy(parts, distribute_tensor(t, mesh, [Shard(0)])).item() for t in (target, some)]
    wanted = [F.cross_entropy(x, t).item() for t in (target, some)]
    return torch.allclose(torch.tensor(results), torch.tensor(wanted), equal_nan=True), results


def test_nan_only_where_torch_gives_nan(pool):
    for same, (nothing, one) in pool.run(everything_ignored, ranks=4):
        assert same and nothing != nothing and one == one


def wrong_targets(mesh_shape, bad):
    """One target of ten is not a class; only the ranks that hold it can see it."""
    mesh = cpu_mesh(*mesh_shape)
    target = torch.arange(10) % 5
    target[7] = bad
    texts = []
    for places in ([Shard(0)], [Shard(1)]):
        rest = [Shard(1)] * (len(mesh_shape) - 1)
        x = distribute_tensor(torch.randn(10, 5), mesh, [*places, *rest], src_data_rank=None)
        row = [Shard(0) if places[0] == Shard(0) else Replicate(), *[Replicate()] * len(rest)]
        try:
            F.cross_entropy(x, distribute_tensor(target, mesh, row, src_data_rank=None))
        except IndexError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize(("mesh_shape", "bad"), [((4,), 5), ((2, 2), -1), ((1,), 99)])
def test_every_rank_raises_for_a_target_that_is_no_class(pool, mesh_shape, bad):
    ranks = torch.Size(mesh_shape).numel()
    results = pool.run(wrong_targets, mesh_shape, bad, ranks=ranks, timeout=20.0)
    text = "a target is out of bounds: classes are 0 to 4, and -100 (ignore_index) for none"
    assert results == [[text, text]] * ranks or ranks == 1
    assert all(len(texts) == 2 for texts in results)


def traffic():
    mesh = init_device_mesh("cpu", (2,))
    target = torch.randint(1000, (4,))
    x = distribute_tensor(torch.randn(4, 1000), mesh, [Shard(1)]).requires_grad_()
    with record_comm() as log:
        F.cross_entropy(x, target).backward()
    return [e.kind for e in log.events], max(e.sent_bytes for e in log.events), x.grad.placements


def test_cross_entropy_over_cut_classes_sends_only_rows(pool):
    kinds, largest, placements = pool.run(traffic, ranks=2)[0]
    assert placements == (Shard(1),)
    assert largest <= 4 * 4 * 2 and set(kinds) == {"all_reduce"} and len(kinds) == 4
