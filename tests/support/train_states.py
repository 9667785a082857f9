"""Training as a state machine: steps, kills in any phase, damaged checkpoints, resuming on any number of ranks."""

import tempfile
from pathlib import Path
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from longmesh.testing import RankPool
from support.train_faults import POINTS, STEPS, Life, RankFault

RANKS = st.integers(1, 3)
SAVES = st.integers(1, 3)  # steps from one save to the next


def make_machine(
    pool: RankPool, expected: dict[int, list[float]], folder: Path
) -> type[RuleBasedStateMachine]:
    """The machine for a pool; `expected` are the losses that nothing happened to, by number of ranks."""

    class Training(RuleBasedStateMachine):
        """Whatever happens, what can be loaded is a prefix of the uninterrupted run: to the bit on the same mesh."""

        @initialize()
        def begin(self) -> None:
            out = Path(tempfile.mkdtemp(dir=folder))
            self.life, self.done = Life(pool, out, expected), 0

        @rule(num_ranks=RANKS, more=st.integers(1, 2), every=SAVES)
        def step_and_save(self, num_ranks: int, more: int, every: int) -> None:
            """Some steps; a run saves every few, and at its end."""
            self.done = min(STEPS, self.done + more)
            assert self.life.go(num_ranks, None, self.done, every)

        @rule(
            num_ranks=RANKS,
            point=st.sampled_from(sorted(POINTS)),
            skip=st.integers(0, 4),
            every=SAVES,
            data=st.data(),
        )
        def kill(self, num_ranks: int, point: str, skip: int, every: int, data: st.DataObject) -> None:
            """A rank, on its way to the end; steps that were not saved are lost."""
            fault = RankFault(data.draw(st.integers(0, num_ranks - 1)), point, skip, "SIGKILL")
            self.life.go(num_ranks, fault, STEPS, every)

        @rule(num_ranks=RANKS)
        def resume(self, num_ranks: int) -> None:
            """From what is there to the end, on any number of ranks."""
            self.done = STEPS
            assert self.life.go(num_ranks, None)

        @rule(seed=st.integers(0, 999))
        def corrupt(self, seed: int) -> None:
            self.life.damage(Random(seed))

    return Training
