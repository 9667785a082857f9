"""What a step is planned for: a mesh, a machine, and how the step is run. Frozen values, checked when made."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from longmesh.errors import LongmeshError
from longmesh.plan.cluster import Cluster
from longmesh.plan.gpus import GIGA, GPUS, Gpu
from longmesh.plan.named_clusters import FLOAT8, gpu_cluster
from longmesh.plan.rate import Rate

_UNITS = {"": 1.0, "B": 1.0, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MIB": 2.0**20, "GIB": 2.0**30, "TIB": 2.0**40}
RECOMPUTE = ("none", "selective", "full")
OPTIMIZERS = ("adamw", "adamw-offload", "none")
LOSSES = ("whole", "tiled")
MATMUL_DTYPES = ("bf16", "float8")


class StepMesh(NamedTuple):
    """Ranks on each axis. In the machine `tp` is innermost, then `cp`, `ep`, `dp`. Ranks of `ep` have sequences of
    their own, as those of `dp` have, and share the experts between them."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        return math.prod(self)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Of dp, ep, cp, tp: from the outermost to the innermost."""
        return self.dp, self.ep, self.cp, self.tp

    @property
    def replicas(self) -> int:
        """How many sequences run at a time."""
        return self.dp * self.ep

    def __str__(self) -> str:
        named = [f"{name} {size}" for name, size in self._asdict().items() if size > 1]
        return " x ".join(named) or "1 rank"


AXES = ("dp", "ep", "cp", "tp")


