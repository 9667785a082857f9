"""All of 256 greedy tokens are those of one process, in float64: families, ranks, pages, prompts shorter than ranks."""

import functools

import pytest
import torch

from support.cached_models import FAMILIES
from support.cached_tokens import tokens_alone, tokens_over_ranks

CASES = [(length, page, length > 20) for length in (1, 3, 45) for page in (1, 16, 256)]
alone = functools.cache(tokens_alone)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_256_greedy_tokens_are_those_of_one_process(pool, family, ranks):
    for case in CASES:
        wanted = alone(family, case[0], 256)
        for (found,) in pool.run(tokens_over_ranks, ranks, family, [case], 256, ranks=ranks, timeout=600.0):
            assert torch.equal(found, wanted), case
