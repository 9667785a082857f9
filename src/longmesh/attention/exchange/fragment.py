"""Columns of a fragment: keys that one rank needs and one rank owns.

Rows [START, STOP) of OWNER's shard lie at OFFSET of RANK's buffer of STAGE; they are the coordinates
from AT on. Pitfall: START and STOP count in the owner's shard, AT in the whole sequence.
"""

import numpy as np

RANK, STAGE, OWNER, START, STOP, OFFSET, AT = range(7)


def no_fragments() -> np.ndarray:
    """An empty array of fragments."""
    return np.zeros((0, 7), dtype=np.int64)
