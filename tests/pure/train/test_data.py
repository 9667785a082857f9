"""The text: the same for everybody with the same seed, and from any step on."""

from itertools import islice

import pytest
import torch

from longmesh.errors import LongmeshError
from longmesh.train.data import START, Corpus


def test_a_step_is_the_same_wherever_one_starts():
    from_start = list(islice(Corpus(3).steps(257, 2, first=0), 6))
    later = list(islice(Corpus(3).steps(257, 2, first=4), 2))
    for (a, b), (c, d) in zip(from_start[4:], later, strict=True):
        assert torch.equal(a.tokens, c.tokens) and torch.equal(b.labels, d.labels)
        assert a.lengths == c.lengths


def test_documents_start_with_a_mark_and_are_bytes():
    ((row,),) = islice(Corpus(0).steps(16384, 1, first=0), 1)
    ends = torch.tensor(row.lengths[0]).cumsum(0)
    assert len(ends) > 3 and ends[-1] == 16384
    starts = (row.tokens[0] == START).nonzero().flatten()
    assert starts.tolist() == [0, *ends[:-1].tolist()]
    last_of_row = int(row.labels[0, -1] == -100)
    assert (row.labels == -100).sum() == len(ends) - 1 + last_of_row
    assert row.tokens.min() >= 0 and row.tokens.max() == START


def test_seeds_differ_and_digests_do_not():
    one, other = Corpus(0), Corpus(1)
    assert one.digest == other.digest
    ((a,),), ((b,),) = (islice(corpus.steps(64, 1, first=0), 1) for corpus in (one, other))
    assert not torch.equal(a.tokens, b.tokens)


def test_a_python_without_sources_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(
        LongmeshError, match=r"no Python sources in .* to train on; use a Python whose standard library"
    ):
        Corpus(0)
