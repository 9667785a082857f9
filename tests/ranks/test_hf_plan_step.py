"""plan_step and search_step where a world is: every rank gets the same plan, and the world stays as it is."""

import pytest
import torch
import torch.distributed as dist

import longmesh
from longmesh import MeshShape, named_cluster
from longmesh.errors import LongmeshError

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 131,
}  # fmt: skip


def plan() -> tuple[float, float, bool, int]:
    accelerator = torch.accelerator.current_accelerator()
    mesh = MeshShape((2, 2), ("dp", "cp"))
    step = longmesh.plan_step(TINY, mesh=mesh, seq_len=4096, cluster=named_cluster("h100"), recompute="full")
    is_untouched = dist.get_world_size() == 2 and dist.get_backend() == "gloo"
    total = torch.ones(1)
    dist.all_reduce(total)
    assert torch.accelerator.current_accelerator() == accelerator
    return step.step_seconds, step.memory.peak, is_untouched, int(total)


def test_plans_inside_a_world_leave_it_as_it_is(pool):
    first, second = pool.run(plan, ranks=2, timeout=300)
    assert first == second
    seconds, peak, is_untouched, total = first
    assert seconds > 0 and peak > 0 and is_untouched and total == 2


def test_the_search_ranks_what_fits_first():
    found = longmesh.search_step(TINY, ranks=8, seq_len=4096, cluster="h100", memory="80 GB", loss="whole")
    rates = [plan.tokens_per_second_per_gpu for plan in found if plan.fits]
    assert rates == sorted(rates, reverse=True) and len({plan.mesh for plan in found}) == 7
    alone = longmesh.plan_step(
        TINY, mesh=found[0].mesh, seq_len=4096, cluster="h100", memory="80 GB", loss="whole",
        recompute=found[0].options.recompute, offload=found[0].options.offload,
    )  # fmt: skip
    assert alone == found[0]


def refusals() -> list[str]:
    said = []
    for wrong in (
        {"mesh": {"pp": 2}},
        {"mesh": {"cp": 2}, "recompute": "some"},
        {"mesh": {"cp": 2}, "speed": 3},
    ):
        with pytest.raises(LongmeshError) as error:
            longmesh.plan_step(TINY, seq_len=64, cluster="h100", **wrong)
        said.append(str(error.value))
    return said


def test_what_is_wrong_is_said_before_anything_is_traced():
    axes, recompute, option = refusals()
    assert axes == "mesh={'pp': 2}: name its axes, of dp, cp, tp, ep"
    assert recompute == "recompute='some': use one of none, selective, full"
    assert option.startswith("speed= is no option of a step; use batch, rows, recompute, offload, ")
