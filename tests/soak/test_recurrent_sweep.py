"""Every recurrent layer on 1, 2, 3, 4 and 8 ranks: random lengths, documents, exchanges; against a loop over tokens."""

import random

import pytest
from ranks.test_recurrent import CASES, LAYERS, assert_exact, every_case


def drawn_cases(count: int) -> tuple:
    """Lengths from none to a few chunks; documents from single tokens to all of them; rows alike or not."""
    draw = random.Random(0)

    def lengths(seq_len: int) -> list[int]:
        cuts = sorted(draw.choices(range(seq_len + 1), k=draw.choice((0, 1, 2, 5, 12))))
        return [b - a for a, b in zip([0, *cuts], [*cuts, seq_len], strict=True)]

    cases = []
    for _ in range(count):
        seq_len = draw.choice((0, 1, 2, 7, 8, 31, 33, 64, 65, 97, 200))
        rows = [lengths(seq_len) for _ in range(2)]
        documents = draw.choice((None, rows[0], rows))
        cases.append((seq_len, documents, draw.choice(("gather", "scan", "auto"))))
    return tuple(cases)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_are_exact(large_pool, layer, ranks):
    cases = (*CASES, *drawn_cases(40))
    found = large_pool.run(every_case, ranks, (layer,), cases, ranks=ranks, timeout=900.0)
    assert_exact(found, len({str(case) for case in cases}))
