"""Cases in which torch's own DTensor (2.13, CPU) is silently wrong, hangs or dies; ours is right in each."""

import math

import pytest
import torch
from torch.nn import functional as F

from longmesh import Shard
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


@pytest.mark.parametrize("cases", [mean_losses, weighted_nll, empty_shards])
def test_right_where_the_reference_is_not(pool, cases):
    assert pool.run(cases, ranks=4)[0] == []
