"""All causal-LM families of the installed transformers over a cut sequence, against one process: docs/models.md.

    python benchmarks/model_sweep.py --fresh             all families on 2 and 3 ranks: half an hour
    python benchmarks/model_sweep.py --seconds 240       those that have no row yet, for so long; again goes on
    python benchmarks/model_sweep.py llama bart          these again
    python benchmarks/model_sweep.py --page              the page, from benchmarks/results/model_sweep.tsv

A family is exact if loss and gradients are those of eager attention in one process for every kind of batch; what is
not is tried again with unknown="gather".
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from longmesh.testing import RankPool
from support import active_mechanisms, model_sweep, tiny_models

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "model_sweep.tsv"
PAGE = ROOT / "docs" / "models.md"
RANKS = (2, 3)
TIMEOUT = 120.0
NOT_SMALL = "not made small"
NO_REFERENCE = "no reference"
ORDER = ("failed", "wrong", "refused", NO_REFERENCE, "exact")
# Families with recurrent, convolution or linear-attention layers, which the page counts apart.
RECURRENT = frozenset(
    [
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "inkling_text",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    ]
)

HEAD = """# Which transformers models run over a split sequence

<!-- Made by benchmarks/model_sweep.py; edits are lost. -->

Look up here whether a model family gives the results of one process. For each causal-LM family of the installed
transformers, a tiny random model ran in `hf.context_parallel` on 2 and 3 ranks, and was compared with eager attention
in one process: the loss to 1e-5, every gradient to 1e-3. Each model ran on rows of 37 tokens of four kinds: plain,
packed documents (packed), padding on the right (right) and padding on the left (left). Your own model is
[inspected](how-to/transformers.md#which-models) when you first call it.

| outcome | meaning |
| --- | --- |
| `exact` | all four kinds of rows match |
| `partly` | the kinds that are named raise an error; the rest match |
| `refused` | an error before the first step names the layer |
| `no reference` | for the kinds that are named, the loss or gradients of one process are not finite |

The last column is the outcome with `unknown="gather"`, on 2 ranks: layers that cannot be split run on the whole
sequence on every rank.

The configurations make sure that every mechanism has an effect on these rows. Windows, chunks and blocks are shorter
than a row, indexers choose fewer keys than are visible, and routers choose fewer experts than there are. To check
this, the sweep turns off each mechanism in one process and compares the logits. These mechanisms have no effect on
the logits:

{idle}

{counts}

Measured on {made}. A sweep may take several runs; a row that is not measured again keeps its last outcome:

```sh
python benchmarks/model_sweep.py --seconds 240
```

| family | outcome | why | gathered |
| --- | --- | --- | --- |
"""


def run(
    pool: RankPool, family: str, ranks: int, whats: tuple[str, ...], settings: dict[str, str]
) -> list[dict[str, model_sweep.Outcome]]:
    return pool.run(model_sweep.sweep_family, ranks, family, whats, settings, ranks=ranks, timeout=TIMEOUT)


def gathered_outcome(pool: RankPool, family: str) -> str:
    """The worst of 2 ranks and all batches, where layers may be gathered."""
    try:
        found = run(pool, family, 2, model_sweep.WHATS, {"unknown": "gather"})
    except Exception:
        return "failed"
    kinds = {what: min((rank[what].kind for rank in found), key=ORDER.index) for what in model_sweep.WHATS}
    without = [what for what, kind in kinds.items() if kind == NO_REFERENCE]
    others = set(kinds.values()) - {NO_REFERENCE} or {NO_REFERENCE}
    worst = "partly" if others == {"exact", "refused"} else min(others, key=ORDER.index)
    return f"{worst}; {', '.join(without)}: {NO_REFERENCE}" if without and worst != NO_REFERENCE else worst


def outcome(pool: RankPool, family: str) -> tuple[str, str]:
    """The worst of all ranks, world sizes and batches; and which batches, or why."""
    kinds: dict[str, str] = {}
    texts: dict[str, str] = {}
    for ranks in RANKS:
        try:
            found = run(pool, family, ranks, model_sweep.WHATS, {})
        except Exception as error:
            return "failed", f"{type(error).__name__}: {str(error).splitlines()[0]}"
        for rank in found:
            for what, (kind, text) in rank.items():
                if ORDER.index(kind) < ORDER.index(kinds.get(what, "exact")):
                    kinds[what], texts[what] = kind, text
    bad = [what for what in model_sweep.WHATS if what in kinds]
    if not bad:
        return "exact", ""
    worst = min((kinds[what] for what in bad), key=ORDER.index)
    text = next(texts[what] for what in bad if kinds[what] == worst)
    if worst in ("refused", NO_REFERENCE) and len(bad) < len(model_sweep.WHATS):
        return "partly" if worst == "refused" else NO_REFERENCE, f"{', '.join(bad)}: {text}"
    return worst, text


def sweep(names: list[str], seconds: float) -> None:
    """Each family's row is written as soon as it is known, so a sweep that was stopped goes on where it was."""
    until = time.monotonic() + seconds
    with RankPool(max(RANKS)) as pool:
        for count, family in enumerate(names):
            if time.monotonic() > until:
                print(f"{len(names) - count} families are left: run it again")
                return
            row = examine(pool, family)
            print(*row, sep="\t", flush=True)
            keep(row)


def examine(pool: RankPool, family: str) -> list[str]:
    """Family, outcome, why, and the outcome with gathering."""
    try:
        pool.run(model_sweep.is_small, family, ranks=1, timeout=TIMEOUT)
    except Exception as error:
        return [family, NOT_SMALL, " ".join(str(error).splitlines()[-1].split()), ""]
    try:
        pool.run(model_sweep.all_runs, family, ranks=1, timeout=TIMEOUT)
    except Exception as error:
        return [family, "failed", " ".join(str(error).splitlines()[-1].split()), ""]
    kind, why = outcome(pool, family)
    return [family, kind, " ".join(why.split()), kind if kind == "exact" else gathered_outcome(pool, family)]


def known_rows() -> dict[str, list[str]]:
    lines = RESULTS.read_text("utf-8").splitlines() if RESULTS.exists() else []
    rows = [line.split("\t") for line in lines if not line.startswith("#")]
    return {row[0]: row for row in rows}


def keep(row: list[str]) -> None:
    import transformers

    made = (
        f"# {datetime.date.today()} with transformers {transformers.__version__}, torch {torch.__version__}"
    )
    rows = {**known_rows(), row[0]: row}
    lines = ["\t".join(rows[family]) for family in sorted(rows)]
    RESULTS.write_text("\n".join([made, *lines]) + "\n", encoding="utf-8")


def page() -> str:
    made = RESULTS.read_text("utf-8").splitlines()[0]
    every = list(known_rows().values())
    rows = [row for row in every if row[1] != NOT_SMALL]
    left_out = [row[0] for row in every if row[1] == NOT_SMALL]
    kinds, gathered = [row[1] for row in rows], sum(row[3] == "exact" for row in rows)
    shown = ("exact", "partly", "refused", "wrong", "failed")
    shown += (NO_REFERENCE,) if NO_REFERENCE in kinds else ()
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in shown)
    text = f'{len(rows)} families: {counts}; {gathered} are exact with `unknown="gather"`.'
    plain = [row for row in rows if row[0] not in RECURRENT]
    exact, after = (sum(row[column] == "exact" for row in plain) for column in (1, 3))
    text += f'\nOf the {len(plain)} without recurrent layers, {exact} are exact, and {after} with `unknown="gather"`.'
    if left_out:
        text += f"\n\nNot tried, because there is no tiny configuration: {', '.join(left_out)}."
    table = "".join(f"| {name} | {kind} | {_cell(why)} | {after} |\n" for name, kind, why, after in rows)
    idle = "\n".join(
        f"- {family}: {', '.join(f'`{name}`' for name in sorted(names))}: {why}"
        for family, (names, why) in active_mechanisms.IDLE.items()
    )
    return HEAD.format(counts=text, made=made.removeprefix("# "), idle=idle) + table


def _cell(why: str) -> str:
    """The layer and what it does, without what every refusal says."""
    text = why.replace("hf.context_parallel can't cut ", "").split("; unknown='gather'")[0]
    text = text.split(": a recurrent layer, a convolution")[0].replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) < 300 else f"{text[:300]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", help="to be run again; default: those that have no row yet")
    parser.add_argument("--fresh", action="store_true", help="forget all rows first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no family after so many")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.fresh:
        RESULTS.unlink(missing_ok=True)
    if not options.page:
        rows = known_rows()
        names = options.families or [name for name in tiny_models.families() if name not in rows]
        sweep(names, options.seconds)
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
