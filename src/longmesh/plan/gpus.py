"""GPUs by name: what their makers say of them, and how much of it programs reach. Named clusters are made of them.

A figure is a vendor's, or it is assumed; `sources` says which. Assumed figures are one choice per GPU, made once from
published kernel benchmarks, and never from a run that predictions are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True, slots=True)
class Gpu:
    """`peak_bf16`, `peak_float8`: dense FLOP/s of the data sheet; float8 is 0 where it is not in hardware. `matmul`,
    `float8`: the part of it that large products reach. `attention`, `attention_backward`: FLOP/s of the best fused
    kernel on long causal sequences. Bandwidths in bytes/s: `hbm` of the data sheet, `node` and `pod` one way per GPU,
    `host` one way to the host's memory. `copies`: the part of `hbm` that copies reach."""

    name: str
    memory_bytes: float
    peak_bf16: float
    peak_float8: float
    hbm: float
    node: float
    pod: float
    host: float
    matmul: float
    float8: float
    attention: float
    attention_backward: float
    copies: float
    sources: tuple[tuple[str, str], ...]


_NVIDIA = "NVIDIA data sheet"
_REACHED = "assumed: large cuBLAS products reach 65-75 % of the data sheet"

GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "a100", 80 * GIGA, 312 * TERA, 0.0, 2039 * GIGA, 300 * GIGA, 25 * GIGA, 25 * GIGA,
            0.80, 0.0, 200 * TERA, 170 * TERA, 0.75,
            (
                ("memory, peak, HBM, NVLink", f"{_NVIDIA}, A100 80 GB SXM"),
                ("matmul", "assumed: 80 % of the data sheet, usual for cuBLAS on A100"),
                ("attention", "FlashAttention-2 paper: 200 forward, 170 backward TFLOP/s"),
                ("network", "200 Gb/s per GPU, DGX A100"),
            ),
        ),
        Gpu(
            "h100", 80 * GIGA, 989 * TERA, 1979 * TERA, 3350 * GIGA, 450 * GIGA, 50 * GIGA, 50 * GIGA,
            0.70, 0.60, 550 * TERA, 450 * TERA, 0.75,
            (
                ("memory, peak, HBM, NVLink", f"{_NVIDIA}, H100 SXM"),
                ("matmul", _REACHED),
                ("attention", "FlashAttention-3 paper and cuDNN 9: 500-650 forward, 400-550 backward TFLOP/s"),
                ("network", "400 Gb/s per GPU, DGX H100"),
            ),
        ),
        Gpu(
            "h200", 141 * GIGA, 989 * TERA, 1979 * TERA, 4800 * GIGA, 450 * GIGA, 50 * GIGA, 50 * GIGA,
            0.70, 0.60, 550 * TERA, 450 * TERA, 0.75,
            (
                ("memory, peak, HBM, NVLink", f"{_NVIDIA}, H200 SXM"),
                ("matmul", _REACHED),
                ("attention", "as H100: the same compute dies"),
                ("network", "400 Gb/s per GPU, DGX H200"),
            ),
        ),
        Gpu(
            "b200", 180 * GIGA, 2250 * TERA, 4500 * TERA, 8000 * GIGA, 900 * GIGA, 50 * GIGA, 50 * GIGA,
            0.70, 0.60, 1200 * TERA, 900 * TERA, 0.75,
            (
                ("memory, peak, HBM, NVLink", f"{_NVIDIA}, DGX B200"),
                ("matmul", _REACHED),
                ("attention", "cuDNN 9 on B200: about 1200 forward TFLOP/s; backward assumed at 3/4 of it"),
                ("network", "400 Gb/s per GPU, DGX B200"),
            ),
        ),
        Gpu(
            "mi300x", 192 * GIGA, 1307 * TERA, 2615 * TERA, 5300 * GIGA, 336 * GIGA, 50 * GIGA, 50 * GIGA,
            0.50, 0.45, 400 * TERA, 300 * TERA, 0.70,
            (
                ("memory, peak, HBM, links", "AMD data sheet, MI300X platform: 7 links of 48-64 GB/s one way"),
                ("matmul", "assumed: hipBLASLt reaches about half of the data sheet"),
                ("attention", "assumed: CK attention at 400 forward, 300 backward TFLOP/s"),
                ("network", "assumed: 400 Gb/s per GPU"),
            ),
        ),
    )
}  # fmt: skip
