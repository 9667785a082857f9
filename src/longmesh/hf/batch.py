"""What transformers' collators put into a batch, as what a scope takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Bounds of packed documents as flash attention wants them; a scope needs one of them, and the model none.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def scope_arguments(batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The batch without bounds of documents, and the options of `context_parallel` that say the same."""
    rest = {name: value for name, value in batch.items() if name not in _BOUNDS}
    bounds = batch.get("cu_seq_lens_q")
    return rest, {} if bounds is None else {"cu_seqlens": bounds}
