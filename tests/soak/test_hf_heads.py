"""Classifiers, masked language models, encoders and encoder-decoders over a cut sequence: exact or refused.

`python tests/soak/test_hf_heads.py [TASK] [FAMILY...]` prints each.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
import torch

from longmesh.testing import RankPool
from support.head_sweep import TASKS, families_of, runs_alone, sweep_head

# Heads of whole rows, and decoders that get other tokens than their encoders.
REFUSED = [
    "MODEL_FOR_SEQUENCE_CLASSIFICATION",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM",
    "MODEL_FOR_MULTIPLE_CHOICE",
    "MODEL_FOR_NEXT_SENTENCE_PREDICTION",
]


@pytest.mark.parametrize("task", TASKS)
def test_heads_are_exact_or_refused(pool, task):
    kinds: list[str] = []
    for family in families_of(task):
        try:
            pool.run(runs_alone, task, family, ranks=1, timeout=60.0)
        except Exception:  # wants more than tokens, or could not be made small: nothing to compare with
            continue
        for rank in pool.run(sweep_head, 2, task, family, ranks=2, timeout=120.0):
            for what, outcome in rank.items():
                assert outcome.kind in ("exact", "refused"), (task, family, what, outcome)
                kinds.append(outcome.kind)
    assert "exact" in kinds or task in REFUSED


def main() -> None:
    torch.set_num_threads(1)
    pool = RankPool(2)
    for task in sys.argv[1:2] or list(TASKS):
        for family in sys.argv[2:] or families_of(task):
            try:
                pool.run(runs_alone, task, family, ranks=1, timeout=60.0)
            except Exception as error:
                print(
                    task, family, "", "no reference", str(error).splitlines()[-1][:100], sep=" | ", flush=True
                )
                continue
            try:
                found = pool.run(sweep_head, 2, task, family, ranks=2, timeout=60.0)
            except Exception as error:
                print(
                    task,
                    family,
                    "",
                    "hung or failed",
                    str(error).splitlines()[-1][:200],
                    sep=" | ",
                    flush=True,
                )
                pool.__exit__(None, None, None)
                pool = RankPool(2)
                continue
            for what, (kind, text) in found[0].items():
                same = "" if all(rank[what].kind == kind for rank in found) else " on this rank"
                print(task, family, what, kind + same, " ".join(text.split())[:300], sep=" | ", flush=True)
    pool.__exit__(None, None, None)


if __name__ == "__main__":
    main()
