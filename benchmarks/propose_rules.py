"""Lines that the rule table could have and has not, found by trying them out on samples of torch's `op_db`.

    python benchmarks/propose_rules.py mm "nn.functional.*" [--samples 3] [--grad]

Prints one line a proposal: the aten op, the shapes it was tried on, the placements of inputs and outputs on one mesh
axis. With --grad also for the aten ops of the backward. Pure: no ranks. What is tried: tests/support/rule_proposals.py.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.op_plan import functional_form, rule_name
from longmesh.tensor.tree import all_tensors
from support.op_sweep import OPS, sweep_names
from support.rule_check import calls_of, describe
from support.rule_proposals import propose_lines


def run(name: str, sample: Any, grad: bool) -> None:
    """The op, and its gradients."""
    result = OPS[name](sample.input, *sample.args, **sample.kwargs)
    outputs = [t for t in all_tensors(result) if t.requires_grad]
    if grad and outputs:
        torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])


def proposals_of(name: str, num_samples: int, grad: bool) -> dict[str, list[str]]:
    """By aten op: the proposals of the op's first samples, each with its shapes."""
    op = OPS[name]
    torch.manual_seed(0)
    found: dict[str, list[str]] = {}
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=grad and op.supports_autograd))
    for sample in samples[:num_samples]:
        for func, args, kwargs in calls_of(lambda s=sample: run(name, s, grad), grad):
            func = functional_form(func) or func
            if "out" in kwargs:
                continue
            lines = propose_lines(func, args, kwargs)
            shapes = ", ".join(str(m.shape) for m in describe(func, args, kwargs).tensors)
            texts = ["too many inputs to try"] if lines is None else [str(entry) for entry in lines]
            for text in texts:
                known = found.setdefault(rule_name(func), [])
                if not any(entry.startswith(text) for entry in known):
                    known.append(f"{text}   on {shapes}")
    return found


def print_proposals(name: str, num_samples: int, grad: bool) -> None:
    handled = {rule_name(func) for func in dispatch.handlers}
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
    forked = multiprocessing.get_context("fork")
    for name in sweep_names():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.patterns):
            continue
        # A process of its own: some kernels end theirs when a part has no elements.
        process = forked.Process(target=print_proposals, args=(name, options.samples, options.grad))
        process.start()
        process.join()
        if process.exitcode:
            print(f"{name}: ended with {process.exitcode}, on parts that torch can't run", flush=True)


if __name__ == "__main__":
    main()
