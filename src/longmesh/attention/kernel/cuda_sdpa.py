"""Two CUDA kernels of torch: memory-efficient and cuDNN. NEVER RUN on a GPU where this was written.

Shapes: N tiles of a call, X heads with the batch folded in, L and M rows and keys of a tile, D head dim.

There was no GPU: they run for values on a made-up device, whose ops are stand-ins by their documented contract: causal
is aligned at the top left, the rows of a mask tensor must be aligned; efficient has one key/value head per query head,
and pads lse to multiples of 32 rows. What a row that sees no key gives is not promised.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longmesh._torch import private_op
from longmesh.attention.kernel.base import Need
from longmesh.attention.kernel.lower import Tiling
from longmesh.attention.kernel.tiled import TiledKernel, TileShape, refuses_scores

_GPU = "the fused kernels on GPUs"
_efficient_forward = private_op("_scaled_dot_product_efficient_attention", _GPU)
_efficient_backward = private_op("_scaled_dot_product_efficient_attention_backward", _GPU)
_cudnn_forward = private_op("_scaled_dot_product_cudnn_attention", _GPU)
_cudnn_backward = private_op("_scaled_dot_product_cudnn_attention_backward", _GPU)
_MASKS = Tiling(
    rows=1024,
    narrow_rows=512,
    bands=((1024, 512),),
    widest_mask=8192,
    widest_triangle=0,
    small_rows=128,
    pad=32,
    batch_rows=1 << 14,
    batch_keys=1 << 14,
)


def _takes_cuda_ops(device: str) -> bool:
    """CUDA, or a made-up device that stands in for it in tests."""
    if device in ("cpu", "cuda", "meta"):
        return device == "cuda"
    return getattr(torch.get_device_module(device), "stands_in_for", None) == "cuda"


def refuses_device(need: Need, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if not _takes_cuda_ops(need.device):
        return f"runs on cuda, not on {need.device}"
    if need.dtype not in dtypes:
        return f"takes {', '.join(str(d).removeprefix('torch.') for d in dtypes)}, not {need.dtype}"
    return None


class CudaEfficient(TiledKernel):
    """Memory-efficient attention: masks and biases as a tensor, fp32 too."""

    name = "cuda_efficient"
    tiling = backward_tiling = _MASKS
    pad_head_dim_to = 8

    def refuses(self, need: Need) -> str | None:
        why = refuses_device(need, (torch.float32, torch.bfloat16, torch.float16))
        return why or refuses_scores(need)

    def attend(
        self, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, shape: TileShape
    ) -> tuple[Tensor, Tensor]:
        k, v = _one_per_head(q_NXLD, k_NXMD, v_NXMD)
        out, lse, *_ = _efficient_forward(
            q_NXLD, k, v, _aligned(shape.mask, q_NXLD), True, 0.0, shape.causal, scale=shape.scale
        )
        return out, lse[:, :, : q_NXLD.shape[2]]

    def differentiate(
        self, dout_NXLD: Tensor, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, out_NXLD: Tensor, lse_NXL: Tensor,
        shape: TileShape,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        k, v = _one_per_head(q_NXLD, k_NXMD, v_NXMD)
        lse = F.pad(lse_NXL, (0, -lse_NXL.shape[2] % 32), value=torch.inf)
        unread = torch.zeros((), dtype=torch.int64, device=q_NXLD.device)  # the dropout state
        dq, dk, dv, _ = _efficient_backward(
            dout_NXLD, q_NXLD, k, v, _aligned(shape.mask, q_NXLD), out_NXLD, lse, unread, unread, 0.0,
            [True, True, True, False], shape.causal, scale=shape.scale,
        )  # fmt: skip
        heads = k_NXMD.shape[1]
        return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)


def _one_per_head(q_NXLD: Tensor, *kv_NXMD: Tensor) -> list[Tensor]:
    return [t.repeat_interleave(q_NXLD.shape[1] // t.shape[1], dim=1) for t in kv_NXMD]


def _aligned(mask_NXLM: Tensor | None, q_NXLD: Tensor) -> Tensor | None:
    """The mask expanded to every tile and head, its rows starting at multiples of 8 elements."""
    if mask_NXLM is None:
        return None
    keys = mask_NXLM.shape[-1]
    mask = F.pad(mask_NXLM, (0, -keys % 8))[..., :keys]
    return mask.expand(q_NXLD.shape[0], q_NXLD.shape[1], -1, -1)


class CudaCudnn(TiledKernel):
    """cuDNN's fused attention: masks as a tensor, shared key/value heads."""

    name = "cuda_cudnn"
    tiling = backward_tiling = _MASKS
    pad_head_dim_to = 8

    def refuses(self, need: Need) -> str | None:
        why = refuses_device(need, (torch.bfloat16, torch.float16))
        if why is None and max(need.head_dim, need.v_head_dim) > 128:
            why = f"takes head dims up to 128, not {max(need.head_dim, need.v_head_dim)}"
        return why or refuses_scores(need)

    def attend(
        self, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, shape: TileShape
    ) -> tuple[Tensor, Tensor]:
        k, v = _one_per_head(q_NXLD, k_NXMD, v_NXMD)
        out, lse, *_ = _cudnn_forward(
            q_NXLD, k, v, _aligned(shape.mask, q_NXLD), True, 0.0, shape.causal, False, scale=shape.scale
        )
        return out, lse.reshape(q_NXLD.shape[:3])

    def differentiate(
        self, dout_NXLD: Tensor, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, out_NXLD: Tensor, lse_NXL: Tensor,
        shape: TileShape,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        L, M = q_NXLD.shape[2], k_NXMD.shape[2]
        k, v = _one_per_head(q_NXLD, k_NXMD, v_NXMD)
        unread = torch.zeros((), dtype=torch.int64, device=q_NXLD.device)  # the dropout state
        dq, dk, dv = _cudnn_backward(
            dout_NXLD, q_NXLD, k, v, out_NXLD, lse_NXL.unsqueeze(-1).contiguous(), unread, unread,
            _aligned(shape.mask, q_NXLD), None, None, L, M, 0.0, shape.causal, scale=shape.scale,
        )  # fmt: skip
        heads = k_NXMD.shape[1]
        return dq, dk.unflatten(1, (heads, -1)).sum(2), dv.unflatten(1, (heads, -1)).sum(2)
