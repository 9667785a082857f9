"""Layouts: every token once, permutation and its inverse, tokens equal within a chunk."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longmesh.attention import masks
from longmesh.attention.layout.base import Ownership, Workload, collect
from longmesh.attention.layout.components import components
from longmesh.attention.layout.named import LAYOUTS as NAMED
from longmesh.errors import LongmeshError

LAYOUTS = {name: layout for name, layout in NAMED.items() if name != "auto"}


@given(
    lengths=st.lists(st.integers(0, 60), min_size=1, max_size=8),
    ranks=st.integers(1, 7),
    chunk=st.integers(1, 20),
    name=st.sampled_from(sorted(LAYOUTS)),
)
def test_every_token_is_owned_once_and_shares_are_even(lengths, ranks, chunk, name):
    seq_len = sum(lengths)
    slices = masks.documents(lengths).slices(seq_len)
    owned = LAYOUTS[name].assign(Workload(slices, seq_len, chunk), ranks)
    assert owned.num_ranks == ranks and sum(owned.counts) == seq_len
    assert max(owned.counts) - min(owned.counts) <= max(chunk, 1)
    x = np.arange(seq_len)
    assert (x[owned.permutation][owned.restore] == x).all()
    assert sorted(owned.permutation.tolist()) == x.tolist()
    for rank, count in enumerate(owned.counts):
        assert len(owned.positions(rank)) == count


def test_the_pictures_in_the_docstrings():
    work = Workload(masks.causal().slices(8), 8, 1)

    def owners(name: str, ranks: int) -> list[int]:
        owned = LAYOUTS[name].assign(work, ranks)
        return np.repeat(np.arange(ranks), owned.counts)[owned.restore].tolist()

    assert owners("contiguous", 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert owners("zigzag", 4) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert owners("striped", 4) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert owners("round_robin", 4) == [0, 1, 2, 3, 3, 2, 1, 0]


def test_fewer_tokens_than_ranks():
    for layout in LAYOUTS.values():
        owned = layout.assign(Workload(masks.causal().slices(2), 2, 512), 5)
        assert sorted(owned.counts) == [0, 0, 0, 1, 1]


def test_components_are_the_documents_and_padding_is_its_own():
    mask = masks.documents([3, 0, 1, 4])
    assert components(mask.slices(8), 8).tolist() == [[0, 3], [3, 4], [4, 8]]
    some = mask.slices(8)[[0, 2]]
    assert components(some, 8).tolist() == [[0, 3], [3, 4], [4, 8]]
    assert components(some[:1], 8).tolist() == [[0, 3], [3, 8]]
    assert components(masks.sliding_window(2).slices(9), 9).tolist() == [[0, 9]]


def test_an_ownership_with_holes_or_doubles_is_refused():
    with pytest.raises(LongmeshError, match="must give each to exactly one rank; near position 4"):
        Ownership(8, (((0, 3),), ((4, 8),)))
    with pytest.raises(LongmeshError, match="near position 2"):
        Ownership(8, (((0, 3),), ((2, 8),)))
    assert collect(4, 2, [(2, 4, 0), (0, 2, 0)]).pieces == (((0, 4),), ())
