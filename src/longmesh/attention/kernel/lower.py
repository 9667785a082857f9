"""Lowering: which kernel calls compute a list of blocks. Pure, and cached on the blocks.

A fused kernel knows rectangles, the top-left aligned causal mask, and a mask tensor. So a block is
cut in strips of rows, each with only the keys that some row of it sees:

    causal           window            wide causal
    # . . . .        # # . . .         # # # : # . .      ":" left of it one rectangle without a
    # # . . .        . # # . .         # # # : # # .          mask, right of it the kernel's own
    # # # . .        . . # # .         # # # : # # #          causal mode; merged
    (strips)         (strips)

Equal strips that advance by a constant step become one call over a strided view; small tiles of
similar size (short documents) become one call over a padded copy.

Measured on the CPU kernel, per (row, key) pair of 8 heads: 30 ns from 192 rows up, 35 at 128, 40 at
64; a mask tensor adds 3-5 %, so strips with a mask beat triangles that have to be merged; causal mode
skips keys by 512, so it pays only for long triangles; padding pays only for tiles so short that the
call itself costs more. The strips of a window are all in one call and have one mask, so that in forward
short ones, which see few keys in vain, are best; in backward each strip's key gradients have to be added
up. The pitfall: a call must never have a row that sees no key (the kernel reports lse 0 for it), hence
`trim`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from longmesh.attention.mask.block import UNBOUNDED, Block


class Tiling(NamedTuple):
    """The measured constants of a kernel; the defaults are those of the CPU flash kernel's forward."""

    rows: int = 192  # rows of a strip
    narrow_rows: int = 128  # rows of a strip of fewer than `narrow_rows * 2` keys
    bands: tuple[tuple[int, int], ...] = ((1536, 32),)  # (width up to this, rows of a strip) of a window
    widest_mask: int = 2560  # keys up to which one mask over the whole strip beats cutting off its edges
    widest_triangle: int = 896  # keys up to which strips beat the kernel's causal mode
    small_rows: int = 32  # tiles with fewer rows than this (and twice the keys) are padded and batched
    pad: int = 8  # to multiples of this
    padded_keys: int = 1 << 14  # key rows that one call may copy: bounds its temporary memory
    batch_rows: int = 1 << 12  # query rows of one call over strided views: bounds its result
    batch_keys: int = 1 << 18  # key rows of one call over strided views: in backward each has a gradient
    mask_elements: int = 1 << 20  # elements of a mask that a function is asked for at a time


class KernelTile(NamedTuple):
    """Rows [q, q + rows) against keys [k, k + keys), where lo <= (key - k) - (row - q) <= hi."""

    q: int
    k: int
    rows: int
    keys: int
    lo: int
    hi: int
    elementwise: bool


class KernelCall(NamedTuple):
    """One kernel call over tiles of one shape; rows of different tiles are disjoint.

    `sizes` (rows, keys of each tile) is None when every tile has the full shape. `first`: no earlier
    call of the list has touched these rows, so that they can be written instead of merged.
    """

    rows: int
    keys: int
    lo: int
    hi: int
    elementwise: bool
    q_starts: tuple[int, ...]
    k_starts: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...] | None
    first: bool

    @property
    def full(self) -> bool:
        return self.lo == -UNBOUNDED and self.hi == UNBOUNDED and not self.elementwise

    @property
    def causal(self) -> bool:
        return self.lo == -UNBOUNDED and self.hi == 0 and not self.elementwise


def trim(block: Block) -> Block | None:
    """The block without the rows and keys at its ends that see nothing; None if nothing is left."""
    q0, q1, k0, k1, lo, hi, elementwise = block
    lo, hi = max(lo, k0 - q1 + 1), min(hi, k1 - 1 - q0)  # beyond these an edge binds nowhere
    if q0 >= q1 or k0 >= k1 or lo > hi:
        return None
    q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
    k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
    return Block(q0, q1, k0, k1, lo, hi, elementwise) if q0 < q1 and k0 < k1 else None


def as_tile(block: Block | None) -> list[KernelTile]:
    """The block as one tile (none if it is empty), with edges that bind nowhere made unbounded."""
    trimmed = trim(block) if block is not None else None
    if trimmed is None:
        return []
    q0, q1, k0, k1, lo, hi, elementwise = trimmed
    rows, keys, shift = q1 - q0, k1 - k0, q0 - k0
    low = lo + shift if lo + shift > 1 - rows else -UNBOUNDED
    high = hi + shift if hi + shift < keys - 1 else UNBOUNDED
    return [KernelTile(q0, k0, rows, keys, low, high, elementwise)]


