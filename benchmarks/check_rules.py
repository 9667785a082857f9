"""Every line of every rule against plain torch, on simulated ranks, with the samples of torch's `op_db`.

    python benchmarks/check_rules.py [PATTERN ...] [--samples 2] [--ranks 2 3 7]

Inputs are cut as a line says, the op runs on every rank's parts, and its outputs are put together as the line says:
that must be the op on the whole. With 7 ranks most pieces are uneven and some are empty. Prints what does
not hold. Pure: no ranks are started, and nothing is sent.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.op_sweep import sweep_names
from support.rule_samples import check_op, in_own_process


def print_failures(name: str, num_samples: int, ranks: tuple[int, ...]) -> None:
    failures = check_op(name, num_samples, True, ranks).failures
    for failure in failures[:3]:
        text = f"{failure.op} {failure.shapes}: {failure.line} on {failure.ranks}: {failure.reason}"
        print(f"{name}: {text[:400]}", flush=True)
    sys.exit(min(len(failures), 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 7])
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [n for n in sweep_names() if any(fnmatch.fnmatch(n, p) for p in options.patterns)]
    num_failed = 0
    for name in names:
        code = in_own_process(print_failures, name, options.samples, tuple(options.ranks))
        num_failed += code != 0
        if code not in (0, 1):
            print(f"{name}: a kernel ended the process ({code})", flush=True)
    print(f"{len(names)} ops, {num_failed} with lines that don't hold")


if __name__ == "__main__":
    main()
