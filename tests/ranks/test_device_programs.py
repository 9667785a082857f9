"""What a user would run on GPUs, on ranks of the made-up device: the numbers that CPU ranks give.

Its process group refuses what NCCL refuses, so what only gloo takes fails here. A model of transformers is not among
them: its scope makes tensors of a class of its own, which a tensor that has a class already cannot become.
"""

import pytest
import torch

from support.device_programs import PROGRAMS
from support.op_sweep import sweep_names, sweep_op

# The made-up device has no sparse tensors; torch's own backward of mvlgamma writes a DTensor into a plain tensor, and
# its linspace of tensors copies them to the CPU.
NOT_THERE = ("to_sparse", "resize_", "linspace.tensor_overload", "mvlgamma.mvlgamma_p_1", "mvlgamma.mvlgamma_p_3",
             "mvlgamma.mvlgamma_p_5", "view", "stft", "istft")  # fmt: skip
NAMES = [name for name in sweep_names() if name not in NOT_THERE]


def sweep(names):
    """What is not right, by op: values and gradients, or values alone where there are no gradients."""
    found = {}
    for name in names:
        texts = sweep_op(name, 1, True, (2,)) or sweep_op(name, 1, False, (2,)) or []
        wrong = [t for t in texts if t and not t.startswith("replicated")]
        if wrong:
            found[name] = wrong
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_device_gives_what_cpus_give(pool, program):
    expected = pool.run(program, ranks=2, timeout=120)
    found = pool.run(program, ranks=2, timeout=120, device="sim")
    for want, got in zip(expected, found, strict=True):
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=1e-4, atol=1e-4, msg=f"{program.__name__} {name}"
            )


@pytest.mark.parametrize("part", range(2))
def test_every_twelfth_op(pool, part):
    names = NAMES[part * 6 :: 12]
    assert len(names) > 40
    assert pool.run(sweep, names, ranks=2, device="sim", timeout=120) == [{}] * 2
