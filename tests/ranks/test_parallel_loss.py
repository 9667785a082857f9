"""loss_parallel: cross entropy of logits cut by classes, against the plain loss; nothing else changes."""

from itertools import product

import pytest
import torch
from torch.nn import functional as F

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.parallel import loss_parallel
from longmesh.testing import cpu_mesh

# Shapes of logits, classes in dim 1 (or 0): 7 and 3 classes on 4 ranks are uneven, and one rank has none.
SHAPES = [(7,), (5, 7), (2, 3, 4), (3, 7, 2, 2)]


def compare(mesh, placements, shape, reduction, weighted, ignore, smoothing, plain_target):
    torch.manual_seed(0)
    dim = 0 if len(shape) == 1 else 1
    rows = (*shape[:dim], *shape[dim + 1 :])
    logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    target = torch.randint(shape[dim], rows)
    weight = torch.rand(shape[dim], dtype=torch.float64) + 0.1 if weighted else None
    if ignore is not None and rows:
        target.view(-1)[::2] = ignore
    options = {
        "weight": weight,
        "reduction": reduction,
        "label_smoothing": smoothing,
        "ignore_index": -100 if ignore is None else ignore,
    }
    expected = F.cross_entropy(logits, target, **options)
    seed = torch.randn(expected.shape, dtype=torch.float64)
    (expected * seed).sum().backward()

    cut = distribute_tensor(logits.detach(), mesh, placements).requires_grad_()
    if not plain_target:
        target = distribute_tensor(target, mesh)
    with record_comm() as log, loss_parallel():
        loss = F.cross_entropy(cut, target, **options)
    torch.testing.assert_close(loss.full_tensor(), expected)
    kinds = {event.kind for event in log.events}
    assert kinds <= {"all_reduce"}, kinds
    wanted = distribute_tensor(seed, mesh)
    (loss.redistribute(placements=[Replicate()] * mesh.ndim) * wanted).sum().backward()
    assert cut.grad.placements == cut.placements
    torch.testing.assert_close(cut.grad.full_tensor(), logits.grad)
    return len(log.events)


# Each shape meets each reduction, and each of these with one of them: weighted, ignored class, label smoothing.
OPTIONS = [(False, None, 0.0), (True, 1, 0.0), (False, -100, 0.2), (True, 2, 0.3), (True, None, 1.0)]


def sweep(mesh_shape, placements):
    mesh = cpu_mesh(*mesh_shape)
    counts = set()
    for number, (shape, reduction) in enumerate(product(SHAPES, ("none", "mean", "sum"))):
        classes = Shard(0 if len(shape) == 1 else 1)
        cuts = [classes if p == "classes" else p for p in placements]
        if len(shape) == 1 and Shard(0) in placements:
            continue
        for option in (OPTIONS[number % 5], OPTIONS[(number + 2) % 5]):
            counts.add(compare(mesh, cuts, shape, reduction, *option, plain_target=number % 2 == 0))
    return counts


CASES = [
    ((1,), ["classes"]),
    ((2,), ["classes"]),
    ((3,), ["classes"]),
    ((4,), ["classes"]),
    ((2, 2), [Replicate(), "classes"]),
    ((2, 2), ["classes", Shard(0)]),
    ((2, 2), ["classes", "classes"]),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), CASES)
def test_equals_the_plain_loss(pool, mesh_shape, placements):
    ranks = torch.Size(mesh_shape).numel()
    for counts in pool.run(sweep, mesh_shape, placements, ranks=ranks):
        assert max(counts) <= 3


def half_precision():
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    logits, target = torch.randn(6, 8).bfloat16(), torch.randint(8, (6,))
    cut = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = torch.nn.CrossEntropyLoss()(cut, target)
    loss.backward()
    plain = logits.clone().requires_grad_()
    F.cross_entropy(plain, target).backward()
    assert loss.dtype is torch.bfloat16 and cut.grad.dtype is torch.bfloat16
    torch.testing.assert_close(cut.grad.full_tensor(), plain.grad, rtol=0.02, atol=1e-3)  # bf16 has 8 bits
    return True


def test_half_precision_is_computed_in_float32(pool):
    assert pool.run(half_precision, ranks=2) == [True] * 2


def other_functions():
    """Inside the context any other function has its own gradient, and backward() may run outside."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    logits, target = torch.randn(4, 6, dtype=torch.float64), torch.randint(6, (4,))
    odds = torch.rand(4, 6, dtype=torch.float64)
    for fn in (
        lambda x, share: F.log_softmax(x, 1).square().sum(),
        lambda x, share: F.nll_loss(F.log_softmax(x, 1), target),
        lambda x, share: F.softmax(x, 1).square().sum(),
        lambda x, share: F.cross_entropy(x, share),  # targets that are probabilities
    ):
        plain = logits.clone().requires_grad_()
        cut = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            expected = fn(plain, odds)
            loss = fn(cut, distribute_tensor(odds, mesh, [Shard(1)]))
        expected.backward()
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected.detach())
        torch.testing.assert_close(cut.grad.full_tensor(), plain.grad)
    return True


def test_no_other_gradient_changes(pool):
    assert pool.run(other_functions, ranks=2) == [True] * 2


def texts():
    mesh = cpu_mesh(2)
    cut = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])
    errors = []
    with loss_parallel():
        for target, options in (
            (torch.zeros(3, dtype=torch.long), {}),
            (torch.zeros(4, dtype=torch.long), {"weight": torch.ones(3)}),
            (torch.zeros(4, dtype=torch.long), {"reduction": "median"}),
            (torch.zeros(4, dtype=torch.long), {"label_smoothing": 2.0}),
        ):
            with pytest.raises(LongmeshError) as raised:
                F.cross_entropy(cut, target, **options)
            errors.append(str(raised.value))
        with pytest.raises(IndexError, match=r"Target 6 is out of bounds\."):
            F.cross_entropy(cut, torch.tensor([0, 6, 1, 2]))
    return errors


def test_error_texts(pool):
    assert pool.run(texts, ranks=2)[1] == [
        (
            "cross_entropy: logits (4, 6) need targets of shape (4,), got (3,); a plain target is that of all ranks "
            "together, a part of it goes through DTensor.from_local"
        ),
        "cross_entropy: weight has shape (3,) and there are 6 classes; give one weight per class, of all classes",
        "'median' is not a reduction of cross_entropy; allowed: none, mean, sum",
        "label_smoothing must be between 0.0 and 1.0. Got: 2.0",
    ]


def pending_logits():
    """Logits with a pending sum take the general way, and are right."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    logits, target = torch.randn(4, 6), torch.randint(6, (4,))
    cut = DTensor.from_local(logits / 2, mesh, [Partial()])
    with loss_parallel():
        return torch.allclose(F.cross_entropy(cut, target).full_tensor(), F.cross_entropy(logits, target))


def test_pending_logits(pool):
    assert pool.run(pending_logits, ranks=2) == [True] * 2
