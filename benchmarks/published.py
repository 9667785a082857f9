"""Predictions beside published runs of other projects: their models, exchanges and policies, not ours.

    python benchmarks/published.py [--markdown]

Facts are in published_runs.tsv. No rate is fitted to a row: GPUs have the figures of `longmesh.plan.gpus`, or, where a
source's GPU differs from the data sheet (a lower power limit, slower memory), figures derived from data sheets alone.
What a source omits is in `assumed`. Bands are those of the machine: high / low is 1.49 for all rows.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from plain_llama import LLAMA2_7B, LLAMA_8B, LLAMA_70B, LLAMA_405B, How, PlainTracer, Sizes

from longmesh.hf.plan_step import config_of
from longmesh.hf.step_tracer import StepTracer
from longmesh.plan.gpus import GPUS, Gpu
from longmesh.step.known_models import KNOWN_MODELS
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.step_plan import StepPlan, Tracer, plan_traced

FILE = Path(__file__).with_name("published_runs.tsv")
# torchtitan's GPU: 500 W, HBM2e. Peaks are interpolated by power between the data sheets of the 350 W PCIe card (756
# TFLOP/s bf16) and the 700 W SXM module (989). Attention is FlashAttention-2, of which the FlashAttention-3 paper
# reports 370 forward and 320 backward TFLOP/s on 700 W.
_POWER = (756 + (989 - 756) * 150 / 350) / 989
H100_96 = replace(
    GPUS["h100"], name="h100-96", memory_bytes=96e9, hbm=2400e9, peak_bf16=989e12 * _POWER,
    peak_float8=1979e12 * _POWER, attention=370e12 * _POWER, attention_backward=320e12 * _POWER,
)  # fmt: skip
# The same GPU with FlashAttention-3, as Meta's prefill uses.
H100_META = replace(H100_96, attention=550e12 * _POWER, attention_backward=450e12 * _POWER)


class Case(NamedTuple):
    """How a row is predicted. `value`: the published unit from a plan."""

    gpu: Gpu
    tracer: Callable[[], Tracer]
    mesh: StepMesh
    options: StepOptions
    value: Callable[[StepPlan], float]
    memory: Callable[[StepPlan], float]
    assumed: str


def tokens(plan: StepPlan) -> float:
    return plan.tokens_per_second_per_gpu


def seconds(plan: StepPlan) -> float:
    return plan.step_seconds


def reserved(plan: StepPlan) -> float:
    """What torch's allocator has reserved: without the runtime. GiB."""
    return (plan.memory.peak - plan.machine.runtime_bytes) / 2**30


def allocated(plan: StepPlan) -> float:
    """What tensors take, GB."""
    beside = dict(plan.memory.by_kind)
    return (plan.memory.peak - beside["allocator"] - beside["runtime"]) / 1e9


def whole(plan: StepPlan) -> float:
    return plan.memory.peak / 1e9


def nemo_tflops(sizes: Sizes) -> Callable[[StepPlan], float]:
    """Model FLOP/s as NeMo's own formula counts them: attention in full, without the causal half."""
    h, s = sizes.hidden, sizes

    def count(plan: StepPlan) -> float:
        shape = (
            12
            + 12 * s.kv_heads / s.heads
            + 18 * s.width / h
            + 12 * plan.seq_len / h
            + 6 * s.words / (s.layers * h)
        )
        return (
            plan.batch
            * plan.seq_len
            * s.layers
            * h
            * h
            * shape
            / plan.step_seconds
            / plan.mesh.num_ranks
            / 1e12
        )

    return count


def qwen(name: str) -> Callable[[], Tracer]:
    return lambda: StepTracer(config_of(KNOWN_MODELS[name]))


def plain(sizes: Sizes, how: How | None = None) -> Callable[[], Tracer]:
    return lambda: PlainTracer(sizes, how or How())


_TITAN = "fp32 parameters and reduction, memory is what the allocator reserved, FlashAttention-2"
_NEMO = "no recompute, 8 micro-batches of 1, sequence sharded between blocks, attention counted in full"
_TRL = "parameters, gradients and states in bf16 (the checkpoint's dtype), memory is what tensors take"
_OFF = {"recompute": "full", "offload": True, "exchange": "ring", "loss": "tiled"}


def _nemo(gpu: str, sizes: Sizes, dp: int, cp: int = 1, tp: int = 1, batch: int | None = None) -> Case:
    mesh = StepMesh(dp, cp, tp)
    how = StepOptions(
        batch=batch or dp * 8,
        matmul_dtype="float8",
        exchange="ring",
        compiled=True,
        fsdp=False,
        sequence_parallel=True,
    )
    return Case(GPUS[gpu], plain(sizes), mesh, how.keeping("fp32"), nemo_tflops(sizes), whole, _NEMO)


def _titan(tracer: Sizes, mesh: StepMesh, **how: object) -> Case:
    options = StepOptions(**how).keeping("fp32")  # type: ignore[arg-type]
    return Case(H100_96, plain(tracer), mesh, options, tokens, reserved, _TITAN)


def _float8(**how: object) -> dict[str, object]:
    return {"recompute": "full", "compiled": True, "matmul_dtype": "float8", **how}


