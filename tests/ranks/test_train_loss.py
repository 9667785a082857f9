"""cut_cross_entropy: the value of one process on every rank, and gradients that add up to its own."""

import pytest
import torch
from torch.nn import functional as F

from longmesh.attention import ContextParallel, cut_cross_entropy, masks, pack_documents
from longmesh.testing import cpu_mesh

CLASSES = 7


def on_rank(counts, ignored, mesh_shape, dtype, reduction):
    """The loss and the gradients of this rank's tokens and of a weight that all ranks share."""
    torch.manual_seed(0)
    total = sum(counts)
    weight = torch.randn(4, CLASSES, dtype=dtype, requires_grad=True)
    x = torch.randn(total, 4, dtype=dtype)
    labels = torch.randint(0, CLASSES, (total,))
    labels[list(ignored)] = -100
    rank = torch.distributed.get_rank()
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])
    loss = cut_cross_entropy(
        (x[mine] @ weight)[None], labels[mine][None], cpu_mesh(*mesh_shape), reduction=reduction
    )
    loss.backward()
    whole = weight.detach().clone().requires_grad_()
    expected = F.cross_entropy(x @ whole, labels, reduction=reduction)
    expected.backward()
    return loss.detach(), weight.grad, expected.detach(), whole.grad


@pytest.mark.parametrize(
    ("counts", "ignored", "mesh_shape"),
    [
        ((5,), (1,), (1,)),
        ((3, 10), (0, 1, 2), (2,)),  # rank 0 has nothing but ignored labels
        ((4, 0, 7), (5,), (3,)),
        ((1, 2, 3, 5), (), (2, 2)),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_equals_one_process(pool, counts, ignored, mesh_shape, reduction):
    results = pool.run(on_rank, counts, ignored, mesh_shape, torch.float64, reduction, ranks=len(counts))
    for loss, _, expected, _ in results:
        torch.testing.assert_close(loss, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(sum(grad for _, grad, _, _ in results), results[0][3], rtol=1e-12, atol=1e-14)


def in_half_precision():
    torch.manual_seed(0)
    logits, labels = torch.randn(129, CLASSES).bfloat16(), torch.randint(0, CLASSES, (129,))
    mine = slice(0, 100) if torch.distributed.get_rank() == 0 else slice(100, 129)
    loss = cut_cross_entropy(logits[mine], labels[mine], cpu_mesh(2))
    return loss, F.cross_entropy(logits.float(), labels)


def test_half_precision_is_summed_in_float32(pool):
    for loss, expected in pool.run(in_half_precision, ranks=2):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_nothing_to_learn_from_is_torchs_nan_without_a_gradient(pool):
    for loss, grad, expected, whole in pool.run(
        on_rank, (2, 1), (0, 1, 2), (2,), torch.float32, "mean", ranks=2
    ):
        assert loss.isnan() and expected.isnan()
        assert torch.equal(grad, torch.zeros_like(grad)) and torch.equal(whole, torch.zeros_like(whole))


def labels_of_a_cut_row():
    """Labels of this rank's tokens, as global next tokens of the same document."""
    (row,) = pack_documents([torch.arange(9), torch.arange(20, 33), torch.arange(40, 41)], 23)
    cp = ContextParallel(cpu_mesh(3), seq_len=23, mask=masks.documents(row.lengths), layout="zigzag")
    return cp.shard(row.tokens, dim=1), cp.shard(row.labels, dim=1)


def test_a_shards_last_label_is_the_token_on_another_rank(pool):
    for tokens, labels in pool.run(labels_of_a_cut_row, ranks=3):
        last = (tokens == 8) | (tokens == 32) | (tokens == 40)
        assert torch.equal(labels, torch.where(last, -100, tokens + 1))


def wrong_on_rank_1(kind):
    logits, labels = torch.randn(3, CLASSES), torch.zeros(3, dtype=torch.long)
    if torch.distributed.get_rank() == 1:
        if kind == "shape":
            labels = labels[:2]
        elif kind == "range":
            labels[0] = CLASSES
        else:
            raise AssertionError(kind)
    with pytest.raises((ValueError, IndexError)) as error:
        cut_cross_entropy(logits, labels, cpu_mesh(3))
    return str(error.value)


SHAPES_DIFFER = (
    "cut_cross_entropy: logits are (3, 7) and labels (2,); give logits (..., classes) and a label for each token, "
    "labels of the same shape without the classes"
)


@pytest.mark.parametrize(
    ("kind", "text"), [("shape", SHAPES_DIFFER), ("range", "Target 7 is out of bounds.")]
)
def test_a_mistake_of_one_rank_is_an_error_on_all(pool, kind, text):
    first, wrong, last = pool.run(wrong_on_rank_1, kind, ranks=3, timeout=20)
    assert wrong == text
    assert first == last
    assert first == (
        "cut_cross_entropy: 1 of the 3 ranks got invalid arguments and report them; this rank's "
        "arguments are valid"
    )


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match=r"cut_cross_entropy\(reduction='none'\): use 'mean' or 'sum'"):
        cut_cross_entropy(torch.zeros(1, 2), torch.zeros(1), None, reduction="none")  # type: ignore[arg-type]
