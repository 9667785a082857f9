"""Random configurations of transformers models on random batches, on 2 and 3 ranks: exactly what one process computes.

`python tests/soak/test_hf_random.py 100 200` runs the seeds from 100 to 199 and prints each.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch

from longmesh.testing import RankPool
from support.random_models import run_seed
from support.random_recurrent import RECURRENT

SEEDS = 200


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_drawn_models_are_exact(pool, first):
    for seed in range(first, first + 10):
        for what, outcome in pool.run(run_seed, seed, 2 + seed % 2, ranks=2 + seed % 2, timeout=120.0):
            assert outcome.kind == "exact", (seed, what, outcome)


def run_recurrent_seed(seed: int, ranks: int):
    return run_seed(seed, ranks, RECURRENT)


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_drawn_models_with_recurrent_layers_are_exact(pool, first):
    """Padding between tokens is refused: a state would run through it."""
    for seed in range(first, first + 10):
        ranks = 2 + seed % 2
        for what, outcome in pool.run(run_recurrent_seed, seed, ranks, ranks=ranks, timeout=120.0):
            is_hole = "holes" in what and "padding between tokens" in outcome.text
            assert outcome.kind == ("refused" if is_hole else "exact"), (seed, what, outcome)


def main() -> None:
    torch.set_num_threads(1)
    pool = RankPool(3)
    counts: dict[str, int] = {}
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        ranks = 2 + seed % 2
        try:
            found = pool.run(run_seed, seed, ranks, ranks=ranks, timeout=60.0)
            what = found[0][0]
            kinds = {outcome.kind for _, outcome in found}
            kind = kinds.pop() if len(kinds) == 1 else "ranks differ"
            text = found[0][1].text
        except Exception as error:
            what, kind, text = "", "hung or failed", str(error)
            pool.__exit__(None, None, None)
            pool = RankPool(3)
        counts[kind] = counts.get(kind, 0) + 1
        print(seed, f"{ranks} ranks", what, kind, text.replace("\n", " ")[:300], sep=" | ", flush=True)
    print(counts)
    pool.__exit__(None, None, None)


if __name__ == "__main__":
    main()