# In the order of the file.
CASES: tuple[Case, ...] = (
    _titan(LLAMA_8B, StepMesh(8), batch=16, rows=2, recompute="selective"),
    _titan(LLAMA_8B, StepMesh(8), batch=16, rows=2, recompute="selective", compiled=True),
    _titan(LLAMA_8B, StepMesh(8), batch=8, **_float8()),
    _titan(LLAMA_8B, StepMesh(2, 4), batch=2, **_float8(exchange="allgather")),
    _titan(LLAMA_70B, StepMesh(32, 1, 8), batch=512, rows=16, sequence_parallel=True, **_float8()),
    _nemo("h100", LLAMA2_7B, 4),
    _nemo("h100", LLAMA2_7B, 8, 2, 2),
    _nemo("h100", LLAMA2_7B, 8, 4, 4),
    _nemo("h100", LLAMA2_7B, 4, 16, 8),
    _nemo("b200", LLAMA_8B, 16, batch=256),
    _nemo("b200", LLAMA_8B, 16, 4, batch=64),
    _nemo("b200", LLAMA_8B, 16, 4, 4, batch=16),
    Case(GPUS["h100"], qwen("Qwen/Qwen3-8B"), StepMesh(1, 8), StepOptions(**_OFF), seconds, allocated, _TRL),
    Case(GPUS["h100"], qwen("Qwen/Qwen3-0.6B"), StepMesh(1, 8), StepOptions(**_OFF), seconds, allocated, _TRL),
    Case(
        GPUS["h100"], plain(LLAMA_8B, How(4096, 4096, wide_angles=False, fused_norm=True)), StepMesh(),
        StepOptions(recompute="full", offload=True, optimizer="adamw-offload"), seconds, whole,
        "tiles of 4096 tokens; bf16 parameters stay on the GPU; norms are Liger kernels, queries are turned in bf16",
    ),
    Case(
        H100_META, plain(LLAMA_405B, How(all_float8=False)), StepMesh(1, 16, 8),
        StepOptions(optimizer="none", matmul_dtype="float8", exchange="ring", compiled=True, fsdp=False),
        seconds, whole,
        "MLPs in fp8, other layers in bf16; H100 of 500 W with FlashAttention-3",
    ),
)  # fmt: skip


class Row(NamedTuple):
    """A published run and its prediction. `inside`: the published time is in the band."""

    source: str
    what: str
    published: str
    unit: str
    predicted: float
    memory: str
    predicted_memory: float
    inside: bool | None
    assumed: str


def rows() -> list[Row]:
    lines = [line for line in FILE.read_text().splitlines() if not line.startswith("#")]
    known: dict[str, Tracer] = {}
    found: list[Row] = []
    for line, case in zip(csv.DictReader(lines, delimiter="\t"), CASES, strict=True):
        key = f"{line['model']} {line['source'] if 'ALST' in line['source'] or 'TRL' in line['source'] else 'plain'}"
        tracer = known.setdefault(key, case.tracer())
        plan = plan_traced(tracer, case.mesh, int(line["seq"]), StepMachine.of_gpus(case.gpu), case.options)
        value, published = case.value(plan), line["value"]
        inside = None
        if published != "fits":
            low, high = (value / bound for bound in plan.machine.band)
            if line["unit"] in ("s", "s/step"):
                low, high = plan.band
            inside = min(low, high) <= float(published) <= max(low, high)
        what = f"{line['model']}, {line['mesh']}, {line['seq']}, {line['precision']}, {line['recompute']}"
        found.append(
            Row(
                line["source"],
                what,
                published,
                line["unit"],
                value,
                line["memory"],
                case.memory(plan),
                inside,
                case.assumed,
            )
        )
    return found


def ratios(found: list[Row]) -> list[tuple[str, float, float]]:
    """From each row to the next of its table: published and predicted change."""
    out = []
    for first, second in itertools.pairwise(found):
        same = (
            first.source.partition(" pull")[0] == second.source.partition(" pull")[0]
            and first.unit == second.unit
        )
        if same and "fits" not in (first.published, second.published):
            change = float(second.published) / float(first.published)
            out.append(
                (f"{first.source}: {first.what} -> {second.what}", change, second.predicted / first.predicted)
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true", help="the table of docs/plan.md")
    markdown = parser.parse_args().markdown
    if markdown:
        print("| source | run | published | predicted | in the band | memory | predicted | assumed |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    found = rows()
    for row in found:
        band = {True: "yes", False: "no", None: "-"}[row.inside]
        cells = (
            row.source, row.what, f"{row.published} {row.unit}", f"{row.predicted:.4g}", band, row.memory,
            f"{row.predicted_memory:.1f}" if row.memory != "-" else "-", row.assumed,
        )  # fmt: skip
        print("| " + " | ".join(cells) + " |" if markdown else "  ".join(cells))
    if markdown:
        print("\n| from row to row | published | predicted | off |\n| --- | --- | --- | --- |")
    for name, published, predicted in ratios(found):
        cells = (name, f"{published:.3f}", f"{predicted:.3f}", f"{predicted / published - 1:+.1%}")
        print("| " + " | ".join(cells) + " |" if markdown else "  ".join(cells))


if __name__ == "__main__":
    main()
