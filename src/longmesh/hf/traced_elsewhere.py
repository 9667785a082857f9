"""Traces made in a helper process: a tracer becomes a rank of a world that sends nothing and registers a device, and
neither may happen to a process that has a world, or GPUs, of its own.

The helper imports the package alone, never the program's main module, and ends with this process.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import weakref
from typing import IO, Any, NamedTuple

import torch

from longmesh.errors import LongmeshError
from longmesh.step.trace import ModelTrace

_SERVE = "from longmesh.hf.traced_elsewhere import serve; serve()"
_OF_A_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TraceRequest(NamedTuple):
    """What to trace: `config` as its file holds it, and tokens of a rank, ranks, tp and the loss."""

    config: dict[str, Any]
    dtype: torch.dtype
    most_tokens: int
    tokens: int
    cp: int
    tp: int
    loss: str


class RemoteTracer:
    """A tracer of a configuration, as `StepTracer`, whose work is done in a helper process."""

    def __init__(self, config: Any, dtype: torch.dtype, most_tokens: int) -> None:
        self._config = {**config.to_dict(), "model_type": config.model_type}
        self._how = dtype, most_tokens
        self._found: dict[TraceRequest | tuple[Any, ...], ModelTrace] = {}
        path = os.pathsep.join(p for p in sys.path if p)
        environment = {k: v for k, v in os.environ.items() if k not in _OF_A_WORLD} | {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._end = weakref.finalize(self, _end, self._process)

    def __call__(self, tokens: int, cp: int, tp: int, loss: str) -> ModelTrace:
        key = tokens, cp, tp, loss
        if key not in self._found:
            assert self._process.stdin is not None and self._process.stdout is not None
            _send(self._process.stdin, TraceRequest(self._config, *self._how, *key))
            answer = _receive(self._process.stdout)
            if isinstance(answer, str):
                raise LongmeshError(answer)
            self._found[key] = answer
        return self._found[key]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _send(pipe: IO[bytes], value: object) -> None:
    data = pickle.dumps(value)
    pipe.write(len(data).to_bytes(8, "big") + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> Any:
    head = pipe.read(8)
    if len(head) < 8:
        return "the helper process that traces a model has ended; its last words are above"
    return pickle.loads(pipe.read(int.from_bytes(head, "big")))


def serve() -> None:
    """The helper's life: trace what is asked for until the pipe closes. An answer that is text is an error."""
    from longmesh.hf.plan_step import config_of
    from longmesh.hf.step_tracer import StepTracer

    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get into the answers
    tracer: StepTracer | None = None
    while True:
        request = _receive(asked)
        if not isinstance(request, TraceRequest):
            return
        try:
            if tracer is None:
                tracer = StepTracer(config_of(request.config), request.dtype, request.most_tokens)
            _send(answers, tracer(request.tokens, request.cp, request.tp, request.loss))
        except LongmeshError as error:
            _send(answers, str(error))
