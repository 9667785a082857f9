"""Kernels that are broken on purpose: the next one takes over on every rank, and says why."""

import warnings

import pytest
import torch
import torch.distributed as dist

from longmesh.attention import ContextParallel, masks
from longmesh.attention.kernel.base import Need
from longmesh.attention.kernel.choose import kernels
from longmesh.attention.kernel.self_check import check_kernel
from longmesh.errors import LongmeshError
from longmesh.testing.device.tensor import STAND_INS
from longmesh.testing.mesh import world_mesh

FLASH = torch.ops.aten._flash_attention_forward.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


def fails(*args, **kwargs):
    raise RuntimeError("CUDA error: no kernel image is available")


def wrong(*args, **kwargs):
    dq, *rest = RIGHT[EFFICIENT](*args, **kwargs)
    return dq * 1.5, *rest


RIGHT = dict(STAND_INS)
BROKEN = {"flash": (FLASH, fails), "efficient": (EFFICIENT, wrong)}  # by name: an op cannot be sent


def attend(broken: list[str], head_dim: int, rank: int | None = None, **options) -> tuple[str, list[str]]:
    """The kernel that is used, and what is said; `broken` ops are so on one rank only if it is given."""
    try:
        if rank is None or dist.get_rank() == rank:
            STAND_INS.update(BROKEN[name] for name in broken)
        mesh = world_mesh(dist.get_world_size())
        cp = ContextParallel(mesh, seq_len=19, mask=masks.causal(), num_heads=2, head_dim=head_dim, **options)
        q, k, v = (torch.randn(1, 2, cp.num_tokens, head_dim).bfloat16().to("sim") for _ in range(3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cp(q, k, v)
        return cp.explain().splitlines()[-1], [str(w.message) for w in caught]
    finally:
        STAND_INS.update(RIGHT)


def test_a_kernel_that_raises_is_replaced(pool):
    ((chosen, said), *_) = pool.run(attend, ["flash"], 16, ranks=2, device="sim")
    assert (
        "cuda_efficient" in chosen and "cuda_flash raises RuntimeError: CUDA error: no kernel image" in chosen
    )
    assert len(said) == 1
    assert "attention kernel 'cuda_flash' is not used for torch.bfloat16 of head dim 16 on sim:0" in said[0]
    assert (
        "'cuda_efficient' takes over. Please report it with the file that `longmesh doctor --json` writes"
        in said[0]
    )


def test_one_that_is_broken_on_one_rank_is_used_by_none(pool):
    broken = ["flash", "efficient"]
    first, second = pool.run(attend, broken, 24, 1, ranks=2, device="sim")
    assert "cuda_cudnn" in first[0] and "cuda_cudnn" in second[0]
    assert "cuda_flash fails its check on another rank" in first[0]
    assert (
        "cuda_efficient differs from the math kernel by" in second[0] and "in the gradient of q" in second[0]
    )


def test_the_check_can_be_turned_off(pool):
    with pytest.raises(Exception, match="no kernel image is available"):
        pool.run(attend, ["flash"], 40, check_kernels=False, ranks=2, device="sim")


def named() -> str:
    try:
        attend(["flash"], 48, kernel="cuda_flash")
    except LongmeshError as error:
        return str(error)
    return ""


def test_one_that_was_asked_for_by_name_is_an_error(pool):
    said = pool.run(named, ranks=2, device="sim")[0]
    assert "attention kernel 'cuda_flash' can't be used here: it raises RuntimeError" in said


def test_every_kernel_of_this_machine_is_right():
    cpu = torch.device("cpu")
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for elementwise in (False, True):
            need = Need("cpu", dtype, 16, 24, elementwise=elementwise)
            checked = [kernel.name for kernel in kernels() if kernel.refuses(need) is None]
            assert checked == ["cpu_flash", "math"]
            for kernel in kernels():
                assert kernel.refuses(need) is not None or check_kernel(kernel, need, cpu) is None
