"""The program that each rank runs, with its options as JSON; `longmesh train` starts it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist

from longmesh.checkpoint import DirectoryLock
from longmesh.errors import LongmeshError
from longmesh.train.data import Corpus
from longmesh.train.guard import guarded
from longmesh.train.loop import train
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import make_axes
from longmesh.train.progress import progress, say_nothing
from longmesh.train.report import Summary, read_summary, summarize, write_report


def main(arguments: str) -> None:
    options = TrainOptions(**json.loads(arguments))
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    is_first = dist.get_rank() == 0
    problem, corpus, baseline, lock = prepare(options, is_first)
    axes = make_axes(options, corpus.digest if corpus else "", problem, device)
    assert corpus is not None, "without a corpus there is a problem"
    title = f"{axes.world.size()} ranks" if axes.world.size() > 1 else "one process"
    tokens = options.batch * options.seq_len
    shown = progress(steps=options.steps, step_tokens=tokens, title=title, terminal=options.terminal)
    with guarded(options.timeout) as guard:
        with shown if is_first else nullcontext(say_nothing) as show:
            record = train(options, axes, corpus, show, guard)
        summary = summarize(record, options, axes)
    if is_first:
        print(write_report(summary, baseline, record.plan, options), flush=True)
    if lock is not None:
        lock.release()
    dist.destroy_process_group()


def prepare(
    options: TrainOptions, is_first: bool
) -> tuple[LongmeshError | None, Corpus | None, Summary | None, DirectoryLock | None]:
    """What this rank needs beside the others, or why it can't start. The first rank gets the directory for itself."""
    try:
        baseline = read_summary(options) if is_first and options.baseline is not None else None
        lock = DirectoryLock(options.out, force=options.force) if is_first else None
        return None, Corpus(options.seed), baseline, lock
    except LongmeshError as error:
        return error, None, None, None


if __name__ == "__main__":
    main(sys.argv[1])
