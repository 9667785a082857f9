"""Every way into context parallelism x every kind of mask, on 2 and 3 ranks, also for lengths that don't divide: output
and gradients are those of one process."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask

import longmesh
from longmesh import Replicate, Shard, distribute_tensor
from longmesh.attention import ContextParallel, create_cp_block_mask, masks
from longmesh.experimental import context_parallel, context_parallel_shard, context_parallel_unshard
from longmesh.parallel import AttentionParallel, parallelize_module
from longmesh.testing import cpu_mesh

HEADS, KV_HEADS, WINDOW = 4, 2, 7


def lengths_of(length: int) -> list[int]:
    return [11, length - 17, 6]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return causal(b, h, q_idx, kv_idx) & (q_idx - kv_idx < WINDOW)


def documents(length: int):
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths_of(length)))
    return lambda b, h, q_idx, kv_idx: (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)


def by_head(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 <= h


class Kind(NamedTuple):
    """A mask as FlexAttention, as the engine and as F.scaled_dot_product_attention are told of it."""

    mask_mod: Callable
    mask: masks.Mask
    is_causal: bool = False


def kinds(length: int) -> dict[str, Kind]:
    return {
        "causal": Kind(causal, masks.causal(), is_causal=True),
        "documents": Kind(documents(length), masks.documents(lengths_of(length))),
        "window": Kind(window, masks.sliding_window(WINDOW - 1)),
        "mask_mod": Kind(by_head, masks.mask_mod(by_head)),
    }


class Case(NamedTuple):
    """`slopes` are captured by the score_mod, for ways in that take one."""

    mesh: DeviceMesh
    qkv: list[Tensor]
    weight: Tensor
    slopes: Tensor
    kind: Kind

    @property
    def length(self) -> int:
        return self.weight.shape[2]

    def block_mask(self):
        return create_block_mask(self.kind.mask_mod, None, HEADS, self.length, self.length, device="cpu")

    def dense_mask(self) -> Tensor:
        at = torch.arange(self.length)
        rows = [self.kind.mask_mod(0, torch.tensor(h), at[:, None], at) for h in range(HEADS)]
        return torch.stack([row.expand(self.length, self.length) for row in rows])

    def score_mod(self, score, b, h, q_idx, kv_idx):
        return score + self.slopes[h] * (q_idx - kv_idx).abs()

    def scope_mask(self) -> masks.Mask | None:
        """The mask to tell a scope; causality is told in the call."""
        return None if self.kind.is_causal else self.kind.mask


def make_case(mesh: DeviceMesh, length: int, kind: Kind) -> Case:
    draw = torch.Generator().manual_seed(length)
    qkv = [torch.randn(2, heads, length, 8, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    slopes = -torch.rand(HEADS, generator=draw)
    return Case(mesh, qkv, torch.randn(qkv[0].shape, generator=draw), slopes.requires_grad_(), kind)


def one_process(case: Case, uses_slopes: bool) -> list[Tensor]:
    """Output and gradients of dense attention in double precision."""
    q, k, v, slopes = (t.detach().double().requires_grad_() for t in (*case.qkv, case.slopes))
    at = torch.arange(case.length)
    bias = (slopes if uses_slopes else slopes * 0)[:, None, None] * (at[:, None] - at).abs()
    bias = bias.masked_fill(~case.dense_mask(), -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, bias.expand(2, -1, -1, -1), enable_gqa=True)
    (out * case.weight).sum().backward()
    return [
        t.detach().float() for t in (out, q.grad, k.grad, v.grad, *([slopes.grad] if uses_slopes else []))
    ]


def sdpa(case: Case, *qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, is_causal=case.kind.is_causal, enable_gqa=True)


def in_scope(case: Case, attend: Callable[..., Tensor], mask: masks.Mask | None) -> list[Tensor]:
    parts = [*(t.clone() for t in case.qkv), case.weight.clone()]
    with context_parallel(case.mesh, buffers=parts, buffer_seq_dims=[2] * 4, mask=mask):
        *local, weight = (p.clone() for p in parts)
        local = [t.requires_grad_() for t in local]
        out = attend(*local)
        (out * weight).sum().backward()
    return context_parallel_unshard(case.mesh, [out.detach(), *(t.grad for t in local)], [2] * 4)


def scope(case: Case) -> list[Tensor]:
    return in_scope(case, lambda *qkv: sdpa(case, *qkv), case.scope_mask())


def scope_with_flex(case: Case) -> list[Tensor]:
    def attend(*qkv):
        mine = create_cp_block_mask(case.kind.mask_mod, None, HEADS, case.length, case.length, case.mesh)
        cut, whole = (
            longmesh.flex_attention(*qkv, case.score_mod, block_mask, enable_gqa=True)
            for block_mask in (mine, case.block_mask())
        )
        assert torch.equal(cut, whole)
        return whole

    return in_scope(case, attend, None)


class Attention(nn.Module):
    """Attention as a module, by one call or the other."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


