"""Lines that the rule table could have and has not, found by trying them out on samples of torch's `op_db`.

    python benchmarks/propose_rules.py mm "nn.functional.*" [--samples 3] [--grad]

Prints one line a proposal: the aten op, the shapes it was tried on, the placements of inputs and outputs on one mesh
axis. With --grad also for the aten ops of the backward. Pure: no ranks. What is tried: tests/support/rule_proposals.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from longmesh.rules.op_facts import rule_name
from longmesh.rules.table import TABLE
from support.op_sweep import sweep_names
from support.rule_check import describe
from support.rule_proposals import propose_lines
from support.rule_samples import in_own_process, sample_calls


def proposals_of(name: str, num_samples: int, grad: bool) -> dict[str, list[str]]:
    """By aten op: the proposals of the op's first samples, each with its shapes."""
    found: dict[str, list[str]] = {}
    for func, args, kwargs in sample_calls(name, num_samples, grad):
        lines = propose_lines(func, args, kwargs)
        shapes = ", ".join(str(m.shape) for m in describe(func, args, kwargs).tensors)
        texts = ["too many inputs to try"] if lines is None else [str(entry) for entry in lines]
        for text in texts:
            known = found.setdefault(rule_name(func), [])
            if not any(entry.startswith(text) for entry in known):
                known.append(f"{text}   on {shapes}")
    return found


def print_proposals(name: str, num_samples: int, grad: bool) -> None:
    handled = {name for name, rule in TABLE.items() if rule.program is not None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = proposals_of(name, num_samples, grad)
    for aten, texts in found.items():
        note = " (has a handler)" if aten in handled else ""
        for text in texts:
            print(f"{name}: {aten}{note}: {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("patterns", nargs="+")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--grad", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in sweep_names():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.patterns):
            continue
        code = in_own_process(print_proposals, name, options.samples, options.grad)
        if code:
            print(f"{name}: ended with {code}, on parts that torch can't run", flush=True)


if __name__ == "__main__":
    main()
