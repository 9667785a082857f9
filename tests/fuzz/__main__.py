"""`python -m fuzz --programs 2000 --seed 0`: run random programs and print those that fail, shortened."""

import argparse
import sys
import time
import warnings
from collections import Counter

import torch
import torch._dynamo

from fuzz.judge import judge, shrink
from fuzz.programs import write_program
from longmesh.testing import RankPool


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; the others follow")
    parser.add_argument("--stop-after", type=int, default=20, help="end after so many failures")
    parser.add_argument("--wide", action="store_true", help="statements that reach further, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts, start = Counter(), time.monotonic()
    with RankPool(4) as pool:
        for seed in range(options.seed, options.seed + options.programs):
            program = write_program(seed, options.wide)
            outcome = judge(program, pool)
            counts[outcome.kind] += 1
            if outcome.is_failure:
                program, outcome = shrink(program, outcome, pool)
                print(f"\n{outcome.kind} at statement {outcome.where}: {outcome.text}\n{program}", flush=True)
            if sum(n for kind, n in counts.items() if kind not in ("right", "refused")) >= options.stop_after:
                break
            if sum(counts.values()) % 100 == 0:
                print(f"{dict(counts)} in {time.monotonic() - start:.0f} s", flush=True)
    print(f"{sum(counts.values())} programs: {dict(counts)} in {time.monotonic() - start:.0f} s")
    sys.exit(any(kind not in ("right", "refused") for kind in counts))


if __name__ == "__main__":
    main()
