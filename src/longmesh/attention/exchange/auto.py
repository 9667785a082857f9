"""AutoExchange: the exchange that the cost model finds fastest. Planning replaces it by its choice."""

import dataclasses

import numpy as np

from longmesh.attention.exchange.base import Exchange
from longmesh.attention.exchange.needs import Needs


@dataclasses.dataclass(frozen=True)
class AutoExchange(Exchange):
    """The exchange that the cost model finds fastest; planning puts it in place of this.

    >>> window = masks.sliding_window(64)
    >>> print(plan_attention(seq_len=4096, ranks=4, mask=window, exchange=AutoExchange()).exchange)
    Sparse
    """

    def last_stage(self, needs: Needs) -> int:
        raise AssertionError("planning replaces AutoExchange by the exchange it chose")

    def received(self, needs: Needs, rank: int) -> np.ndarray:
        raise AssertionError("planning replaces AutoExchange by the exchange it chose")

    def lent(self, needs: Needs, owner: int) -> np.ndarray:
        raise AssertionError("planning replaces AutoExchange by the exchange it chose")
