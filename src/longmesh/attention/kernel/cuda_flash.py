"""FlashAttention on CUDA: the blocks of a stage in a few launches, as sequences of many lengths.

Shapes: B batch, H query heads, G key/value heads, X heads with the batch folded in, S query rows, K key rows, T and U
rows of a launch's queries and keys, D head dim, E value head dim.

NEVER RUN on a GPU where this was written: it runs for values on a made-up device, whose op is a stand-in by the
documented contract. Packed queries are (T, X, D), windows are aligned at the bottom right, head dims are multiples of 8
and up to 256, the log-sum-exp is (X, T) in fp32, key/value heads are shared among query heads, no mask tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longmesh._torch import aten
from longmesh.attention.kernel.base import AttentionGradients, Final, Kernel, KernelWork, Need
from longmesh.attention.kernel.batch import fold_view
from longmesh.attention.kernel.cuda_sdpa import refuses_device
from longmesh.attention.kernel.merge import PartialResult, accumulate_dtype, empty_partial, merge_
from longmesh.attention.kernel.tiled import operand, refuses_scores, safe_scale
from longmesh.attention.kernel.varlen import VarlenLaunch, launches
from longmesh.attention.mask.block import Block

_WIDTH = 8


class _Placed(NamedTuple):
    """A launch with its row numbers on the device; adjacent rows are a slice. `rounds`: rows of the launch and of the
    buffer, each row of the buffer once in a round."""

    q: Tensor | slice
    k: Tensor | slice
    q_starts: Tensor
    k_starts: Tensor
    longest: tuple[int, int]
    window: tuple[int | None, int | None]
    rounds: tuple[tuple[Tensor | slice, Tensor | slice], ...]
    extra: tuple[int, int]

    def bounds(self) -> dict[str, int | None]:
        return {"window_size_left": self.window[0], "window_size_right": self.window[1]}


@lru_cache(maxsize=512)
def _placed(blocks: tuple[Block, ...], rows: int, keys: int, device: torch.device) -> tuple[_Placed, ...]:
    """The launches of a stage, copied to the device once."""
    return tuple(_place(launch, device) for launch in launches(blocks, rows, keys))


def _place(launch: VarlenLaunch, device: torch.device) -> _Placed:
    q_starts, k_starts = (torch.from_numpy(s).to(device) for s in (launch.q_starts, launch.k_starts))
    longest = int(np.diff(launch.q_starts).max()), int(np.diff(launch.k_starts).max())
    rounds, left = [], np.arange(len(launch.q_rows))
    while len(left):
        first = np.sort(np.unique(launch.q_rows[left], return_index=True)[1])
        rounds.append((_index(left[first], device), _index(launch.q_rows[left[first]], device)))
        left = np.delete(left, first)
    q, k = (_index(rows, device) for rows in (launch.q_rows, launch.k_rows))
    return _Placed(q, k, q_starts, k_starts, longest, launch.window, tuple(rounds), launch.extra_rows)


def _index(rows: np.ndarray, device: torch.device) -> Tensor | slice:
    if (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def _take(tensor: Tensor, rows: Tensor | slice, dim: int) -> Tensor:
    if isinstance(rows, slice):
        return tensor.narrow(dim, rows.start, rows.stop - rows.start)
    return tensor.index_select(dim, rows)


def _add(total: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    """Adds to rows of dim 1, of which one may occur more than once."""
    if isinstance(rows, slice):
        total[:, rows] += values
    else:
        total.index_add_(1, rows, values.to(total.dtype))


class CudaFlash(Kernel):
    """FlashAttention: at most a launch for each kind of window, but where rows would be copied too often."""

    name = "cuda_flash"

    def refuses(self, need: Need) -> str | None:
        why = refuses_device(need, (torch.bfloat16, torch.float16))
        if why is None and max(need.head_dim, need.v_head_dim) > 256:
            why = f"takes head dims up to 256, not {max(need.head_dim, need.v_head_dim)}"
        if why is None and (need.elementwise or need.bias):
            why = "has no mask tensor, which a mask_mod or a bias needs"
        return why or refuses_scores(need)

    def forward(self, work: KernelWork, state: PartialResult | None = None) -> PartialResult:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, _ = work
        B, H, S, D = q_BHSD.shape
        E = v_BGKE.shape[-1]
        if q_BHSD.numel() == 0:
            return empty_partial(q_BHSD, E) if state is None else state
        factor, scale = safe_scale(score.scale_for(D))
        q, k, v = _packed(q_BHSD, k_BGKD, v_BGKE)
        q = q if factor == 1.0 else q * factor
        for launch in _placed(tuple(blocks), S, k_BGKD.shape[2], q.device):
            taken = _take(q, launch.q, 0), _take(k, launch.k, 0), _take(v, launch.k, 0)
            out_TXD, lse_XT, *_ = aten._flash_attention_forward(
                *taken, launch.q_starts, launch.k_starts, *launch.longest, 0.0, False, False,
                scale=scale, **launch.bounds(),
            )  # fmt: skip
            out_XTE = out_TXD.transpose(0, 1)[..., :E]
            if state is None and launch.q == slice(0, S):  # all rows, in order: the result is the state
                dtype = accumulate_dtype(q_BHSD.dtype)
                state = PartialResult(
                    *(t.unflatten(0, (B, H)).to(dtype).contiguous() for t in (out_XTE, lse_XT))
                )
                continue
            state = empty_partial(q_BHSD, E) if state is None else state
            for here, there in launch.rounds:
                _merge(state, there, _take(out_XTE, here, 1), _take(lse_XT, here, 1))
        return empty_partial(q_BHSD, E) if state is None else state

    def backward(self, work: KernelWork, final: Final, gradients: AttentionGradients) -> None:
        q_BHSD, k_BGKD, v_BGKE, blocks, score, _ = work
        D, E = q_BHSD.shape[-1], v_BGKE.shape[-1]
        if q_BHSD.numel() == 0:
            return
        factor, scale = safe_scale(score.scale_for(D))
        q, k, v = _packed(q_BHSD, k_BGKD, v_BGKE)
        q = q if factor == 1.0 else q * factor
        out, dout = (
            operand(t, q.shape[-1], q.dtype).transpose(0, 1) for t in (final.out_BHSE, final.dout_BHSE)
        )
        lse_XS = final.lse_BHS.flatten(0, 1)
        dq, dk, dv = (fold_view(g) for g in (gradients.dq_BHSD, gradients.dk_BGKD, gradients.dv_BGKE))
        unread = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the dropout state
        for launch in _placed(tuple(blocks), q_BHSD.shape[2], k_BGKD.shape[2], q.device):
            dout_t, q_t, out_t = (_take(t, launch.q, 0) for t in (dout, q, out))
            k_t, v_t = _take(k, launch.k, 0), _take(v, launch.k, 0)
            dq_t, dk_t, dv_t = aten._flash_attention_backward(
                dout_t, q_t, k_t, v_t, out_t, _take(lse_XS, launch.q, 1).contiguous(), launch.q_starts,
                launch.k_starts, *launch.longest, 0.0, False, unread, unread[:0], scale=scale, **launch.bounds(),
            )  # fmt: skip
            dq_t = dq_t if factor == 1.0 else dq_t * factor
            _add(dq, launch.q, dq_t.transpose(0, 1)[..., :D])
            _add(dk, launch.k, dk_t.transpose(0, 1)[..., :D])
            _add(dv, launch.k, dv_t.transpose(0, 1)[..., :E])


def _packed(*tensors_BHSD: Tensor) -> list[Tensor]:
    """(S, X, D) each, of one head dim that is a multiple of 8."""
    width = -(-max(t.shape[-1] for t in tensors_BHSD) // _WIDTH) * _WIDTH
    return [operand(t, width, t.dtype).transpose(0, 1) for t in tensors_BHSD]


def _merge(state: PartialResult, rows: Tensor | slice, out_XTE: Tensor, lse_XT: Tensor) -> None:
    out, lse = fold_view(state.out_BHSD), fold_view(state.lse_BHS)
    if isinstance(rows, slice):
        merge_(out[:, rows], lse[:, rows], out_XTE, lse_XT)
        return
    mine_out, mine_lse = out.index_select(1, rows), lse.index_select(1, rows)
    merge_(mine_out, mine_lse, out_XTE, lse_XT)
    out.index_copy_(1, rows, mine_out)
    lse.index_copy_(1, rows, mine_lse)
