"""All causal-LM families of the installed transformers over a cut sequence, against one process: docs/models.md.

    python benchmarks/model_sweep.py                     all families on 2 and 3 ranks: a quarter of an hour
    python benchmarks/model_sweep.py llama bart          some, printed and not kept
    python benchmarks/model_sweep.py --page              the page, from benchmarks/results/model_sweep.tsv

A family is exact if loss and gradients are those of eager attention in one process for every kind of batch; what is
not is tried again with unknown="gather".
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from longmesh.testing import RankPool
from support import model_sweep, tiny_models

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "model_sweep.tsv"
PAGE = ROOT / "docs" / "models.md"
RANKS = (2, 3)
TIMEOUT = 180.0
ORDER = ("failed", "wrong", "refused", "exact")

HEAD = """# Which transformers models run over a cut sequence

<!-- Made by benchmarks/model_sweep.py; edits are lost. -->

Tiny random models of causal-LM families, as far as the sweep came, run in `hf.context_parallel` on 2 and 3 ranks and
compared with eager attention in one process: loss to 1e-5, every gradient to 1e-3. Rows of 37 tokens: plain, packed
documents (packed), padding on the right (right) and on the left (left).
`exact`: all of these. `partly`: the kinds that are named are refused, the others exact. `refused`: an error before the
first step that names the layer. The last column is with `unknown="gather"`, which runs such layers on the whole
sequence on every rank; on 2 ranks, for plain rows and padding on the right. A model of another kind, or one of yours,
is looked at in the same way when it is first called.

{counts}

Made on {made}:

```sh
python benchmarks/model_sweep.py
```

| family | outcome | why | gathered |
| --- | --- | --- | --- |
"""


def run(
    pool: RankPool, family: str, ranks: int, whats: tuple[str, ...], settings: dict[str, str]
) -> list[dict[str, model_sweep.Outcome]]:
    return pool.run(model_sweep.sweep_family, ranks, family, whats, settings, ranks=ranks, timeout=TIMEOUT)


def gathered_outcome(pool: RankPool, family: str) -> str:
    """The worst of 2 ranks on plain and padded rows, where layers may be gathered."""
    try:
        found = run(pool, family, 2, ("plain", "right"), {"unknown": "gather"})
    except Exception:
        return "failed"
    return min((kind for rank in found for kind, _ in rank.values()), key=ORDER.index)


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
    if worst == "refused" and len(bad) < len(model_sweep.WHATS):
        return "partly", f"{', '.join(bad)}: {text}"
    return worst, text


def sweep(names: list[str], keep: bool) -> None:
    """All families first, then those again that were not exact, with gathering; kept as far as it came."""
    rows: dict[str, list[str]] = {}
    with RankPool(max(RANKS)) as pool:
        for family in names:
            try:
                pool.run(model_sweep.is_small, family, ranks=1, timeout=TIMEOUT)
            except Exception as error:
                print(f"{family}: not made small ({str(error).splitlines()[-1]})", flush=True)
                continue
            kind, why = outcome(pool, family)
            rows[family] = [family, kind, " ".join(why.split()), "exact" if kind == "exact" else "not tried"]
            report(rows, family, keep)
        for family, row in rows.items():
            if row[1] != "exact":
                row[3] = gathered_outcome(pool, family)
                report(rows, family, keep)


def report(rows: dict[str, list[str]], family: str, keep: bool) -> None:
    import transformers

    print(*rows[family], sep="\t", flush=True)
    if keep:
        made = f"# {datetime.date.today()} with transformers {transformers.__version__}, torch {torch.__version__}"
        lines = ["\t".join(row) for row in rows.values()]
        RESULTS.write_text("\n".join([made, *lines]) + "\n", encoding="utf-8")


def page() -> str:
    made, *lines = RESULTS.read_text("utf-8").splitlines()
    rows = [line.split("\t") for line in lines]
    kinds = [row[1] for row in rows]
    counts = ", ".join(
        f"{kinds.count(kind)} {kind}" for kind in ("exact", "partly", "refused", "wrong", "failed")
    )
    gathered = sum(row[3] == "exact" for row in rows)
    tried = sum(row[3] != "not tried" for row in rows)
    text = (
        f"{len(rows)} families: {counts}; of {tried} that were run so, {gathered} are exact with gathering."
    )
    table = "".join(f"| {name} | {kind} | {_cell(why)} | {after} |\n" for name, kind, why, after in rows)
    return HEAD.format(counts=text, made=made.removeprefix("# ")) + table


def _cell(why: str) -> str:
    """The layer and what it does, without what every refusal says."""
    text = why.replace("hf.context_parallel can't cut ", "").split("; unknown='gather'")[0]
    text = text.split(": a recurrent layer, a convolution")[0].replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) < 300 else f"{text[:300]}..."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.page:
        sweep(options.families or tiny_models.families(), keep=not options.families)
    if not options.families:
        PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
