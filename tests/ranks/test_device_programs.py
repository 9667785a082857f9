"""What a user would run on GPUs, on ranks of the made-up device: the numbers that CPU ranks give.

Its process group refuses what NCCL refuses, so what only gloo takes fails here.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longmesh.attention import ContextParallel
from longmesh.attention.kernel.base import Score
from longmesh.testing.mesh import world_mesh
from support.device_models import MODELS
from support.device_programs import PROGRAMS, counted_steps, counted_trainer, hybrid_ring
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


def compare(program, expected, found):
    for want, got in zip(expected, found, strict=True):
        assert want.keys() == got.keys()
        for name, tensor in want.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=1e-4, atol=1e-4, msg=f"{program.__name__} {name}"
            )


@pytest.mark.parametrize("program", [*PROGRAMS, *MODELS, hybrid_ring], ids=lambda program: program.__name__)
def test_the_device_gives_what_cpus_give(pool, program):
    ranks = 4 if program is hybrid_ring else 2
    expected = pool.run(program, ranks=ranks, timeout=120)
    compare(program, expected, pool.run(program, ranks=ranks, timeout=120, device="sim"))


def test_a_train_step_reads_and_copies_nothing_after_the_first(pool):
    for first, *later in pool.run(counted_steps, ranks=2, device="sim", timeout=120):
        assert later == [(0, 0, 0)] * 2
        assert first[1] > 0  # a kernel is checked, indices are uploaded: counting works


def test_a_step_of_the_trainer_reads_nothing_of_a_device(pool):
    """Each batch has a plan of its own, which the ranks agree on at its first call: between CPUs, if they can."""
    for first, *later in pool.run(counted_trainer, ranks=2, device="sim+cpu", timeout=120):
        assert len(first) > 1 and later == [{}] * 3


def test_a_group_for_the_device_alone_carries_the_agreement_on_a_plan(pool):
    for _, *later in pool.run(counted_trainer, ranks=2, device="sim", timeout=120):
        for step in later:
            assert sum(step.values()) == 1 and "comm/agree.py" in next(iter(step))


def plan_under_a_compiler():
    """Which indices of a route are fake that was first made while shapes were traced."""
    how = {"layout": "round_robin", "chunk": 4, "exchange": "sparse", "num_heads": 2, "head_dim": 8}
    cp = ContextParallel(world_mesh(3), seq_len=64, **how)
    q = torch.randn(1, 2, cp.num_tokens, 8).to("sim")
    with FakeTensorMode(allow_non_fake_inputs=True):
        call = cp.prepare(q, q, q, Score())
    moves = [move for move in call.tasks[0].route.keys if move is not None]
    places = [place for move in moves for place in (move.take, move.place)]
    return [type(place).__name__ for place in places if isinstance(place, torch.Tensor)]


def test_indices_that_are_first_made_under_a_compiler_are_real(pool):
    for names in pool.run(plan_under_a_compiler, ranks=3, device="sim"):
        assert names and set(names) == {"SimTensor"}


def test_every_twelfth_op(pool):
    names = NAMES[::12]
    assert len(names) > 40
    assert pool.run(sweep, names, ranks=2, device="sim", timeout=120) == [{}] * 2
