"""What `longmesh plan` does once its arguments are right: trace the model, search, print."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from longmesh.cli.arguments import refuse
from longmesh.cli.plan.command import PROGRAM, batch_of, read_lengths
from longmesh.cli.plan.table import describe, next_reason
from longmesh.debug.step_page import step_page
from longmesh.errors import LongmeshError
from longmesh.hf.plan_step import DTYPES, config_of, search_with
from longmesh.hf.step_tracer import StepTracer
from longmesh.plan import Cluster
from longmesh.step.search import Choices, Found
from longmesh.step.setting import StepMachine, StepMesh, StepOptions
from longmesh.step.step_plan import StepPlan, Tracer, plan_traced

SHOWN = 5
MOST_LONGER = 8
MOST_ROWS = 16  # that the search tries


def run(options: argparse.Namespace) -> int:
    """Plan, and print; the exit code."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the answer
            found, tracer = search(options)
            if options.out is not None:
                write_page(Path(options.out), found.best, tracer)
    except LongmeshError as error:
        return refuse(PROGRAM, " ".join(str(error).split()))
    if options.json:
        print(json.dumps(to_json(found)))
    text = describe(found, options.config)
    print(text, file=sys.stderr if options.json else sys.stdout)
    return 0


def write_page(path: Path, best: StepPlan, tracer: Tracer) -> None:
    """The page, with what happens if the sequence doubles, until it no longer fits."""
    longer: list[StepPlan] = []
    plan = best
    while plan.fits and len(longer) < MOST_LONGER and not plan.options.lengths:
        plan = plan_traced(tracer, plan.mesh, plan.seq_len * 2, plan.machine, plan.options)
        longer.append(plan)
    path.write_text(step_page(best, longer), encoding="utf-8")


def search(options: argparse.Namespace) -> tuple[Found, Tracer]:
    """Every candidate that the arguments leave, ranked."""
    machine = machine_of(options)
    config = config_of(options.config)
    run_as = StepOptions(
        batch=batch_of(options),
        rows=options.rows or 1,
        matmul_dtype=options.matmul_dtype,
        optimizer=options.optimizer,
        exchange=options.exchange,
        lengths=read_lengths(options.documents) if options.documents else (),
        compiled=options.compiled,
        sequence_parallel=options.sequence_parallel,
        compute_bytes=4 if options.dtype == "fp32" else 2,
    ).keeping(options.param_dtype or options.dtype)
    count = options.gpus[0] if options.gpus else options.ranks
    meshes = None if options.mesh is None else [StepMesh(**options.mesh)]
    choices = choices_of(options)
    tracer = StepTracer(config, DTYPES[options.dtype], options.seq_len * max(choices.rows))
    found = search_with(
        tracer, config, count, options.seq_len, machine, run_as, choices, meshes,
        needs_one_layer=options.memory is not None,
    )  # fmt: skip
    return found, tracer


def choices_of(options: argparse.Namespace) -> Choices:
    """What is left to choose."""
    if options.optimizer == "none":
        policies: tuple[tuple[str, bool], ...] = (("none", False),)
    elif options.recompute is not None:
        policies = ((options.recompute, options.offload),)
    elif options.offload:
        policies = (("selective", True), ("full", True))
    else:
        policies = Choices().policies
    losses = Choices().losses if options.loss is None else (options.loss,)
    return Choices(policies=policies, losses=losses, rows=rows_of(options))


def rows_of(options: argparse.Namespace) -> tuple[int, ...]:
    """Sequences at a time on a rank: as given; all of a given batch on a given mesh; else the search chooses."""
    batch = batch_of(options)
    if options.rows is not None or batch is None:
        return (options.rows or 1,)
    if options.mesh is not None:
        return (batch // (options.mesh.get("dp", 1) * options.mesh.get("ep", 1)),)
    return tuple(rows for rows in range(1, min(batch, MOST_ROWS) + 1) if batch % rows == 0)


def machine_of(options: argparse.Namespace) -> StepMachine:
    """The GPUs that were named, or the ranks of a measured cluster."""
    if options.gpus is not None:
        machine = StepMachine.of_gpus(options.gpus[1], memory_bytes=options.memory)
    else:
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / options.ranks
        machine = StepMachine.of_cluster(Cluster.load(options.cluster), options.memory or here)
    if options.attention_tflops is not None:
        machine = machine.with_attention_tflops(options.attention_tflops)
    return machine


def to_json(found: Found) -> dict[str, Any]:
    """The best plan, and the other candidates in short."""
    candidates = []
    for plan in found.shown(SHOWN):
        whole = plan.to_json()
        kept = (
            "mesh",
            "step_seconds",
            "memory_bytes",
            "tokens_per_second_per_gpu",
            "fits",
            "compute_share",
            "options",
        )
        candidates.append({name: whole[name] for name in kept} | {"why": next_reason(found.best, plan)})
    return {**found.best.to_json(), "candidates": candidates}
