"""The examples in the docstrings of public names run on two ranks, and print on rank 0 what is written there.

They find the public names of their module and of `longmesh`, torch, nn, F, Path, and `mesh`, one axis of two ranks.
"""

import doctest
import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import longmesh
from longmesh.attention import masks
from longmesh.testing import cpu_mesh
from support.folders import in_folder
from support.public_names import MODULES, docstring_of, public_names

# These start ranks of their own, or are about a process that is none.
IN_THIS_PROCESS = {
    "longmesh.errors": ["NotDistributedError"],
    "longmesh.testing": ["RankError", "RankPool"],
}


class OnRankZero(doctest.OutputChecker):
    """Other ranks hold other parts: what they print is not compared. What they raise is."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        is_other = dist.is_initialized() and dist.get_rank() != 0
        return is_other or super().check_output(want, got, optionflags)


def namespace(module: str) -> dict[str, object]:
    facade = importlib.import_module(module)
    names = {"torch": torch, "nn": nn, "F": F, "Path": Path, "masks": masks}
    for source in (longmesh, facade):
        names |= {name: getattr(source, name) for name in source.__all__}
    return names


def run_examples(module: str, names: list[str], folder: str = ".") -> list[str]:
    """What went wrong on this rank."""
    shared = namespace(module)
    if dist.is_initialized():
        shared["mesh"] = cpu_mesh(2)
    runner = doctest.DocTestRunner(OnRankZero(), verbose=False, optionflags=doctest.ELLIPSIS)
    said: list[str] = []
    with in_folder(folder):
        for name in names:
            test = doctest.DocTestParser().get_doctest(
                docstring_of(module, name), shared.copy(), name, None, 0
            )
            assert test.examples, f"{module}.{name} has no example"
            runner.run(test, out=said.append)
    return said


@pytest.mark.parametrize("module", MODULES)
def test_examples(pool, module, tmp_path):
    names = [name for name in public_names(module) if name not in IN_THIS_PROCESS.get(module, [])]
    for said in pool.run(run_examples, module, names, str(tmp_path), ranks=2, timeout=120.0):
        assert not said, "\n".join(said)


@pytest.mark.parametrize("module", IN_THIS_PROCESS)
def test_examples_outside_of_ranks(module):
    said = run_examples(module, IN_THIS_PROCESS[module])
    assert not said, "\n".join(said)
