"""The CPU kernel: torch's fused flash attention, called on the tiles that `lower` cuts.

Shapes: N tiles of a call, X heads with the batch folded in, L and M rows and keys of a tile, D head dim.

What the fused kernel does to the unwary: a row whose mask hides every key comes back with lse 0.0; q
or k of length zero ends the process; v must have q's head dim; the mask has no gradient (all of
these are handled for every fused kernel in `tiled`); bf16 and fp16 give results of that precision
and a backward 6 to 9 times slower, so inputs are upcast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longmesh._torch import private_op
from longmesh.attention.kernel.base import Need
from longmesh.attention.kernel.lower import Tiling
from longmesh.attention.kernel.merge import accumulate_dtype
from longmesh.attention.kernel.tiled import TiledKernel, TileShape, refuses_scores

_flash = private_op("_scaled_dot_product_flash_attention_for_cpu.default", "the fused kernel on CPUs")
_flash_backward = private_op(
    "_scaled_dot_product_flash_attention_for_cpu_backward.default", "the fused kernel on CPUs"
)


class CpuFlash(TiledKernel):
    """torch's fused CPU kernel on strips, in fp32 or fp64."""

    name = "cpu_flash"
    tiling = Tiling()
    backward_tiling = Tiling(bands=((256, 64), (768, 128)), widest_triangle=1152, batch_keys=1 << 14)

    def refuses(self, need: Need) -> str | None:
        if need.device != "cpu":
            return f"runs on cpu, not on {need.device}"
        if not need.dtype.is_floating_point or need.dtype.itemsize < 2:
            return f"takes fp64, fp32, bf16 and fp16, not {need.dtype}"
        return refuses_scores(need)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return accumulate_dtype(dtype)

    def attend(
        self, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, shape: TileShape
    ) -> tuple[Tensor, Tensor]:
        return _flash(q_NXLD, k_NXMD, v_NXMD, 0.0, shape.causal, attn_mask=shape.mask, scale=shape.scale)

    def differentiate(
        self, dout_NXLD: Tensor, q_NXLD: Tensor, k_NXMD: Tensor, v_NXMD: Tensor, out_NXLD: Tensor, lse_NXL: Tensor,
        shape: TileShape,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        operands = (dout_NXLD, q_NXLD, k_NXMD, v_NXMD, out_NXLD, lse_NXL)
        return _flash_backward(*operands, 0.0, shape.causal, attn_mask=shape.mask, scale=shape.scale)
