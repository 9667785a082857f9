"""The program that each rank runs, with its options as JSON; `longmesh train` starts it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

from longmesh.checkpoint import DirectoryLock
from longmesh.comm.stop import REQUEUE_EXIT_CODE
from longmesh.errors import LongmeshError
from longmesh.train.data import Corpus
from longmesh.train.guard import WatchedGuard, guarded
from longmesh.train.loop import train
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import Axes, make_axes
from longmesh.train.progress import progress, say_nothing
from longmesh.train.report import Summary, add_part, read_summary, summarize, write_part, write_report


def main(arguments: str) -> None:
    options = TrainOptions(**json.loads(arguments))
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    with guarded(options.timeout) as guard:
        try:
            is_stopped = run(options, device, guard)
        except LongmeshError as error:
            if guard.has_started:
                raise
            raise SystemExit(str(error)) from error  # a wrong command line: a traceback would hide what to do
    dist.destroy_process_group()
    if is_stopped:
        sys.exit(REQUEUE_EXIT_CODE)


def run(options: TrainOptions, device: str, guard: WatchedGuard) -> bool:
    """Prepare, with the directory for this run alone, then train; whether the run was stopped before its end."""
    is_first = dist.get_rank() == 0
    problem, corpus, baseline, lock = prepare(options, is_first)
    try:
        axes = make_axes(options, corpus.digest if corpus else "", problem, device)
        assert corpus is not None, "without a corpus there is a problem"
        return train_and_report(options, axes, corpus, baseline, guard)
    finally:
        if lock is not None:
            lock.release()


def train_and_report(
    options: TrainOptions, axes: Axes, corpus: Corpus, baseline: Summary | None, guard: WatchedGuard
) -> bool:
    """Train, show it and write it down; whether the run was stopped before its end."""
    is_first = dist.get_rank() == 0
    tokens, num_ranks = options.batch * options.seq_len, axes.world.size()
    shown = progress(steps=options.steps, step_tokens=tokens, num_ranks=num_ranks, terminal=options.terminal)
    guard.stop_requested()  # from here on signals are noted
    with shown if is_first else nullcontext(say_nothing) as show:
        record = train(options, axes, corpus, show, guard)
    if record.is_stopped:
        if is_first:
            print(f"stopped after step {len(record.losses)}; saved in {options.out}", flush=True)
        return True
    if not record.steps:
        if is_first:
            print(f"all {len(record.losses)} steps are done already", flush=True)
        return False
    summary = summarize(record, options, axes)
    if is_first and options.until is not None:
        write_part(summary, options)
    elif is_first:
        print(write_report(add_part(summary, options), baseline, record.drawn, options), flush=True)
    return False


def prepare(
    options: TrainOptions, is_first: bool
) -> tuple[LongmeshError | None, Corpus | None, Summary | None, DirectoryLock | None]:
    """What this rank needs beside the others, or why it can't start. The first rank gets the directory for itself."""
    try:
        if is_first:
            options.check_paths()
        baseline = read_summary(options) if is_first and options.baseline is not None else None
        lock = DirectoryLock(options.out, force=options.force) if is_first else None
        return None, Corpus(options.seed), baseline, lock
    except LongmeshError as error:
        return error, None, None, None


if __name__ == "__main__":
    main(sys.argv[1])
