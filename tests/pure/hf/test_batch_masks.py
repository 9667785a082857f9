"""Documents of a batch: found where positions begin again at 0, refused where positions don't tell."""

import pytest
import torch

from longmesh.attention import masks
from longmesh.errors import LongmeshError
from longmesh.hf.whole_batch import WholeBatch

IDS = torch.arange(3, 12)[None]
SHARED_PROMPT = [0, 1, 2, 3, 4, 5, 6, 4, 5]  # two answers, of 3 and 2 tokens, to a prompt of 4


def visible(positions: list[int], mask: masks.Mask | None = None, **batch):
    batch = {"input_ids": IDS, "position_ids": torch.tensor([positions]), **batch}
    return WholeBatch.of(batch, None).visible(batch, mask)


def test_positions_that_begin_at_0_again_are_documents():
    assert visible([0, 1, 2, 3, 0, 1, 2, 0, 0]) == masks.documents([4, 3, 1, 1], within=masks.full())
    assert visible([5, 6, 7, 8, 9, 10, 11, 12, 13]) is None


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        (SHARED_PROMPT, "go back from 6 to 4 in row 0"),
        ([2, 3, 4, 5, 2, 3, 4, 2, 3], "go back from 5 to 2 in row 0"),
        ([0, 1, 2, 2, 3, 4, 5, 6, 7], "go back from 2 to 2 in row 0"),
        ([0, 1, 2, 4, 5, 6, 7, 8, 9], "jump from 2 to 4 in row 0"),
    ],
)
def test_positions_that_may_be_one_document_or_two_are_refused(positions, text):
    with pytest.raises(
        LongmeshError, match=f"{text}, which may be one document or two.*pass an attention_mask of"
    ):
        visible(positions)


def test_a_mask_says_what_answers_to_one_prompt_see():
    answers = masks.mask_mod(lambda b, h, q_idx, kv_idx: (kv_idx < 4) | ((kv_idx < 7) == (q_idx < 7)))
    assert visible(SHARED_PROMPT, answers, attention_mask=torch.ones(1, 9, dtype=torch.long)) is answers