class Assumed(NamedTuple):
    """A figure that was not measured: its name, its value in words, and where it comes from."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class StepMachine:
    """The ranks: a `Cluster`, and what it does not say. `memory_bytes`: of one rank; `host_bytes_per_us`: to the host's
    memory and back; `runtime_bytes`: what driver and communicators take; `slack`: the part that an allocator wastes;
    `band`: how far times may be off, down and up."""

    cluster: Cluster
    memory_bytes: float
    host_bytes_per_us: float
    runtime_bytes: float = 1.5 * GIGA
    slack: float = 0.05
    band: tuple[float, float] = (0.82, 1.22)
    assumed: tuple[Assumed, ...] = ()

    @staticmethod
    def of_gpus(which: str | Gpu, *, memory_bytes: float | None = None) -> StepMachine:
        """Nodes of 8 GPUs: those of a name, or with figures of their own."""
        gpu = GPUS.get(which.lower()) if isinstance(which, str) else which
        if gpu is None:
            raise LongmeshError(
                f"GPU {which!r} is not known; use one of {', '.join(GPUS)}, or give a cluster file"
            )
        assumed = [Assumed(f"{gpu.name}: {what}", _figure(gpu, what), source) for what, source in gpu.sources]
        return StepMachine(
            cluster=gpu_cluster(gpu),
            memory_bytes=memory_bytes or gpu.memory_bytes,
            host_bytes_per_us=gpu.host / 1e6,
            assumed=(
                *assumed,
                Assumed("links", "80 % of the bandwidth", "assumed: usual for NCCL's large collectives"),
                Assumed("allocator slack", "5 %", "assumed: 3-8 % are usual"),
                Assumed("runtime", "1.5 GB", "assumed: CUDA context and NCCL buffers take 1-3 GB"),
            ),
        )

    @staticmethod
    def of_cluster(cluster: Cluster, memory_bytes: float) -> StepMachine:
        """Ranks of a measured cluster; only tensors are counted in memory."""
        copies = cluster.levels[0].link
        host = 2.0**20 / (copies.time_us(2.0**21) - copies.time_us(2.0**20))
        return StepMachine(cluster, memory_bytes, host, runtime_bytes=0.0, slack=0.0, band=(0.88, 1.12))

    def with_attention_tflops(self, tflops: float, backward: float | None = None) -> StepMachine:
        """The same with another rate of attention, forward and backward."""
        chosen = {"attention": tflops, "attention_backward": backward or tflops * 0.8}
        rates = tuple(_scaled(rate, self.cluster.rates, chosen) for rate in self.cluster.rates)
        kept = tuple(a for a in self.assumed if not a.name.endswith(": attention"))
        given = Assumed(
            "attention", f"{tflops:g} TFLOP/s forward, {chosen['attention_backward']:g} backward", "given"
        )
        return replace(self, cluster=replace(self.cluster, rates=rates), assumed=(*kept, given))


def _scaled(rate: Rate, rates: tuple[Rate, ...], chosen: dict[str, float]) -> Rate:
    if rate.op not in chosen:
        return rate
    most = max(r.flops_per_us for r in rates if r.op == rate.op)
    return replace(rate, flops_per_us=rate.flops_per_us / most * chosen[rate.op] * 1e6)


def _figure(gpu: Gpu, what: str) -> str:
    if what == "matmul":
        float8 = f", float8 {gpu.peak_float8 * gpu.float8 / 1e12:.0f}" if gpu.peak_float8 else ""
        return f"bf16 {gpu.peak_bf16 * gpu.matmul / 1e12:.0f}{float8} TFLOP/s"
    if what == "attention":
        return f"{gpu.attention / 1e12:.0f} forward, {gpu.attention_backward / 1e12:.0f} backward TFLOP/s"
    if what == "network":
        return f"{gpu.pod / 1e9:.0f} GB/s"
    return (
        f"{gpu.memory_bytes / 1e9:.0f} GB, {gpu.peak_bf16 / 1e12:.0f} TFLOP/s, {gpu.hbm / 1e12:.2f} TB/s, "
        f"{gpu.node / 1e9:.0f} GB/s"
    )


@dataclass(frozen=True)
class StepOptions:
    """How a step runs. `batch`: sequences of a step over all ranks (None: one for each dp rank); `rows`: sequences at
    a time on a rank; `compiled`: chains of memory-bound ops are one kernel each; `fsdp`: parameters, gradients and
    states are sharded over dp x ep x cp; `sequence_parallel`: between blocks, tokens are sharded over tp;
    `compute_bytes`: of an element of a gathered parameter; `parameter_bytes`, `gradient_bytes`, `state_bytes` (both of
    AdamW's): of an element that a rank keeps;
    `stages`: of a pipeline, by formula only."""

    batch: int | None = None
    rows: int = 1
    recompute: str = "none"
    offload: bool = False
    matmul_dtype: str = "bf16"
    optimizer: str = "adamw"
    loss: str = "whole"
    exchange: str = "auto"
    lengths: tuple[int, ...] = field(default=(), repr=False)
    compiled: bool = False
    fsdp: bool = True
    sequence_parallel: bool = False
    compute_bytes: int = 2
    parameter_bytes: int = 2
    gradient_bytes: int = 2
    state_bytes: int = 4
    stages: int = 1

    def __post_init__(self) -> None:
        for name, known in (("recompute", RECOMPUTE), ("optimizer", OPTIMIZERS), ("loss", LOSSES)):
            _check_one_of(name, getattr(self, name), known)
        _check_one_of("matmul_dtype", self.matmul_dtype, MATMUL_DTYPES)
        for name in ("rows", "stages"):
            if getattr(self, name) < 1:
                raise LongmeshError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.batch is not None and self.batch < 1:
            raise LongmeshError(f"batch={self.batch}: a step has at least 1 sequence")
        if self.offload and self.recompute == "none":
            raise LongmeshError(
                "offload=True: inputs of layers go to the host, so recompute must be selective or full"
            )

    def keeping(self, dtype: str) -> StepOptions:
        """The same with parameters, gradients and AdamW's states that a rank keeps in "bf16" or "fp32"."""
        size = {"bf16": 2, "fp32": 4}[dtype]
        return replace(self, parameter_bytes=size, gradient_bytes=size, state_bytes=2 * size)

    @property
    def trains(self) -> bool:
        return self.optimizer != "none"

    @property
    def product_dtype(self) -> str:
        """The dtype by which rates of linear layers are looked up."""
        return FLOAT8 if self.matmul_dtype == "float8" else "bfloat16"

    def micro_batches(self, mesh: StepMesh) -> int:
        """How often a rank runs forward and backward in a step."""
        batch = mesh.replicas * self.rows if self.batch is None else self.batch
        at_once = mesh.replicas * self.rows
        if batch % at_once:
            raise LongmeshError(
                f"batch={batch} sequences do not divide over {mesh.replicas} ranks of dp x ep with {self.rows} at a "
                f"time; give a multiple of {at_once}"
            )
        return batch // at_once


def memory_size(text: str) -> float:
    """Bytes: `80GB`, `96 GiB`.

    >>> memory_size("96 GiB") == 96 * 2**30
    True
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)", text.strip(), re.IGNORECASE)
    if not found or found[2].upper() not in _UNITS:
        raise LongmeshError(f"{text!r} is not a size of memory; give one such as 80GB or 96GiB")
    return float(found[1]) * _UNITS[found[2].upper()]


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LongmeshError(f"{name}={value!r}: use one of {', '.join(known)}")
