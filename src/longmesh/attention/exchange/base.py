"""Exchange: a frozen value that says in which stage each needed fragment of keys arrives.

Stage 0 is a rank's own shard. The transfer of stage i + 1 is under way while stage i is computed, and
backward walks the same stages: partial key gradients go home and are summed.
"""

import abc

import numpy as np

from longmesh.attention.layout.base import Ownership


class Exchange(abc.ABC):
    """How keys travel. Subclasses are frozen dataclasses, so that plans can be cached.

    >>> isinstance(Ring(), Exchange), Ulysses().splits_heads
    (True, True)
    """

    relays: bool = False  # True: a stage comes from the rank before, out of its buffer of the stage before
    splits_heads: bool = False  # True: an all-to-all turns sequence shards into head shards first
    groups: int | None = None  # in how many groups of heads, where they are split; None: by their size

    @abc.abstractmethod
    def stages(self, remote: np.ndarray, owned: Ownership) -> np.ndarray:
        """Fragments with STAGE >= 1 that cover `remote`, the fragments each rank needs of others."""

    def __str__(self) -> str:
        return type(self).__name__
