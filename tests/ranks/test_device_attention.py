"""Attention on a device that is not the CPU: with values on ranks, and hollow as every rank of 8.

The short choice here turns masks, layouts, exchanges, dtypes, options and kernels together, so that each meets several
of the others; every combination is in tests/soak.
"""

import itertools

import pytest
import torch

from support.device_attention import EXCHANGES, LAYOUTS, MASKS, OPTIONS, Case, run_hollow, run_valued

KERNELS = ("cuda_flash", "cuda_efficient", "cuda_cudnn", "math")


def chosen() -> list[Case]:
    turns = zip(
        *(itertools.cycle(names) for names in (LAYOUTS, EXCHANGES, (torch.bfloat16, torch.float32))),
        strict=False,
    )
    pairs = itertools.product(MASKS, OPTIONS)
    return [
        Case(mask, layout, exchange, dtype, options)
        for (mask, options), (layout, exchange, dtype) in zip(pairs, turns, strict=False)
    ]


def run_all(cases: list[Case], num_ranks: int) -> list[tuple[str, dict[str, int]]]:
    return [run_valued(case, num_ranks) for case in cases]


def run_all_hollow(cases: list[Case], num_ranks: int) -> int:
    for number, case in enumerate(cases):
        run_hollow(case, number % num_ranks, num_ranks)
    return len(cases)


@pytest.mark.parametrize("part", range(5))
def test_values_on_ranks(pool, part):
    cases = chosen()[part::5]
    pool.run(run_all, cases, 4, ranks=4, device="sim", timeout=120)


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_kernel_for_values(pool, kernel):
    masks = [mask for mask in MASKS if not (kernel == "cuda_flash" and mask == "mask_mod")]
    cases = [Case(mask, "zigzag", "sparse", kernel=kernel) for mask in masks]
    for name, launches in pool.run(run_all, cases, 2, ranks=2, device="sim", timeout=120)[0]:
        assert name == kernel and bool(launches) == (kernel != "math")


def test_any_rank_without_values(pool):
    """Every layout and exchange, each in half of its pairs; the soak has all."""
    pairs = (
        (i + j, layout, exchange) for i, layout in enumerate(LAYOUTS) for j, exchange in enumerate(EXCHANGES)
    )
    cases = [Case("documents", layout, exchange) for number, layout, exchange in pairs if number % 2 == 0]
    assert pool.run(run_all_hollow, cases, 8, ranks=1, device="fake", timeout=120) == [len(cases)]
