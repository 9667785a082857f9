"""Components: the stretches of the sequence that no slice connects. Of packed documents, the documents.

Pitfall: a token that sees nothing and is seen by nothing (padding) is in no slice; such tokens form
components of their own, one for each run of them.
"""

import numpy as np

from longmesh.attention.mask.slices import K0, K1, Q0, Q1


def components(slices: np.ndarray, seq_len: int, one_sequence: bool = True) -> np.ndarray:
    """Rows (start, stop), in order, that cover the sequence; each slice lies within one of them: its queries alone,
    if the keys are other tokens."""
    start, stop = slices[:, Q0], slices[:, Q1]
    if one_sequence:
        start, stop = np.minimum(start, slices[:, K0]), np.maximum(stop, slices[:, K1])
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(stop[order])
    first = np.ones(len(start), dtype=bool)
    first[1:] = start[1:] >= reach[:-1]
    last = np.append(first[1:], True)[: len(first)]
    ends = np.concatenate([[0], start[first], reach[last], [seq_len]])
    bounds = np.sort(ends)  # ends of a run of padding are those of its neighbours
    pairs = np.stack([bounds[:-1], bounds[1:]], axis=1)
    return pairs[pairs[:, 0] < pairs[:, 1]]
