"""The choice of a kernel, and what a user reads when it cannot be made."""

import pytest
import torch

from longmesh.attention.kernel.base import Need, Score
from longmesh.attention.kernel.choose import choose, need_of
from longmesh.attention.mask.block import Block
from longmesh.errors import LongmeshError

CPU = Need("cpu", torch.float32, 64, 64)
CUDA = Need("cuda", torch.bfloat16, 64, 64)


@pytest.mark.parametrize(
    ("need", "name"),
    [
        (CPU, "cpu_flash"),
        (CPU._replace(dtype=torch.float64), "cpu_flash"),
        (CPU._replace(elementwise=True, bias=True), "cpu_flash"),
        (CPU._replace(v_head_dim=32), "cpu_flash"),
        (CPU._replace(bias=True, bias_grad=True), "math"),
        (CPU._replace(dropout=True), "math"),
        (CPU._replace(score_mod=True), "math"),
        (CUDA, "cuda_flash"),
        (CUDA._replace(dtype=torch.float32), "cuda_efficient"),
        (CUDA._replace(bias=True), "cuda_efficient"),
        (CUDA._replace(score_mod=True), "flex"),
        (CUDA._replace(dropout=True), "math"),
        (CUDA._replace(dtype=torch.float64), "math"),
    ],
)
def test_the_fastest_that_can(need, name):
    assert choose(need).kernel.name == name


def test_the_reason_says_why_not_the_faster_ones():
    assert choose(CPU).reason == "the fastest here"
    assert choose(CPU._replace(dropout=True)).reason.startswith("cpu_flash has no dropout")
    assert choose(CPU, force="math").reason == "asked for by name"


def test_what_is_needed_is_read_off_the_arguments():
    q, v = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 4)
    bias = torch.zeros(3, 3, requires_grad=True)
    need = need_of(
        q, v, Score(bias=bias, dropout_p=0.1), [Block(0, 3, 0, 3, elementwise=True)], needs_grad=True
    )
    assert need == Need("cpu", torch.float32, 8, 4, elementwise=True, bias=True, bias_grad=True, dropout=True)


def test_errors():
    with pytest.raises(
        LongmeshError, match=r"there is no attention kernel 'fast'; use one of cpu_flash, cuda_flash"
    ):
        choose(CPU, force="fast")
    asked = r"'cpu_flash' can't be used here: it has no score_mod; these can: math; or leave the choice open"
    with pytest.raises(LongmeshError, match=asked):
        choose(CPU._replace(score_mod=True), force="cpu_flash")
    with pytest.raises(LongmeshError) as error:
        choose(CPU._replace(dtype=torch.int64))
    lines = str(error.value).splitlines()
    assert lines[0] == "no attention kernel can do this (torch.int64 on cpu):"
    assert lines[1] == "  cpu_flash takes fp64, fp32, bf16 and fp16, not torch.int64"
    assert lines[-1] == "  math takes floating point, not torch.int64"
    assert len(lines) == 7
