"""What asks for a DTensor's memory as if it were one piece raises on every rank, with the way around."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jacfwd, jvp

from longmesh import Partial, Replicate, Shard, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh


def text_of(function, *args):
    with pytest.raises(LongmeshError) as raised:
        function(*args)
    return str(raised.value)


def resized(placement):
    mesh = cpu_mesh(2)
    x = distribute_tensor(torch.ones(4, 2), mesh, [placement])
    return (
        text_of(x.resize_, 2, 2),
        text_of(x.resize_, 4, 2),
        text_of(x.resize_as_, distribute_tensor(torch.ones(2, 2), mesh, [placement])),
    )


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial()], ids=str)
def test_resize(pool, placement):
    first, second = pool.run(resized, placement, ranks=2)
    assert first == second
    text = (
        "resize_ of a DTensor of shape (4, 2): it gives a tensor other memory, where old values stay by their place, "
        "and a DTensor's memory is in parts on several ranks; use reshape() for another shape, or longmesh.empty() for "
        "a new tensor"
    )
    assert first[:2] == (text, text)
    assert first[2].startswith("resize_as_ of a DTensor of shape (4, 2): ")


def product(x):
    return x @ x.mT


def dual(view):
    with forward_ad.dual_level():
        return product(forward_ad.make_dual(view, torch.ones_like(view)))


def derivatives(placement):
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*torch.jit.script. is deprecated"
        )  # by torch's forward mode
        return refused_derivatives(placement)


def refused_derivatives(placement):
    x = distribute_tensor(torch.arange(24.0).view(4, 6), cpu_mesh(2), [placement])
    texts = []
    for view in (x[:, ::2], x[:, 1:4], x[::2]):
        texts += [
            text_of(jacfwd(product), view),
            text_of(jvp, product, (view,), (torch.ones_like(view),)),
            text_of(dual, view),
        ]
        whole = view.full_tensor()
        _, found = jvp(product, (view.contiguous(),), (torch.ones_like(view.contiguous()),))
        _, expected = jvp(product, (whole,), (torch.ones_like(whole),))
        torch.testing.assert_close(found.full_tensor(), expected)
    texts.append(text_of(jacfwd(product), x.t()))  # no gaps; of a batch of tangents the order is lost
    return texts


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_forward_derivatives_of_views_with_gaps(pool, placement):
    first, second = pool.run(derivatives, placement, ranks=2)
    assert first == second
    for text in first:
        assert text.startswith("a forward-mode derivative (jvp, jacfwd) of a view of shape (")
        assert text.endswith(
            "which a tangent can't have; call contiguous() on the tensor first, or use jacrev or vjp"
        )
