"""The blocks of a chunk of a prompt: each visible pair of this rank's keys is in exactly one."""

import random

import numpy as np

from longmesh.cache.bookkeeping import Book
from longmesh.cache.chunk import blocks_of, runs_of
from longmesh.cache.plan import CacheStep, Keys
from longmesh.plan import named_cluster


def count_pairs(keys: Keys, window: int | None) -> np.ndarray:
    """(queries, local tokens): how many blocks hold each pair."""
    entry = keys.entry
    found = np.zeros((entry.num_tokens, sum(stop - start for start, stop in keys.spans)), dtype=int)
    for block in blocks_of(runs_of(keys), entry.start, entry.num_tokens, window):
        rows, columns = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
        i, j = np.mgrid[rows, columns]
        found[rows, columns] += (j - i >= block.lo) & (j - i <= block.hi)
    return found


def test_blocks_cover_what_is_seen_once():
    draw = random.Random(0)
    for _ in range(300):
        ranks = draw.randint(1, 4)
        book = Book(ranks, 200, draw.choice((1, 2, 3, 7, 16)))
        sequence, past, new = book.new(draw.randint(1, ranks)), draw.randint(0, 60), draw.randint(1, 60)
        book.extend([(sequence, past)])
        book.extend([(sequence, new)])
        if past > 3 and draw.random() < 0.3:
            book.hide(sequence, (1, draw.randint(2, past)))
        window = draw.choice((None, None, 1, 5, 30))
        shares = CacheStep.of([(sequence, new)], ranks, named_cluster("cpu")).shares(window)
        for keys in (keys for rank in range(ranks) for keys in shares.keys(rank)):
            entry, slot, spans = keys
            tokens = [i for start, stop in spans for i in range(start, stop)]
            k = np.array([sequence.placement.position(slot, i) for i in tokens])
            q = np.arange(entry.start, entry.stop)[:, None]
            seen = (k <= q) & (window is None or k > q - window)
            assert (count_pairs(keys, window) == seen).all()


def test_a_chunk_over_two_ranks_is_few_blocks():
    book = Book(2, 200, 256)
    sequence = book.new()
    book.extend([(sequence, 8192)])
    book.extend([(sequence, 8192)])
    (keys,) = CacheStep.of([(sequence, 8192)], 2, named_cluster("cpu")).shares(None).keys(0)
    blocks = blocks_of(runs_of(keys), 8192, 8192, None)
    assert (
        len(blocks) == 1 + 15 + 2 * 16
    )  # the past, the halves, a diagonal and what is below it of each page
    assert max(block.k_stop - block.k_start for block in blocks[1:]) == 2048