def in_module(case: Case, attend: Callable[..., Tensor], mask: masks.Mask | None) -> list[Tensor]:
    style = AttentionParallel(seq_dim=2, mask=mask)
    model = parallelize_module(nn.Sequential(Attention(attend)), case.mesh, {"0": style})
    *local, weight = context_parallel_shard(case.mesh, [*case.qkv, case.weight], [2] * 4)
    local = [t.requires_grad_() for t in local]
    out = model[0](*local)
    (out * weight).sum().backward()
    return context_parallel_unshard(case.mesh, [out.detach(), *(t.grad for t in local)], [2] * 4)


def module(case: Case) -> list[Tensor]:
    return in_module(case, lambda *qkv: sdpa(case, *qkv), case.scope_mask())


def module_with_flex(case: Case) -> list[Tensor]:
    whole = case.block_mask()
    return in_module(
        case, lambda *qkv: longmesh.flex_attention(*qkv, case.score_mod, whole, enable_gqa=True), None
    )


def on_dtensors(case: Case, attend: Callable[..., Tensor]) -> list[Tensor]:
    *parts, weight = (distribute_tensor(t, case.mesh, [Shard(2)]) for t in (*case.qkv, case.weight))
    parts = [t.requires_grad_() for t in parts]
    out = attend(*parts)
    assert out.placements == (Shard(2),)
    (out * weight).sum().backward()
    return [t.full_tensor().detach() for t in (out, *(p.grad for p in parts))]


def dtensor(case: Case) -> list[Tensor]:
    if case.kind.is_causal:
        return on_dtensors(case, lambda *qkv: sdpa(case, *qkv))
    mask = distribute_tensor(case.dense_mask(), case.mesh, [Replicate()])
    return on_dtensors(
        case, lambda *qkv: F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=True)
    )


def dtensor_with_flex(case: Case) -> list[Tensor]:
    whole = case.block_mask()
    return on_dtensors(
        case, lambda *qkv: longmesh.flex_attention(*qkv, case.score_mod, whole, enable_gqa=True)
    )


def function(case: Case) -> list[Tensor]:
    cp = ContextParallel(case.mesh, seq_len=case.length, mask=case.kind.mask)
    local = [cp.shard(t, 2).requires_grad_() for t in case.qkv]
    out = cp(*local)
    (out * cp.shard(case.weight, 2)).sum().backward()
    return [cp.unshard(t, 2) for t in (out.detach(), *(t.grad for t in local))]


WITH_FLEX = (scope_with_flex, module_with_flex, dtensor_with_flex)


def differences(way: Callable[[Case], list[Tensor]], ranks: int) -> dict[str, float]:
    found = {}
    for length in (24, 37):
        for name, kind in kinds(length).items():
            case = make_case(cpu_mesh(ranks), length, kind)
            got = way(case)
            if way in WITH_FLEX:
                assert case.slopes.grad is not None
                dist.all_reduce(case.slopes.grad)
                got.append(case.slopes.grad)
            want = one_process(case, uses_slopes=way in WITH_FLEX)
            pairs = zip(got, want, strict=True)
            found[f"{name} of {length}"] = max((a - b).abs().max().item() for a, b in pairs)
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", [scope, module, dtensor, function, *WITH_FLEX])
def test_every_way_in_and_every_mask_is_one_process(pool, way, ranks):
    for found in pool.run(differences, way, ranks, ranks=ranks):
        assert len(found) == 8
        assert max(found.values()) < 1e-4, found
