"""Kernels that are broken on purpose: the next one takes over on every rank, and says why."""

import contextlib
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist

from longmesh.attention import ContextParallel, masks
from longmesh.attention.kernel.base import Need
from longmesh.attention.kernel.choose import check_kernel, kernels
from longmesh.attention.kernel.cpu_flash import CpuFlash
from longmesh.attention.kernel.cuda_flash import CudaFlash
from longmesh.attention.kernel.cuda_sdpa import CudaCudnn, CudaEfficient
from longmesh.attention.kernel.flex import Flex
from longmesh.attention.kernel.math import Math
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


# Each kernel, on a device that has it, with what makes it the first choice, and the one that takes over.
CHAIN = {
    "cpu_flash": (CpuFlash, "cpu", torch.float32, (), "math"),
    "cuda_flash": (CudaFlash, "sim", torch.bfloat16, (), "cuda_efficient"),
    "cuda_efficient": (CudaEfficient, "sim", torch.bfloat16, ("cuda_flash",), "cuda_cudnn"),
    "cuda_cudnn": (CudaCudnn, "sim", torch.bfloat16, ("cuda_flash", "cuda_efficient"), "math"),
    "flex": (Flex, "cpu", torch.float32, (), "math"),
}


@contextlib.contextmanager
def broken_methods(name: str, direction: str, how: str):
    """A kernel whose forward or backward raises or is wrong; `flex` is asked on CPUs then, where math does the rest."""
    kernel = CHAIN[name][0]
    methods = ("forward", "backward", "refuses")
    right = {method: kernel.__dict__.get(method, getattr(kernel, method)) for method in methods}

    def run(self, work, *rest):
        if how == "raises":
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")
        found = right[direction](self, work, *rest)
        if direction == "backward":
            rest[1].dk_BGKD.mul_(1.5)
        return found and found._replace(out_BHSD=found.out_BHSD * 1.1)

    if name == "flex":
        kernel.refuses = lambda self, need: None if need.score_mod else "is not tried"
        kernel.forward = lambda self, *given: Math().forward(*given)
    setattr(kernel, direction, run)
    try:
        yield
    finally:
        for method, was in right.items():
            setattr(kernel, method, was)


def attend_with(name: str, direction: str, how: str, head_dim: int) -> tuple[str, list[str], bool]:
    """Where the last rank has the kernel broken (`flex`: each): what is used, what is said, whether it is right."""
    _, device, dtype, before, _ = CHAIN[name]
    bend = {"score_mod": lambda s, b, h, i, j: s - (i - j).abs() / 8} if name == "flex" else {}
    how_cut = {"seq_len": 19, "mask": masks.causal(), "num_heads": 2, "head_dim": head_dim}
    with contextlib.ExitStack() as stack:
        for other in before:
            stack.enter_context(broken_methods(other, "forward", "raises"))
        if dist.get_rank() == dist.get_world_size() - 1 or name == "flex":
            stack.enter_context(broken_methods(name, direction, how))
        cp = ContextParallel(world_mesh(dist.get_world_size()), **how_cut)
        q, k, v = (torch.randn(1, 2, cp.num_tokens, head_dim).to(dtype).to(device) for _ in range(3))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = cp(q, k, v, **bend)
    want = ContextParallel(world_mesh(dist.get_world_size()), **how_cut, kernel="math")(q, k, v, **bend)
    near = bool(torch.allclose(out.float().cpu(), want.float().cpu(), atol=2e-2))
    said = [str(w.message) for w in caught if "attention kernel" in str(w.message)]
    return cp.explain().splitlines()[-1], said, near


# `flex` has no backward on CPUs, so that it cannot but raise there.
CASES = [
    (name, direction, how)
    for name, direction, how in itertools.product(CHAIN, ("forward", "backward"), ("raises", "wrong"))
    if name != "flex" or how == "raises"
]


# Verdicts are kept by head dim: these are no other test's, and one for each case of a device.
HEAD_DIMS = (24, 40, 56, 48, 72, 80, 88, 96, 104, 112, 120, 128)


@pytest.mark.parametrize(("name", "direction", "how"), CASES)
def test_every_kernel_has_one_that_takes_over_on_all_ranks(pool, name, direction, how):
    _, device, _, before, following = CHAIN[name]
    head_dim = HEAD_DIMS[CASES.index((name, direction, how)) % len(HEAD_DIMS)]
    found = pool.run(attend_with, name, direction, how, head_dim, ranks=2, device=device, timeout=120)
    wrong = f"in the {'output' if direction == 'forward' else 'gradient of k'}"
    mine = wrong if how == "wrong" else "raises RuntimeError: CUDA error: an illegal memory access"
    reasons = (mine if name == "flex" else "fails its check on another rank"), mine
    for (chosen, said, near), reason in zip(found, reasons, strict=True):
        assert near
        assert chosen.split()[1].strip(":,'") == following, chosen
        assert len(said) == len(before) + 1
        assert f"attention kernel {name!r} is not used" in said[-1] and reason in said[-1]
        assert f"{following!r} takes over" in said[-1]


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
