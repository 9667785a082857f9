"""Attention on the made-up device: cases that run with values on real ranks, or hollow at any coordinate."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longmesh.attention import ContextParallel, masks
from longmesh.testing.device import DeviceCounts, fake_rank, hollow
from support.attention_reference import check_close, inputs, reference

SEQ_LEN = 37


def _half_visible(b, h, i, j):
    return (i >= j) & ((i + 2 * j + h) % 3 != 0)


def _distances(s, b, h, i, j):
    return s - (i - j).abs() * (h + 1) / 8


MASKS: dict[str, Callable[[], masks.Mask]] = {
    "full": masks.full,
    "causal": masks.causal,
    "window": lambda: masks.sliding_window(5, 2),
    "documents": lambda: masks.documents([3, 17, 1, 16]),
    "rows": lambda: masks.documents([[3, 34], [20, 17]]),
    "prefix": lambda: masks.prefix_lm(11),
    "mask_mod": lambda: masks.mask_mod(_half_visible),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": (4, SEQ_LEN, SEQ_LEN)},
    "sinks": {"sinks": (4,)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "score_mod": {"score_mod": _distances},
}
EXCHANGES = ("ring", "allgather", "sparse", "ulysses", "hybrid", "cheapest", "auto")
LAYOUTS = ("contiguous", "ordered", "zigzag", "striped", "per_document", "round_robin", "solve", "auto")


@dataclasses.dataclass(frozen=True)
class Case:
    mask: str
    layout: str
    exchange: str
    dtype: torch.dtype = torch.bfloat16
    options: str = "plain"
    kernel: str | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.mask}/{self.layout}/{self.exchange}/{dtype}/{self.options}/{self.kernel or 'chosen'}"


@functools.cache
def device_mesh(num_ranks: int, two_axes: bool) -> DeviceMesh:
    return init_device_mesh("sim", (num_ranks // 2, 2) if two_axes else (num_ranks,))


def _engine(case: Case, mesh: DeviceMesh, check: bool = True) -> ContextParallel:
    return ContextParallel(
        mesh, seq_len=SEQ_LEN, mask=MASKS[case.mask](), layout=case.layout, exchange=case.exchange, chunk=4,
        num_heads=4, num_kv_heads=2, head_dim=8, dtype=case.dtype, kernel=case.kernel, check_kernels=check,
        check=False,  # ranks agree at the first call; a pool's would ask at every one, and read the answer
    )  # fmt: skip


def _options(case: Case) -> dict[str, Any]:
    """The call's options, tensors drawn on the CPU."""
    draw = torch.Generator().manual_seed(3)
    found = {}
    for name, value in OPTIONS[case.options].items():
        found[name] = torch.randn(value, generator=draw) if isinstance(value, tuple) else value
    return found


def run_valued(case: Case, num_ranks: int) -> tuple[str, dict[str, int]]:
    """On a rank of the made-up device: output and gradients against float64; the kernel, and how
    often attention was launched. The second call copies nothing and reads nothing."""
    cp = _engine(case, device_mesh(num_ranks, case.exchange == "hybrid"))
    *qkv, dout = inputs(2, 4, 2, SEQ_LEN, 8, 8, case.dtype)
    options = _options(case)
    want = reference(qkv, dout, MASKS[case.mask](), **options)
    leaves = [cp.shard(t.to("sim"), dim=2).requires_grad_() for t in qkv]
    on_device = {
        n: t.to("sim").requires_grad_() if isinstance(t, torch.Tensor) else t for n, t in options.items()
    }
    part = cp.shard(dout.to("sim"), dim=2)
    wanted = leaves + [t for t in on_device.values() if isinstance(t, torch.Tensor)]
    cp(*leaves, **on_device)  # copies the plan's row numbers
    with DeviceCounts() as counts:
        out = cp(*leaves, **on_device)
        grads = torch.autograd.grad(out, wanted, part)
    got = [out.detach(), *grads[:3]]
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        check_close(f"{case} {name}", cp.unshard(a, dim=2).cpu(), b, case.dtype)
    for grad, b in zip(grads[3:], want[4:], strict=True):
        torch.distributed.all_reduce(grad)
        check_close(f"{case} option", grad.cpu(), b, case.dtype)
    cost = {"host_reads": counts.host_reads, "uploads": counts.uploads, "downloads": counts.downloads}
    assert not any(cost.values()), f"{case}: {counts.where}"
    return cp.explain().splitlines()[-1].split()[1], dict(counts.launches)


def run_hollow(case: Case, rank: int, num_ranks: int) -> None:
    """As any rank, sizes only: what reads a value raises. The second call copies nothing either."""
    with fake_rank(rank, num_ranks):
        mesh = init_device_mesh("sim", (num_ranks // 2, 2) if case.exchange == "hybrid" else (num_ranks,))
        cp = _engine(case, mesh, check=False)  # there are no values to check
        shapes = [(2, heads, cp.num_tokens, 8) for heads in (4, 2, 2)]
        qkv = [hollow(torch.empty(shape, dtype=case.dtype, requires_grad=True)) for shape in shapes]
        options = {
            n: hollow(t.requires_grad_()) if isinstance(t, torch.Tensor) else t
            for n, t in _options(case).items()
        }
        wanted = qkv + [t for t in options.values() if isinstance(t, torch.Tensor)]
        for number in range(2):
            with DeviceCounts() as counts:
                out = cp(*qkv, **options)
                grads = torch.autograd.grad(out, wanted, torch.zeros_like(out))
            assert [g.shape for g in grads] == [t.shape for t in wanted], str(case)
            assert number == 0 or not (counts.host_reads or counts.uploads or counts.downloads), counts.where
