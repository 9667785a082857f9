"""Shapes that don't fit together, in parts that fit on some ranks: refused on every one of them, as plain torch does.

A rank whose part fits would go on alone, with a wrong result or into a collective that the others never enter.
"""

import pytest
import torch
from torch.nn import functional as F

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.testing import cpu_mesh

CUT, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()


def of(*shape):
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape) / 7


def places(*shape, below=3):
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % below


def truths(*shape):
    return of(*shape) > 1


def matrices(count):
    return torch.eye(2).repeat(count, 1, 1)


# What is called, and its operands with their placements on one axis of three ranks.
PRODUCTS = [
    (torch.mm, (of(5, 4), COLUMNS), (of(5, 3), CUT)),
    (torch.bmm, (of(6, 2, 3), CUT), (of(5, 3, 2), CUT)),
    (torch.dot, (of(6), CUT), (of(5), CUT)),
    (torch.mv, (of(2, 6), COLUMNS), (of(5), CUT)),
    (torch.addmm, (of(4), CUT), (of(2, 4), COLUMNS), (of(4, 5), WHOLE)),
    (F.linear, (of(2, 4), COLUMNS), (of(3, 5), COLUMNS)),
    (F.linear, (of(2, 6, 4), COLUMNS), (of(3, 5), WHOLE)),
    (F.linear, (of(2, 6, 4), COLUMNS), (of(3, 4), WHOLE), (of(5), CUT)),
    (torch.matmul, (of(2, 4, 3, 3), COLUMNS), (of(2, 5, 3, 3), COLUMNS)),
    (torch.matmul, (of(2, 6, 5, 4), COLUMNS), (of(2, 6, 5, 3), COLUMNS)),
    (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (of(2, 6, 3), COLUMNS), (of(2, 4, 2), WHOLE)),
    (torch.cdist, (of(6, 4, 3), CUT), (of(5, 4, 3), CUT)),
    (torch.linalg.cross, (of(6, 3), CUT), (of(5, 3), CUT)),
    (torch.linalg.solve, (matrices(6), CUT), (of(5, 2, 1), CUT)),
    (F.conv1d, (of(2, 6, 5), COLUMNS), (of(3, 5, 2), COLUMNS)),
    (F.conv1d, (of(2, 6, 5), WHOLE), (of(6, 6, 2), CUT), (of(5), CUT)),
    (F.scaled_dot_product_attention, (of(1, 6, 4, 2), COLUMNS), (of(1, 5, 4, 2), COLUMNS), (of(1, 5, 4, 2), COLUMNS)),
    (F.scaled_dot_product_attention, (of(6, 2, 4, 2), CUT), (of(5, 2, 4, 2), CUT), (of(5, 2, 4, 2), CUT)),
]  # fmt: skip
ELEMENTS = [
    (torch.add, (of(6), CUT), (of(5), CUT)),
    (torch.addcmul, (of(6), CUT), (of(5), CUT), (of(6), CUT)),
    (torch.where, (truths(6), CUT), (of(5), CUT), (of(6), CUT)),
    (torch.Tensor.copy_, (of(6), CUT), (of(5), CUT)),
    (torch.Tensor.add_, (of(1, 6), COLUMNS), (of(4, 6), COLUMNS)),
    (lambda a, b: torch._foreach_add([a], [b]), (of(6), CUT), (of(5), CUT)),
    (F.prelu, (of(4, 6), COLUMNS), (of(5), CUT)),
    (lambda x: x.expand(4, 6), (of(4, 5), COLUMNS)),
    (lambda x: x.view(7), (of(6), CUT)),
    (lambda x: x.reshape(7), (of(6), CUT)),
    (lambda x: x.narrow(0, 4, 4), (of(6), CUT)),
    (lambda x: x.unflatten(0, (2, 4)), (of(6), CUT)),
    (lambda a, b: torch.cat([a, b]), (of(4, 6), COLUMNS), (of(4, 5), COLUMNS)),
    (lambda a, b: torch.stack([a, b]), (of(6, 2), CUT), (of(5, 2), CUT)),
]
NORMS_AND_LOSSES = [
    (lambda x, w: F.layer_norm(x, (6,), w), (of(4, 6), COLUMNS), (of(5), CUT)),
    (lambda x, w: F.rms_norm(x, (6,), w), (of(4, 6), CUT), (of(5), WHOLE)),
    (lambda x, w: F.group_norm(x, 2, w), (of(2, 6, 3), COLUMNS), (of(5), CUT)),
    (lambda x, w: F.batch_norm(x, None, None, w, None, True), (of(3, 6, 3), COLUMNS), (of(5), CUT)),
    (F.batch_norm, (of(3, 6, 3), COLUMNS), (of(5), CUT), (of(5), CUT)),
    (F.cross_entropy, (of(6, 4), CUT), (places(5), CUT)),
    (F.nll_loss, (of(6, 4), CUT), (places(6), CUT), (of(5), WHOLE)),
    (F.multi_margin_loss, (of(6, 4), CUT), (places(5), CUT)),
    (F.cosine_similarity, (of(6, 4), CUT), (of(5, 4), CUT)),
]
POSITIONS = [
    (lambda x, i: x.gather(1, i), (of(5, 4), CUT), (places(6, 4), CUT)),
    (lambda x, i: torch.take_along_dim(x, i, 0), (of(6, 6), COLUMNS), (places(6, 5), COLUMNS)),
    (lambda x, i, y: x.scatter(1, i, y), (of(5, 4), CUT), (places(6, 4), CUT), (of(6, 4), CUT)),
    (lambda x, i, y: x.scatter_add(1, i, y), (of(6, 4), CUT), (places(6, 4), CUT), (of(5, 4), CUT)),
    (lambda x, i, y: x.index_add(0, i, y), (of(6, 6), COLUMNS), (places(2), WHOLE), (of(2, 5), COLUMNS)),
    (lambda x, i, y: x.index_copy(0, i, y), (of(6, 6), COLUMNS), (places(2), WHOLE), (of(2, 5), COLUMNS)),
    (lambda x, i, y: x.index_put((i,), y), (of(6, 6), COLUMNS), (places(2), WHOLE), (of(2, 5), COLUMNS)),
    (lambda x, i, y: x.index_put((i,), y), (of(6, 6), CUT), (places(6, below=6), WHOLE), (of(5, 6), CUT)),
    (torch.slice_scatter, (of(6, 2), CUT), (of(5, 2), CUT)),
    (lambda x, y: torch.select_scatter(x, y, 0, 0), (of(6, 6), COLUMNS), (of(5), CUT)),
    (torch.diagonal_scatter, (of(6, 6), CUT), (of(5), CUT)),
    (torch.masked_select, (of(6), CUT), (truths(5), CUT)),
    (lambda x, m: x.masked_fill(m, 0.0), (of(6), CUT), (truths(5), CUT)),
    (lambda x, m: x[m], (of(6), CUT), (truths(5), CUT)),
    (torch.searchsorted, (of(6, 4), CUT), (of(5, 4), CUT)),
    (lambda x, n: torch.repeat_interleave(x, n, 0), (of(6), CUT), (places(5), CUT)),
]
CASES = [*PRODUCTS, *ELEMENTS, *NORMS_AND_LOSSES, *POSITIONS]
REFUSALS = (RuntimeError, ValueError, IndexError)


def refused():
    """Of each case, whether plain torch and whether DTensors refuse it."""
    mesh = cpu_mesh(3)
    found = []
    for call, *operands in CASES:
        with pytest.raises(REFUSALS):
            call(*(tensor.clone() for tensor, _ in operands))
        tensors = [distribute_tensor(tensor.clone(), mesh, [placement]) for tensor, placement in operands]
        try:
            call(*tensors)
        except REFUSALS:
            found.append(True)
        else:
            found.append(False)
    return found


def test_shapes_that_do_not_fit_are_refused_on_every_rank(pool):
    for found in pool.run(refused, ranks=3):
        assert [i for i, is_refused in enumerate(found) if not is_refused] == []
        assert len(found) == len(CASES)
