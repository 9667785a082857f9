"""What a user would run on GPUs, on ranks of the made-up device: the numbers that CPU ranks give.

Its process group refuses what NCCL refuses, so what only gloo takes fails here.
"""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from longmesh import Shard, checkpoint, distribute_tensor, hf
from longmesh.attention import ContextParallel
from longmesh.attention.kernel.base import Score
from longmesh.cache import PagePool
from longmesh.comm.agree import check_every_call
from longmesh.testing.device import DeviceCounts
from longmesh.testing.mesh import world_mesh
from support.device_models import MODELS, models_of_host_batches
from support.device_programs import PROGRAMS, counted_steps, counted_trainer, hybrid_ring
from support.model_sweep import make_batch
from support.op_sweep import sweep_names, sweep_op
from support.tiny_models import make_model

# The made-up device has no sparse tensors; torch's own backward of mvlgamma writes a DTensor into a plain tensor, and
# its linspace of tensors copies them to the CPU.
NOT_THERE = ("to_sparse", "resize_", "resize_as_", "linspace.tensor_overload", "mvlgamma.mvlgamma_p_1",
             "mvlgamma.mvlgamma_p_3", "mvlgamma.mvlgamma_p_5", "view", "stft", "istft")  # fmt: skip
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


def counted_serving() -> list[tuple[str, int, int]]:
    """What the host reads and copies from the device: each step of a cache, a batch on the host, a checkpoint."""
    pool = PagePool(world_mesh(dist.get_world_size()), num_pages=30, page=4, layers=3, kv_heads=2, head_dim=8)
    sequence, found = pool.sequence(), []
    for tokens in (9, 1, 1):
        given = [[torch.randn(tokens, heads, 8).to("sim") for heads in (4, 2, 2)] for _ in range(3)]
        with DeviceCounts() as counts:
            step = pool.step([(sequence, tokens)])
            for layer, (q, k, v) in enumerate(given):
                step.attend(layer, q, k, v)
            step.commit()
        found.append(("cache", counts.host_reads, counts.downloads))
    hf.register()
    model = make_model("llama", "longmesh").to("sim")
    for _ in range(2):
        with (
            DeviceCounts() as counts,
            check_every_call(False),  # as for users: batches are compared at a mesh's first scope
            hf.context_parallel(pool.mesh, make_batch("packed"), model=model) as part,
        ):
            model(**part, use_cache=False).loss.backward()
        found.append(("batch", counts.host_reads, counts.downloads))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    saved = {str(i): distribute_tensor(torch.ones(6, 5).to("sim"), pool.mesh, [Shard(0)]) for i in range(3)}
    with DeviceCounts() as counts:
        checkpoint.save(saved, Path(folder[0]) / "saved")
    found.append(("save", counts.host_reads, counts.downloads))
    with DeviceCounts() as counts:
        checkpoint.load(saved, Path(folder[0]) / "saved")
    return [*found, ("load", counts.host_reads, counts.downloads)]


def test_what_must_be_read_is_read_once(pool):
    """A step of a cache: what the ranks compare, here and of the others. A batch on the host: transformers itself looks
    for packed sequences in each. A checkpoint: each tensor, once."""
    for first, *steps, _, batch, save, load in pool.run(
        counted_serving, ranks=2, device="sim+cpu", timeout=120
    ):
        assert first == ("cache", 0, 2) and steps == [first] * 2
        assert batch == ("batch", 1, 0)
        assert save == ("save", 0, 3) and load == ("load", 0, 0)


def test_batches_on_the_host_give_the_same(pool):
    expected = pool.run(models_of_host_batches, ranks=2, timeout=120)
    compare(
        models_of_host_batches,
        expected,
        pool.run(models_of_host_batches, ranks=2, timeout=120, device="sim+cpu"),
    )


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
