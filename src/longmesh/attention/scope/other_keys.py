"""OtherKeys: keys that are other tokens than those of the cut sequence, and attention to them.

    queries      cut as the sequence is           |0000|1111|2222|
    keys, cut    by a layout of their own         |00|11|22|            travel as for any attention over a cut sequence
    keys, whole  all of them on every rank        |000000| each         nothing is sent

Queries and keys are both numbered from 0, as by F.scaled_dot_product_attention and FlexAttention.

Pitfall: gradients of keys that are whole are this rank's share; their sum over the ranks is the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

from longmesh.attention.layout.base import TokenLayout
from longmesh.attention.layout.contiguous import Contiguous
from longmesh.attention.layout.named import layout_of
from longmesh.errors import LongmeshError, whole_number


@dataclass(frozen=True)
class OtherKeys:
    """`kv_len` keys, cut by `layout`, or whole on every rank if that is None. `alone`: no call attends to the sequence
    itself."""

    kv_len: int
    layout: TokenLayout | None
    alone: bool = False


def other_keys(
    kv_len: int | None, kv_layout: TokenLayout | str | None, layout: TokenLayout, alone: bool = False
) -> OtherKeys | None:
    """What the arguments say. Without `kv_layout` keys are cut as the sequence is, in order if that looks at a mask."""
    if kv_len is None:
        if kv_layout is not None:
            raise LongmeshError(
                f"kv_layout={kv_layout!r} says how keys of another length are cut; give kv_len= too, the number of "
                "all keys"
            )
        return None
    kv_len = whole_number("kv_len", kv_len)
    if kv_len < 0:
        raise LongmeshError(f"kv_len={kv_len}: give the number of all keys, 0 or more")
    if kv_len == 0 or (isinstance(kv_layout, str) and kv_layout == "whole"):
        return OtherKeys(kv_len, None, alone)
    own = layout if kv_layout is None else layout_of(kv_layout)
    if kv_layout is None and own.follows_mask:
        own = Contiguous()
    if own.follows_mask:
        raise LongmeshError(
            f"kv_layout={kv_layout!r} follows a mask, and calls have several; use 'contiguous' or 'zigzag', or "
            "'whole' where every rank has all keys"
        )
    return OtherKeys(kv_len, own, alone)
