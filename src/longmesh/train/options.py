"""The options of a training run, as one frozen value that is the same on every rank."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from longmesh.attention.exchange.named import EXCHANGES
from longmesh.checkpoint.generations import list_steps
from longmesh.errors import LongmeshError
from longmesh.plan import cluster_of
from longmesh.plan.render import format_bytes
from longmesh.train.model import VOCAB

AUTO = "auto"
LONGEST_S = 1e9
MASKS = ("documents", "causal")
SIZES = ("data", "context", "tensor", "seq_len", "batch", "steps", "dim", "layers", "heads", "kv_heads")
CURVE = ("seq_len", "batch", "mask", "dim", "layers", "heads", "kv_heads", "learning_rate", "seed")


@dataclass(frozen=True)
class TrainOptions:
    """`batch` sequences of `seq_len` tokens make a step, whatever the mesh: a run doesn't depend on it."""

    data: int = 1
    context: int = 1
    tensor: int = 1
    seq_len: int = 16384
    batch: int = 1
    steps: int = 20
    mask: str = "documents"
    exchange: str = "auto"
    cluster: str | None = None
    dim: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    learning_rate: float = 3e-3
    seed: int = 0
    save_every: int = 0
    keep: int = 3
    keep_every: int = 0
    check_replicas: int = 0
    force: bool = False
    out: str = "longmesh-train"
    resume: str | None = None
    baseline: str | None = None
    terminal: str | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for name in SIZES:
            if getattr(self, name) < 1:
                raise LongmeshError(f"{name}={getattr(self, name)}: give at least 1")
        for name, least in (
            ("keep", 1),
            ("keep_every", 0),
            ("check_replicas", 0),
            ("seed", 0),
            ("save_every", 0),
        ):
            if getattr(self, name) < least:
                raise LongmeshError(f"{name}={getattr(self, name)}: give {least} or more")
        if self.seed >= 1 << 63:
            raise LongmeshError(f"seed={self.seed}: give a number below 2 ** 63")
        if not 0 < self.learning_rate < float("inf"):
            raise LongmeshError(
                f"learning_rate={self.learning_rate:g}: give a positive number, such as 0.003"
            )
        if self.seq_len < self.context:
            raise LongmeshError(
                f"seq_len={self.seq_len} over context={self.context} ranks: a rank needs at least 1 token; use fewer "
                "ranks or longer sequences"
            )
        if self.exchange not in EXCHANGES:
            raise LongmeshError(f"exchange={self.exchange!r} is not known; use one of {', '.join(EXCHANGES)}")
        if not 0 < self.timeout <= LONGEST_S:
            raise LongmeshError(
                f"timeout={self.timeout:g}: give a positive number of seconds, at most {LONGEST_S:g}"
            )
        if self.mask not in MASKS:
            raise LongmeshError(f"mask={self.mask!r} is not known; use one of {', '.join(MASKS)}")
        if self.dim % (2 * self.heads):
            raise LongmeshError(
                f"dim={self.dim} in heads={self.heads}: a head needs an even number of features, which rotate in "
                f"pairs; use dim={2 * self.heads * max(1, round(self.dim / (2 * self.heads)))}"
            )
        if self.heads % self.kv_heads:
            raise LongmeshError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.kv_heads % self.tensor:
            raise LongmeshError(
                f"tensor={self.tensor}: heads are sharded over the tensor axis, so it must divide "
                f"kv_heads={self.kv_heads}"
            )
        if self.batch % self.data:
            raise LongmeshError(
                f"batch={self.batch}: each of the data={self.data} groups takes the same number of sequences; use "
                f"batch={self.data * max(1, round(self.batch / self.data))}"
            )

    def check_size(self) -> None:
        """Raise for what can't fit into the memory of this machine, however little else is kept there."""
        ranks = self.data * self.context * self.tensor
        weights = 2 * VOCAB * self.dim + self.layers * 11 * self.dim**2
        # Weights, gradients and two moments on each rank; a sequence's tokens, and the features of its last layer.
        state = 4 * 4 * weights * ranks // self.tensor
        sequence = self.batch * self.seq_len * 8 + self.data * self.seq_len * 4 * self.dim
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if state + sequence > total:
            raise LongmeshError(
                f"seq_len={self.seq_len}, batch={self.batch}, dim={self.dim}, layers={self.layers} take "
                f"{format_bytes(state + sequence)} of memory at least, and this machine has {format_bytes(total)}; "
                "give smaller ones"
            )

    def check_paths(self) -> None:
        """Raise for what can't be read or written, before anything is computed."""
        cluster_of(self.cluster)
        try:
            self._check_out()
            for name, path in (("resume", self.resume), ("baseline", self.baseline)):
                if path is not None and (name, path) != ("resume", AUTO):
                    _check_run(name, path)
        except OSError as error:  # a name that is too long, links that go round
            raise LongmeshError(
                f"{error.filename!r} can't be used as a directory: {error.strerror}; give another"
            ) from error

    def _check_out(self) -> None:
        out = Path(self.out)
        if not is_text(self.out):
            raise LongmeshError(f"out={self.out!r} can't be written in UTF-8, as the report is; give another")
        if not self.out or any(path.exists() and not path.is_dir() for path in (out, *out.parents)):
            raise LongmeshError(f"out={self.out!r} is not a directory and can't become one; give another")
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise LongmeshError(
                f"out={self.out!r} can't be written: no permission in {nearest}; give another"
            )

    @property
    def mesh_shape(self) -> tuple[int, int, int]:
        return self.data, self.context, self.tensor

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def curve(self) -> dict[str, object]:
        """What the loss curve depends on, and a resumed run must share: everything but the mesh and the files."""
        return {name: getattr(self, name) for name in CURVE}

    def describe_differences(self, curve: dict[str, object]) -> str:
        """In which options another run differs, in words; empty if in none."""
        pairs = [(name, curve.get(name), value) for name, value in self.curve.items()]
        return ", ".join(
            f"{name}={theirs!r} (here {ours!r})" for name, theirs, ours in pairs if theirs != ours
        )


def is_text(name: str) -> bool:
    """Whether a name can be printed: one from the command line may have bytes that are no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_run(name: str, path: str) -> None:
    """Raise if `path` is not what another run has left."""
    if not path or not Path(path).is_dir():
        raise LongmeshError(f"{name}={path!r} is not a directory; give another run's --out")
    if name == "resume" and not list_steps(Path(path, "checkpoint")):
        raise LongmeshError(
            f"resume={path!r} has no checkpoint in it; give another run's --out, or leave out --resume to start "
            "a new run"
        )
    if name == "baseline" and not Path(path, "run.json").is_file():
        raise LongmeshError(f"baseline={path!r} has no figures of a run in it; give another run's --out")
