"""The memory of a step, of a made-up model: 4 equal layers of 1,000 parameters that save 5,000 bytes each."""

import pytest

from longmesh.step.attention_cost import AttentionCost
from longmesh.step.memory import StepMemory, measure_memory
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.trace import LayerTrace, ModelTrace, Saved, Work

NOTHING = Work()
NO_ATTENTION = AttentionCost((), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 10)


def layer(name: str, repeats: int, parameters: int, saved: float) -> LayerTrace:
    kept = (Saved(saved, "mm", "product", True),)
    peaks = {"forward_peak": saved, "backward_peak": 0.0}
    works = (NOTHING, NOTHING, NOTHING, NOTHING)
    return LayerTrace(
        name, repeats, *works, kept, **peaks, input_bytes=100.0, parameters=parameters, expert_parameters=0, calls=()
    )  # fmt: skip


def memory_of(saved: float = 5000.0, **options: object) -> StepMemory:
    trace = ModelTrace(
        "made up", 10, layer("outside", 1, 0, 0.0), (layer("layer", 4, 1000, saved),), 8, 2, "zigzag"
    )
    machine = StepMachine.of_gpus("h100")
    return measure_memory(trace, [NO_ATTENTION], StepMesh(), machine, StepOptions(**options))  # type: ignore[arg-type]


def phases(memory: StepMemory) -> dict[str, float]:
    """The bytes of each phase beside parameters (8,000) and states (16,000), allocator and runtime left out."""
    by_kind = dict(memory.by_kind)
    beside = by_kind["allocator"] + by_kind["runtime"] + 8000 + 16000
    return {name: round(size - beside, 3) for name, size in memory.phases}


def test_gradients_are_not_there_before_backward():
    found = phases(memory_of())
    assert found["forward"] == found["loss"] == 4 * 5000


def test_gradients_of_earlier_micro_batches_are_there_all_the_time():
    found = phases(memory_of(batch=2))
    assert found["forward"] == found["loss"] == 4 * 5000 + 4 * 2000


@pytest.mark.parametrize(
    ("saved", "gradients", "kept"), [(5000.0, 0, 20000), (1000.0, 8000, 1000)], ids=["saved", "gradients"]
)
def test_backward_turns_what_was_saved_into_gradients(saved, gradients, kept):
    memory = memory_of(saved)
    assert phases(memory)["backward of layer"] == gradients + kept
    assert sum(dict(memory.by_kind).values()) == memory.peak


def test_the_optimizer_has_all_gradients():
    assert phases(memory_of(100.0))["optimizer"] == 8000
