"""An attention plan as a picture: who owns which tokens, and who computes which pairs of the mask."""

from __future__ import annotations

import numpy as np

from longmesh.attention import AttentionPlan
from longmesh.attention.mask.slices import HI, K0, K1, LO, Q0, Q1
from longmesh.attention.plan.schedule import WHO
from longmesh.debug.shard_picture import piece_color


def draw_plan(plan: AttentionPlan, size: float = 480.0) -> str:
    """Who computes what: queries downwards, keys to the right, a colour for each rank.

    The stripe at the left shows who owns the tokens. With heads that are split, every rank of a group computes the
    group's pairs, for its heads.
    """
    row = plan.rows[0]
    unit, edge = size / max(plan.seq_len, plan.kv_len, 1), 24.0
    shapes: list[str] = []
    for rank, pieces in enumerate(row.ownership.pieces):
        for start, stop in pieces:
            box = f'x="0" y="{start * unit:.2f}" width="14" height="{(stop - start) * unit:.2f}"'
            shapes.append(
                f'<rect {box} fill="{piece_color(rank)}"><title>rank {rank}: {start}..{stop}</title></rect>'
            )
    shapes.append(f'<rect x="{edge}" y="0" width="{size}" height="{size}" fill="#f6f6f6"/>')
    for part in row.schedule.rows:
        points = " ".join(f"{edge + k * unit:.2f},{q * unit:.2f}" for q, k in outline(part))
        first = int(part[WHO]) * row.inner
        who = f"rank {first}" if row.inner == 1 else f"ranks {first} to {first + row.inner - 1}"
        tip = f"{who}: queries {part[Q0]}..{part[Q1]}, keys {part[K0]}..{part[K1]}"
        shapes.append(
            f'<polygon points="{points}" fill="{piece_color(first)}"><title>{tip}</title></polygon>'
        )
    view = f'viewBox="0 0 {size + edge:g} {size:g}"'
    return f'<svg width="{size + edge:g}" height="{size:g}" {view}>{"".join(shapes)}</svg>'


def outline(part: np.ndarray) -> list[tuple[float, float]]:
    """The corners (query, key) of a slice: a rectangle between two diagonals."""
    q0, q1, k0, k1 = (float(part[column]) for column in (Q0, Q1, K0, K1))
    corners = [(q0, k0), (q0, k1), (q1, k1), (q1, k0)]
    corners = _clip(corners, 1.0, float(part[HI]) + 0.5)
    return _clip(corners, -1.0, -float(part[LO]) + 0.5)


def _clip(corners: list[tuple[float, float]], sign: float, bound: float) -> list[tuple[float, float]]:
    """The part of a polygon where sign * (key - query) <= bound."""
    kept: list[tuple[float, float]] = []
    for (q, k), (next_q, next_k) in zip(corners, corners[1:] + corners[:1], strict=True):
        here, there = sign * (k - q) - bound, sign * (next_k - next_q) - bound
        if here <= 0:
            kept.append((q, k))
        if here * there < 0:
            share = here / (here - there)
            kept.append((q + share * (next_q - q), k + share * (next_k - k)))
    return kept
