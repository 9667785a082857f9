"""A sequence cut over ranks keeps an engine for each mask it met, and not without bound."""

from longmesh.attention import masks
from longmesh.attention.scope.cut_sequence import CutSequence
from longmesh.attention.scope.sequence_engines import MOST_ENGINES


def test_engines_are_kept_while_they_are_used_and_their_number_is_bounded():
    cut = CutSequence(None, seq_len=200)
    often = cut.engine(is_causal=True, window=3)
    for width in range(2 * MOST_ENGINES):
        cut.engine_with(masks.sliding_window(width))
        assert cut.engine(is_causal=True, window=3) is often
    assert len(cut._engines) == MOST_ENGINES
    assert cut.engine(is_causal=True) is cut.lead
    newest = masks.sliding_window(2 * MOST_ENGINES - 1)
    assert cut.engine_with(newest) is cut.engine_with(newest)


def test_the_mask_of_the_sequence_holds_for_every_engine():
    documents = masks.documents([3, 5], within=masks.full())
    cut = CutSequence(None, seq_len=8, mask=documents)
    assert cut.engine(is_causal=False) is cut.engine_with(masks.full()) is cut.lead
    assert cut.engine(is_causal=True) is cut.engine_with(masks.causal()) is not cut.lead
    assert cut.engine(is_causal=True).plan.mask == documents & masks.causal()
