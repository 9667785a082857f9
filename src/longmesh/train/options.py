"""The options of a training run, as one frozen value that is the same on every rank.

They come from the command line, so errors name its flags. Nothing here imports torch: a mistake is answered at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from longmesh.errors import LongmeshError
from longmesh.plan.named_clusters import find_cluster_problem
from longmesh.plan.words import format_bytes

AUTO = "auto"
LONGEST_S = 1e9
VOCAB = 257  # the bytes, and a mark for the start of a document
MASKS = ("documents", "causal")
EXCHANGES = ("auto", "ring", "allgather", "ulysses", "sparse", "cheapest", "hybrid")
AT_LEAST_1 = (
    *("data", "context", "tensor", "seq_len", "batch", "steps", "dim", "layers", "heads", "kv_heads", "keep"),
)
AT_LEAST_0 = ("keep_every", "check_replicas", "seed", "save_every")
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
    until: int | None = None  # leave after this step: a later start continues
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for least, names in ((1, AT_LEAST_1), (0, AT_LEAST_0)):
            for name in names:
                if getattr(self, name) < least:
                    raise LongmeshError(f"{self.typed(name)}: give {least} or more")
        if self.seed >= 1 << 63:
            raise LongmeshError(f"{self.typed('seed')}: give a number below 2 ** 63")
        if not 0 < self.learning_rate < float("inf"):
            raise LongmeshError(f"{self.typed('learning_rate')}: give a positive number, such as 0.003")
        if not 0 < self.timeout <= LONGEST_S:
            raise LongmeshError(
                f"{self.typed('timeout')}: give a positive number of seconds, at most {LONGEST_S:g}"
            )
        for name, known in (("exchange", EXCHANGES), ("mask", MASKS)):
            if getattr(self, name) not in known:
                raise LongmeshError(f"{self.typed(name)}: it is not known; give one of {', '.join(known)}")
        self._check_division()

    def _check_division(self) -> None:
        """Raise for sizes that don't divide as the mesh and the model need it."""
        if self.seq_len < self.context:
            raise LongmeshError(
                f"{self.typed('seq_len')} over {self.typed('context')}: a rank needs at least 1 token; use fewer ranks "
                "or longer sequences"
            )
        if self.dim % (2 * self.heads):
            raise LongmeshError(
                f"{self.typed('dim')} in {self.typed('heads')}: a head needs an even number of features, which rotate "
                f"in pairs; give --dim {2 * self.heads * max(1, round(self.dim / (2 * self.heads)))}"
            )
        if self.heads % self.kv_heads:
            raise LongmeshError(f"{self.typed('kv_heads')} must divide {self.typed('heads')}")
        if self.kv_heads % self.tensor:
            raise LongmeshError(
                f"{self.typed('tensor')}: heads are sharded over the tensor axis, so it must divide "
                f"{self.typed('kv_heads')}"
            )
        if self.batch % self.data:
            raise LongmeshError(
                f"{self.typed('batch')}: each of the {self.data} groups (--data) takes the same number of sequences; "
                f"give --batch {self.data * max(1, round(self.batch / self.data))}"
            )

    def typed(self, name: str) -> str:
        """An option as it is typed: `--seq-len 16384`."""
        return typed(name, getattr(self, name))

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
                f"{' '.join(self.typed(name) for name in ('seq_len', 'batch', 'dim', 'layers'))} take "
                f"{format_bytes(state + sequence)} of memory at least, and this machine has {format_bytes(total)}; "
                "give smaller ones"
            )

    def check_paths(self) -> None:
        """Raise for what can't be read or written, before anything is computed."""
        problem = None if self.cluster is None else find_cluster_problem(self.cluster)
        if problem is not None:
            raise LongmeshError(f"{self.typed('cluster')}: {problem}")
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
        out, given = Path(self.out), self.typed("out")
        if not is_text(self.out):
            raise LongmeshError(f"{given} can't be written in UTF-8, as the report is; give another")
        if not self.out or any(path.exists() and not path.is_dir() for path in (out, *out.parents)):
            raise LongmeshError(f"{given} is not a directory and can't become one; give another")
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise LongmeshError(f"{given} can't be written: no permission in {nearest}; give another")
        steps = checkpoint_steps(out)
        if steps and not self.resumes_own and not self.force:
            raise LongmeshError(
                f"{given}: an earlier run has left checkpoints there, up to step {max(steps)}, and a new run would "
                "replace them; give --resume auto to continue it, another --out, or --force to begin again there"
            )

    @property
    def resumes_own(self) -> bool:
        """Whether the run continues the one that is in its own directory."""
        return self.resume is not None and (
            self.resume == AUTO or Path(self.resume).resolve() == Path(self.out).resolve()
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
            f"{typed(name, theirs)} (here {ours})" for name, theirs, ours in pairs if theirs != ours
        )


def typed(name: str, value: object) -> str:
    """An option and its value as they are typed; a text that would not be seen is quoted."""
    shown = repr(value) if isinstance(value, str) and (not value or not value.isprintable()) else value
    return f"--{name.replace('_', '-')} {f'{shown:g}' if isinstance(shown, float) else shown}"


def checkpoint_steps(out: Path) -> list[int]:
    """The steps that have a checkpoint in a run's directory, in any order."""
    names = [path.parent.name for path in out.glob("checkpoint/step-*/.metadata")]
    return [int(name.removeprefix("step-")) for name in names if name.removeprefix("step-").isdigit()]


def is_text(name: str) -> bool:
    """Whether a name can be printed: one from the command line may have bytes that are no text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_run(name: str, path: str) -> None:
    """Raise if `path` is not what another run has left."""
    given = typed(name, path)
    if not path or not Path(path).is_dir():
        raise LongmeshError(f"{given} is not a directory; give another run's --out")
    if name == "resume" and not checkpoint_steps(Path(path)):
        raise LongmeshError(
            f"{given} has no checkpoint in it; give another run's --out, or leave out --resume to start a new run"
        )
    if name == "baseline" and not Path(path, "run.json").is_file():
        raise LongmeshError(f"{given} has no figures of a run in it; give another run's --out")
