"""Components: the stretches of the sequence that no slice connects. Of packed documents, the documents.

Pitfall: a token that sees nothing and is seen by nothing (padding) is in no slice; such tokens form
components of their own, one for each run of them.
"""

import numpy as np

from longmesh.attention.mask.slices import K0, K1, Q0, Q1


def components(slices: np.ndarray, seq_len: int) -> np.ndarray:
    """Rows (start, stop), in order, that cover the sequence; each slice lies within one of them."""
    start = np.minimum(slices[:, Q0], slices[:, K0])
    stop = np.maximum(slices[:, Q1], slices[:, K1])
    covered = np.zeros(seq_len + 1, dtype=np.int64)  # > 0 where a slice spans the cut before a token
    np.add.at(covered, start + 1, 1)
    np.add.at(covered, stop, -1)
    seen = np.zeros(seq_len + 1, dtype=np.int64)
    np.add.at(seen, start, 1)
    np.add.at(seen, stop, -1)
    seen = np.cumsum(seen)[:seq_len] > 0
    edge = np.cumsum(covered)[:seq_len] == 0
    edge[1:] &= seen[1:] | seen[:-1]
    bounds = np.append(np.nonzero(edge)[0], seq_len)
    if seq_len == 0:
        return np.zeros((0, 2), dtype=np.int64)
    return np.stack([bounds[:-1], bounds[1:]], axis=1)
