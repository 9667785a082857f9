"""Plain tensors beside DTensors, and plain shards given to styles: the answer or one clear error, on every rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from longmesh import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from longmesh.errors import LongmeshError
from longmesh.experimental import implicit_replication
from longmesh.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from longmesh.testing import cpu_mesh


def outcome(function, *args):
    try:
        return function(*args)
    except LongmeshError as error:
        return str(error)


PREDICATES = [
    torch.equal, torch.allclose, torch.ops.aten.is_same_size,
    lambda a, b: bool((a == b).all()), lambda a, b: bool(torch.isclose(a, b).all()), lambda a, b: b in a,
]  # fmt: skip


SIZES, CLOSE = 2, 4


def predicates(dtype, implicit):
    mesh = cpu_mesh(3)
    plain = torch.arange(10).view(5, 2).to(dtype)
    found = []
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        x = distribute_tensor(plain, mesh, [placement])
        for predicate in PREDICATES:
            for other in (plain, plain + 1):
                with implicit_replication() if implicit else torch.no_grad():
                    mine = outcome(predicate, x, other), outcome(predicate, other, x)
                found.append((mine, predicate(plain.clone(), other)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("implicit", [False, True], ids=["", "implicit"])
def test_predicates_of_a_dtensor_and_a_plain_tensor(pool, dtype, implicit):
    first, *rest = pool.run(predicates, dtype, implicit, ranks=3)
    assert all(other == first for other in rest)
    for number, (mine, expected) in enumerate(first):
        which = number // 2 % len(PREDICATES)
        # Integers are taken as equal everywhere; isclose may make floats of them before anybody is asked.
        is_known = implicit or which == SIZES or (dtype is torch.int64 and which != CLOSE)
        for answer in mine:
            if is_known or isinstance(answer, bool):
                assert answer == expected
            else:
                assert "mixes a DTensor with a plain tensor" in answer and "distribute_tensor" in answer


def asked_about_memory():
    x = distribute_tensor(torch.ones(4), cpu_mesh(2), [Shard(0)])
    return [outcome(a.is_set_to, b) for a, b in ((x, x), (x, torch.ones(4)), (torch.ones(4), x))]


def test_memory_is_not_compared(pool):
    first, second = pool.run(asked_about_memory, ranks=2)
    assert first == second
    assert all("it compares the memory of two tensors" in text for text in first)


def sparse_embeddings(rows, style):
    """A sparse gradient is asked for: the dense one, and SparseAdam's own error."""
    mesh = cpu_mesh(2)
    torch.manual_seed(0)
    plain = nn.Embedding(7, 4, sparse=rows)
    expected = F.embedding(torch.tensor([1, 6, 1]), plain.weight).square().sum()
    (want,) = torch.autograd.grad(expected, plain.weight)
    if style is None:
        model, indices = distribute_module(plain, mesh), distribute_tensor(torch.tensor([1, 6, 1]), mesh)
    else:
        model, indices = parallelize_module(plain, mesh, style), torch.tensor([1, 6, 1])
    model(indices).square().sum().backward()
    torch.testing.assert_close(model.weight.grad.full_tensor(), want)
    with pytest.raises(
        RuntimeError, match="SparseAdam does not support dense gradients, please consider Adam"
    ):
        torch.optim.SparseAdam(model.parameters()).step()
    torch.optim.Adam(model.parameters()).step()
    return True


@pytest.mark.parametrize("style", [None, ColwiseParallel(), RowwiseParallel(input_layouts=Replicate())])
def test_sparse_gradients_of_embeddings_are_dense(pool, style):
    assert pool.run(sparse_embeddings, True, style, ranks=2) == [True] * 2


def sparse_bags():
    mesh = cpu_mesh(2)
    table, indices = torch.randn(7, 4), torch.tensor([[1, 6, 1], [0, 2, 6]])
    plain = table.clone().requires_grad_()
    wrong = []
    for mode in ("sum", "mean"):
        F.embedding_bag(indices, plain, mode=mode).square().sum().backward()
    for placement in (Shard(0), Shard(1), Replicate()):
        weight = distribute_tensor(table, mesh, [placement]).requires_grad_()
        for mode in ("sum", "mean"):  # the second is added to the first
            given = distribute_tensor(indices, mesh, [Replicate()])
            F.embedding_bag(given, weight, mode=mode, sparse=True).square().sum().backward()
        if not torch.allclose(weight.grad.full_tensor(), plain.grad):
            wrong.append(placement)
    return wrong


def test_sparse_gradients_of_bags_are_dense(pool):
    assert pool.run(sparse_bags, ranks=2) == [[]] * 2


def sparse_parts():
    mesh = cpu_mesh(2)
    sparse = torch.eye(4).to_sparse()
    return (
        outcome(distribute_tensor, sparse, mesh, [Shard(0)]),
        outcome(DTensor.from_local, sparse, mesh, [Shard(0)]),
    )


def test_sparse_tensors_are_refused(pool):
    text = "takes a strided tensor, got one of layout torch.sparse_coo; call to_dense() first"
    first, second = pool.run(sparse_parts, ranks=2)
    assert first == second
    assert text in first[0] and text in first[1]


STYLES = {
    "columns": (nn.Linear, ColwiseParallel(input_layouts=Shard(0))),
    "whole": (nn.Linear, ColwiseParallel()),
    "rows": (nn.Linear, RowwiseParallel(output_layouts=Shard(0))),
    "sequence": (nn.LayerNorm, SequenceParallel(sequence_dim=0)),
    "input": (
        nn.Sequential,
        PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True),
    ),
    "output": (
        nn.Sequential,
        PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
    ),
}


def unequal_parts(name, sizes, columns):
    """One style on its own, which is given parts of these sizes; then again, where nothing is new."""
    mesh = init_device_mesh("cpu", (2,))  # where nothing was compared
    kind, style = STYLES[name]
    module = (
        nn.Sequential(nn.Linear(6, 6)) if kind is nn.Sequential else kind(*[6] * (1 + (kind is nn.Linear)))
    )
    model = parallelize_module(module, mesh, style)
    x = torch.ones(sizes[dist.get_rank()], columns[dist.get_rank()])
    return [outcome(lambda: tuple(model(x).shape)) for _ in range(2)]


@pytest.mark.parametrize("name", STYLES)
def test_unequal_parts_of_the_first_style(pool, name):
    width = 3 if name == "rows" else 6
    for first, second in pool.run(unequal_parts, name, (5, 3), (width, width), ranks=2):
        assert (
            "but its part is (" in first
            and "pass the shard that chunking gives each rank, or DTensors" in first
        )
        assert second == first


def test_wrong_features_on_one_rank(pool):
    expected = "RowwiseParallel of Linear: the input of rank 1 has 4 features and its share of 6 on 2 ranks is 3; pass"
    for first, _ in pool.run(unequal_parts, "rows", (2, 2), (3, 4), ranks=2):
        assert first.startswith(expected)


@pytest.mark.parametrize("name", ["columns", "sequence", "input", "output"])
def test_parts_of_a_length_that_does_not_divide_are_right(pool, name):
    whole = (5, 3) if name == "columns" else (5, 6)
    found = pool.run(unequal_parts, name, (3, 2), (6, 6), ranks=2)
    assert [first for first, _ in found] == [second for _, second in found] == [whole] * 2
