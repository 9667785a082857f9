"""Packed rows: every token once, labels of the same document, lengths that the mask takes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from longmesh.attention import collate_rows, masks, pack_documents
from longmesh.errors import LongmeshError

IGNORED = -100


def test_the_picture_in_the_docstring():
    rows = list(pack_documents([[1, 2, 3], torch.tensor([4, 5]), np.array([6, 7, 8, 9, 10])], 6))
    assert [row.tokens.tolist() for row in rows] == [[[1, 2, 3, 4, 5, 6]], [[7, 8, 9, 10, 0, 0]]]
    assert rows[0].labels.tolist() == [[2, 3, IGNORED, 5, IGNORED, 7]]
    assert rows[1].labels.tolist() == [[8, 9, 10, IGNORED, IGNORED, IGNORED]]
    assert [row.positions.tolist() for row in rows] == [[[0, 1, 2, 0, 1, 0]], [[0, 1, 2, 3, 0, 1]]]
    assert [row.lengths for row in rows] == [((3, 2, 1),), ((4, 2),)]


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7))
def test_every_token_is_packed_once_beside_its_successor(sizes, seq_len):
    numbers = itertools.count(1)
    documents = [[next(numbers) for _ in range(size)] for size in sizes]
    rows = list(pack_documents(documents, seq_len))
    tokens = [token for row in rows for token in row.tokens[0].tolist()]
    labels = [label for row in rows for label in row.labels[0].tolist()]
    assert len(tokens) == -(-sum(sizes) // seq_len) * seq_len
    assert tokens[: sum(sizes)] == [token for document in documents for token in document]
    expected = [label for document in documents if document for label in [*document[1:], IGNORED]]
    assert labels == expected + [IGNORED] * (len(tokens) - sum(sizes))
    for row in rows:
        (lengths,) = row.lengths
        assert min(lengths) > 0 and masks.documents(lengths).slices(seq_len).shape[0] == len(lengths)
        assert row.positions[0].tolist() == [i for length in lengths for i in range(length)]


def test_rows_become_a_batch_with_documents_of_their_own():
    rows = list(pack_documents([[1, 2, 3], [4, 5, 6, 7]], 4, pad_token=9, ignore_index=-1))
    batch = collate_rows(rows)
    assert batch.tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 9]]
    assert batch.labels.tolist() == [[2, 3, -1, 5], [6, 7, -1, -1]]
    assert batch.positions.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]
    assert masks.documents(batch.lengths).num_rows == 2


def test_an_endless_stream_is_read_as_far_as_needed():
    rows = pack_documents(itertools.repeat([1, 2, 3]), 4)
    assert [row.lengths for row in itertools.islice(rows, 3)] == [((3, 1),), ((2, 2),), ((1, 3),)]


NOT_TOKENS = (
    "pack_documents: a document is a (2, 3) tensor of torch.float32; give the token numbers of each document as one "
    "dim of integers"
)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: pack_documents([[1]], 0), "pack_documents(seq_len=0): a row has at least 1 token"),
        (
            lambda: list(pack_documents([torch.ones(2, 3)], 4)),
            NOT_TOKENS,
        ),
        (lambda: collate_rows([]), "collate_rows([]): a batch has at least 1 row"),
        (
            lambda: collate_rows([*pack_documents([[1, 2]], 2), *pack_documents([[1]], 3)]),
            "collate_rows: the rows have [2, 3] tokens; pack all of them with one seq_len",
        ),
    ],
)
def test_mistakes_are_told(call, text):
    with pytest.raises(LongmeshError) as error:
        call()
    assert str(error.value) == text
