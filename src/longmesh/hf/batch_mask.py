"""What a batch's padding and packed documents hide from attention, as a mask of the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from longmesh.attention import masks
from longmesh.errors import LongmeshError


def visible(
    batch: Mapping[str, Any], positions: Tensor, cu_seqlens: Tensor | Sequence[int] | None
) -> masks.Mask | None:
    """What padding and packed documents hide, None if nothing."""
    padding = batch.get("attention_mask")
    if padding is not None and padding.ndim != 2:
        raise LongmeshError(
            f"hf.context_parallel: attention_mask is {tuple(padding.shape)}; give (rows, tokens), 1 for tokens and 0 "
            "for padding, and other masks as mask="
        )
    seen = _documents(positions, cu_seqlens) if padding is None or cu_seqlens is not None else None
    if padding is None or bool(padding.all()):
        return seen
    tokens = _without_padding(padding.bool())
    return tokens if seen is None else seen & tokens


def _documents(positions: Tensor, cu_seqlens: Tensor | Sequence[int] | None) -> masks.Mask | None:
    """The documents of each row, by their bounds or by positions that start again; None if a row is one."""
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        return masks.from_cu_seqlens(bounds, within=masks.full())
    steps = positions.diff(dim=1)
    starts = steps != 1
    if not bool(starts.any()):
        return None
    # Only a position of 0 says that a document begins: answers that share a prompt go back to where it ends.
    unclear = starts & (positions[:, 1:] != 0)
    if bool(unclear.any()):
        row, token = unclear.nonzero()[0].tolist()
        how = "jump" if bool(steps[row, token] > 1) else "go back"
        raise LongmeshError(
            f"hf.context_parallel: position_ids {how} from {int(positions[row, token])} to "
            f"{int(positions[row, token + 1])} in row {row}, which may be one document or two; pass an attention_mask "
            "of ones if each row is one document, else cu_seqlens= or positions that start again at 0. If answers "
            "share a prompt, pass an attention_mask of ones, and mask= with the keys that each answer sees"
        )
    lengths = [run_lengths(row.tolist()) for row in starts]
    return masks.documents(lengths[0] if len(lengths) == 1 else lengths, within=masks.full())


def _without_padding(padding: Tensor) -> masks.Mask:
    """Padding at the ends of rows is documents of its own; between tokens, hidden key by key."""
    edges = padding.diff(dim=1)
    if bool((edges.sum(1) <= 2).all()) and not bool((edges.sum(1) == 2)[padding[:, 0]].any()):
        lengths = [run_lengths(row.tolist()) for row in edges]
        return masks.documents(lengths[0] if len(lengths) == 1 else lengths, within=masks.full())
    return masks.mask_mod(lambda b, h, q_idx, kv_idx: padding[b, kv_idx], rows=padding.shape[0])


def document_lengths(
    padding: Tensor | None,
    positions: Tensor,
    cu_seqlens: Tensor | Sequence[int] | None,
    *,
    apart: bool = True,
) -> list[list[int]]:
    """The lengths of the documents of each row, for layers with a state. Padding is documents of its own, or if not
    `apart` a part of what is beside it."""
    rows, seq_len = positions.shape
    begins = torch.zeros((rows, max(seq_len - 1, 0)), dtype=torch.bool)
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
        begins[:, [bound - 1 for bound in bounds if 0 < bound < seq_len]] = True
    elif padding is None:
        begins = positions.diff(dim=1).cpu() != 1
    if padding is not None and apart:
        begins = begins | (padding.bool().diff(dim=1).cpu())
        real = padding.bool()
        first, last = real.int().argmax(1), seq_len - 1 - real.flip(1).int().argmax(1)
        inside = torch.arange(seq_len, device=real.device)
        hole = ~real & (inside > first[:, None]) & (inside < last[:, None]) & real.any(1, keepdim=True)
        if bool(hole.any()):
            raise LongmeshError(
                "hf.context_parallel: attention_mask has padding between tokens, which a recurrent layer's state would "
                "run through; put padding at the ends of rows"
            )
    return [run_lengths(row.tolist()) for row in begins]


def run_lengths(starts: list[bool]) -> list[int]:
    """Lengths of the pieces of a row, from whether each token but the first begins one."""
    lengths = [1]
    for begins in starts:
        if begins:
            lengths.append(1)
        else:
            lengths[-1] += 1
    return lengths
