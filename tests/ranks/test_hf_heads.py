"""Heads of transformers beside causal language models, one of each kind: exact or refused; all in tests/soak."""

import pytest

from support.head_sweep import sweep_head

HEADS = {
    ("MODEL", "git"): {"plain": "exact", "right": "exact"},
    ("MODEL_FOR_SEQUENCE_CLASSIFICATION", "gpt2"): {},
    ("MODEL_FOR_QUESTION_ANSWERING", "bert"): {"plain": "exact", "right": "exact"},
    ("MODEL_FOR_PRETRAINING", "bert"): {},
    ("MODEL_FOR_NEXT_SENTENCE_PREDICTION", "bert"): {},
    ("MODEL_FOR_MULTIPLE_CHOICE", "bert"): {},
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM", "bart"): {},
    ("MODEL_FOR_TOKEN_CLASSIFICATION", "gpt2"): dict.fromkeys(
        ("plain", "right", "plain labels", "right labels", "constant labels"), "exact"
    ),
}


@pytest.mark.parametrize(("task", "family"), HEADS)
def test_a_head_is_exact_where_it_is_of_tokens_and_else_refused(pool, task, family):
    for found in pool.run(sweep_head, 2, task, family, ranks=2, timeout=120.0):
        expected = dict.fromkeys(found, "refused") | HEADS[task, family]
        assert {what: outcome.kind for what, outcome in found.items()} == expected, found
