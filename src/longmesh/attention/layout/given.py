"""GivenLayout: a layout somebody has already decided on, for another mask over the same tokens."""

import dataclasses

from longmesh.attention.layout.base import Ownership, TokenLayout, Workload
from longmesh.errors import LongmeshError


@dataclasses.dataclass(frozen=True)
class GivenLayout(TokenLayout):
    """The ownership of another plan. For one sequence length and number of ranks."""

    ownership: Ownership

    def assign(self, work: Workload, ranks: int) -> Ownership:
        own = self.ownership
        if own.seq_len != work.seq_len or len(own.counts) != ranks:
            raise LongmeshError(
                f"the given layout cuts {own.seq_len} tokens over {len(own.counts)} ranks, asked for "
                f"{work.seq_len} over {ranks}; make one for these sizes"
            )
        return own

    def __str__(self) -> str:
        return "as given"