def cut(block: Block, tiling: Tiling) -> list[KernelTile]:
    """The tiles of one block: an exact disjoint cover of it."""
    (tile,) = as_tile(block) or (None,)
    if tile is None:
        return []
    left, right = tile.lo != -UNBOUNDED, tile.hi != UNBOUNDED
    if tile.elementwise:
        return _strips(tile, max(1, tiling.mask_elements // tile.keys))
    if not (left or right):
        return [tile]
    if right and not left and tile.keys > tiling.widest_triangle:
        return _rectangle_and_triangle(tile, tiling)
    if left and right:
        return _window(tile, tiling)
    return _masked_strips(tile, tile.keys, _rows_for(tile.keys, tiling), tiling)


def _block(tile: KernelTile, q0: int, q1: int, k0: int, k1: int) -> Block:
    """The part of a tile in buffer coordinates; an unbounded edge stays so."""
    shift = tile.k - tile.q
    lo = -UNBOUNDED if tile.lo == -UNBOUNDED else tile.lo + shift
    hi = UNBOUNDED if tile.hi == UNBOUNDED else tile.hi + shift
    return Block(q0, q1, k0, k1, lo, hi, tile.elementwise)


def _rows_for(keys: int, tiling: Tiling) -> int:
    return tiling.narrow_rows if keys < 2 * tiling.narrow_rows else tiling.rows


def _masked_strips(tile: KernelTile, width: int, rows: int, tiling: Tiling) -> list[KernelTile]:
    """Strips with a mask over each; where a row sees so much that a mask is dear, with one over its edges only."""
    strips = _strips(tile, rows)
    return (
        strips
        if width <= tiling.widest_mask
        else [piece for strip in strips for piece in _edges_apart(strip)]
    )


def _window(tile: KernelTile, tiling: Tiling) -> list[KernelTile]:
    """A band with two edges: the rows that see all its width in equal strips; those at its ends see less."""
    width = tile.hi - tile.lo
    rows = next((rows for widest, rows in tiling.bands if width <= widest), tiling.rows)
    start, stop = max(0, -tile.lo), min(tile.rows, tile.keys - tile.hi)
    if stop - start < 2 * rows:
        return _masked_strips(tile, width, _rows_for(width, tiling), tiling)
    q, end, k_end = tile.q, tile.q + tile.rows, tile.k + tile.keys
    found = [
        t
        for steady in as_tile(_block(tile, q + start, q + stop, tile.k, k_end))
        for t in _masked_strips(steady, width, rows, tiling)
    ]
    for low, high in ((q, q + start), (q + stop, end)):
        found += cut(_block(tile, low, high, tile.k, k_end), tiling)
    return found


def _strips(tile: KernelTile, rows: int) -> list[KernelTile]:
    """Cut by rows, in strips of `rows` and a last one of about as many, each with the keys its rows see.

    Not in equal strips: the CPU kernel works on 64 rows at a time, and a strip of 193 costs it as much as one of 256.
    """
    count = max(1, round(tile.rows / rows))
    starts = [tile.q + i * rows for i in range(count)]
    ends = [*starts[1:], tile.q + tile.rows]
    k_end = tile.k + tile.keys
    return [
        t for q, end in zip(starts, ends, strict=True) for t in as_tile(_block(tile, q, end, tile.k, k_end))
    ]


def _rectangle_and_triangle(tile: KernelTile, tiling: Tiling) -> list[KernelTile]:
    """A wide tile with a right edge: what all rows see, and the triangle (causal mode if it is long too)."""
    if tile.hi == 0:
        return [tile]
    split, end = tile.k + tile.hi, tile.q + tile.rows
    full = as_tile(_block(tile, tile.q, end, tile.k, split))
    return full + cut(_block(tile, tile.q, end, split, tile.k + tile.keys), tiling)


def _edges_apart(strip: KernelTile) -> list[KernelTile]:
    """A wide strip as its left edge, the keys that all rows see, and its right edge."""
    left = (
        strip.rows + strip.lo - 1 if strip.lo != -UNBOUNDED else 0
    )  # keys before this: not seen by all rows
    right = strip.hi + 1 if strip.hi != UNBOUNDED else strip.keys
    if left >= right:
        return [strip]
    q0, q1, k0, k1 = strip.q, strip.q + strip.rows, strip.k, strip.k + strip.keys
    ends = [k0, k0 + max(0, left), k0 + min(strip.keys, right), k1]
    return [t for a, b in pairwise(ends) if a < b for t in as_tile(_block(strip, q0, q1, a, b))]


def coalesce(blocks: tuple[Block, ...]) -> list[Block]:
    """Joins blocks of the same rows and band whose keys touch (the cells of a block mask, for one)."""
    joined: list[Block] = []
    for block in sorted(blocks, key=lambda b: (b.q_start, b.q_stop, b.elementwise, b.lo, b.hi, b.k_start)):
        last = joined[-1] if joined else None
        if last and last.k_stop == block.k_start and last[:2] == block[:2] and last[4:] == block[4:]:
            joined[-1] = last._replace(k_stop=block.k_stop)
        else:
            joined.append(block)
    return joined


@lru_cache(maxsize=512)
def lower(blocks: tuple[Block, ...], tiling: Tiling) -> tuple[KernelCall, ...]:
    """The kernel calls that compute `blocks`, in order."""
    tiles = sorted(tile for block in coalesce(blocks) for tile in cut(block, tiling))
    groups: dict[tuple, list[list[KernelTile]]] = {}
    for tile in tiles:
        key, batched = _group_key(tile, tiling)
        for group in groups.setdefault(key, [])[-8:]:
            if batched and _fits(group, tile, key, tiling):
                group.append(tile)
                break
        else:
            groups[key].append([tile])
    return _mark_first([_call(key, group) for key, found in groups.items() for group in found])


def _group_key(tile: KernelTile, tiling: Tiling) -> tuple[tuple, bool]:
    """The shape of the call a tile can join, and whether it can join others at all."""
    shape = (tile.rows, tile.keys, tile.lo, tile.hi, tile.elementwise)
    small = tile.rows < tiling.small_rows and tile.keys < 2 * tiling.small_rows and not tile.elementwise
    if not small:
        return (*shape, False), not tile.elementwise
    pad = lambda size: -(-size // tiling.pad) * tiling.pad  # noqa: E731
    if tile.lo == -UNBOUNDED and tile.hi == 0 and tile.rows == tile.keys:
        return (pad(tile.rows), pad(tile.keys), -UNBOUNDED, 0, False, True), True
    if tile.lo == -UNBOUNDED and tile.hi == UNBOUNDED:
        return (pad(tile.rows), pad(tile.keys), -UNBOUNDED, UNBOUNDED, False, True), True
    return (*shape, False), True


def _fits(group: list[KernelTile], tile: KernelTile, key: tuple, tiling: Tiling) -> bool:
    """Whether `tile` can join: rows disjoint and ascending, and (unless padded) a constant step."""
    last, padded, count = group[-1], key[-1], len(group) + 1
    if tile.q < last.q + last.rows:
        return False
    if padded:
        return count * key[1] <= tiling.padded_keys
    if count * key[0] > tiling.batch_rows or count * key[1] > tiling.batch_keys:
        return False
    step_q, step_k = tile.q - last.q, tile.k - last.k
    if len(group) == 1:
        return step_k > 0
    return (step_q, step_k) == (last.q - group[-2].q, last.k - group[-2].k)


def _call(key: tuple, group: list[KernelTile]) -> KernelCall:
    rows, keys, lo, hi, elementwise, padded = key
    sizes = tuple((tile.rows, tile.keys) for tile in group)
    if all(size == sizes[0] for size in sizes):
        (rows, keys), padded = sizes[0], False
    q_starts, k_starts = tuple(tile.q for tile in group), tuple(tile.k for tile in group)
    return KernelCall(
        rows, keys, lo, hi, elementwise, q_starts, k_starts, sizes if padded else None, first=False
    )


def num_first(calls: tuple[KernelCall, ...]) -> int:
    """Rows that the first call to touch them writes, rather than merges into what is there."""
    first = [call for call in calls if call.first]
    return sum(sum(r for r, _ in c.sizes) if c.sizes else c.rows * len(c.q_starts) for c in first)


def _mark_first(calls: list[KernelCall]) -> tuple[KernelCall, ...]:
    """Marks the calls whose rows no earlier call has touched."""
    touched = bytearray(max((q + call.rows for call in calls for q in call.q_starts), default=0))
    marked: list[KernelCall] = []
    for call in calls:
        sizes = call.sizes or ((call.rows, call.keys),) * len(call.q_starts)
        rows = [(q, q + size) for q, (size, _) in zip(call.q_starts, sizes, strict=True)]
        marked.append(call._replace(first=all(touched.find(1, a, b) < 0 for a, b in rows)))
        for a, b in rows:
            touched[a:b] = b"\1" * (b - a)
    return tuple(marked)
