"""Losses by tiles with a vocabulary sharded over ranks: even, uneven, and a rank that holds no class."""

import pytest
import torch
from torch.nn import functional as F

from longmesh import tiled_cross_entropy, token_logprobs
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh


def make(classes: int):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(classes, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(classes, (9,), generator=generator)
    labels[4] = -100
    return hidden, weight, bias, labels


def shard_loss(sizes: tuple[int, ...], reduction: str, smoothing: float, softcap: float | None) -> None:
    mesh = cpu_mesh(len(sizes), names=("tp",))
    hidden, weight, bias, labels = make(sum(sizes))
    scores = F.linear(hidden, weight, bias)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected = F.cross_entropy(scores, labels, reduction=reduction, label_smoothing=smoothing)
    upper = torch.linspace(0.5, 2, max(1, expected.numel()), dtype=torch.float64).view(expected.shape)
    wanted = torch.autograd.grad(expected, [hidden, weight, bias], upper)
    mine = mesh.get_local_rank()
    parts = [t.detach().split(sizes)[mine].clone().requires_grad_() for t in (weight, bias)]
    found = tiled_cross_entropy(
        hidden,
        parts[0],
        labels,
        bias=parts[1],
        mesh=mesh,
        reduction=reduction,
        label_smoothing=smoothing,
        softcap=softcap,
        tile=4,
    )
    torch.testing.assert_close(found, expected.detach())
    grads = torch.autograd.grad(found, [hidden, *parts], upper)
    torch.testing.assert_close(grads[0], wanted[0])
    for grad, whole in zip(grads[1:], wanted[1:], strict=True):
        torch.testing.assert_close(grad, whole.split(sizes)[mine])


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2), (7, 0), (3, 3, 1)])
def test_value_and_gradients_are_those_of_the_whole_vocabulary(pool, sizes):
    for reduction, smoothing, softcap in [("mean", 0.0, None), ("sum", 0.1, 2.0), ("none", 0.1, None)]:
        pool.run(shard_loss, sizes, reduction, smoothing, softcap, ranks=len(sizes))


def shard_logprobs() -> None:
    hidden, weight, _, labels = make(7)
    mine = cpu_mesh(2).get_local_rank()
    part = weight.detach().split((4, 3))[mine].clone().requires_grad_()
    found = token_logprobs(hidden, part, labels, mesh=cpu_mesh(2), tile=4)
    expected = -F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    torch.testing.assert_close(found, expected)


def test_log_probabilities(pool):
    pool.run(shard_logprobs, ranks=2)


def refused(what: str) -> str:
    hidden, weight, _, labels = make(7)
    mesh, rank = cpu_mesh(2, names=("tp",)), torch.distributed.get_rank()
    options = {}
    if what == "tokens" and rank:
        hidden, labels = hidden[:5], labels[:5]
    if what == "options":
        options["label_smoothing"] = 0.1 * rank
    if what == "one rank" and rank:
        weight = weight[:, :3]
    if what == "axes":
        mesh = cpu_mesh(2, 1)
    try:
        tiled_cross_entropy(hidden, weight, labels, mesh=mesh, **options)
    except LongmeshError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "texts"),
    [
        ("tokens", ["have [9, 5] tokens of hidden sizes [6, 6]; give each of them the same"] * 2),
        ("options", ["called with different options, dtypes or requires_grad; pass the same on each"] * 2),
        ("one rank", ["another rank of the axis got invalid arguments", "weight (7, 3)"]),
        ("axes", ["the mesh has 2 axes", "such as mesh['tp']"]),
    ],
)
def test_every_rank_is_told_what_does_not_fit(pool, what, texts):
    for said, text in zip(pool.run(refused, what, ranks=2), texts, strict=True):
        assert text in said


def dtensor_refused() -> str:
    from longmesh import Shard, distribute_tensor

    hidden, weight, _, labels = make(8)
    try:
        tiled_cross_entropy(hidden, distribute_tensor(weight.detach(), cpu_mesh(2), [Shard(0)]), labels)
    except LongmeshError as error:
        return str(error)
    return "nothing was refused"


def test_a_sharded_head_is_given_by_its_local_part(pool):
    for said in pool.run(dtensor_refused, ranks=2):
        assert "weight is a DTensor" in said and "weight.to_local()" in said
