"""Ranks for tests: run a function on N local ranks, in milliseconds, with real collectives.

    from longmesh.testing import RankPool

    def total(x):                                  # at the top level of a module
        y = torch.full((2,), x + dist.get_rank())
        dist.all_reduce(y)
        return y

    with RankPool(4) as pool:
        results = pool.run(total, 1.0, ranks=4)    # [tensor([10., 10.])] * 4, by rank

With pytest, start one pool before any test runs and share it:

    # conftest.py
    @pytest.fixture(scope="session")
    def pool():
        with RankPool(4) as pool:
            yield pool

Pitfall: ranks are forked, so make the pool early, before this process runs threaded or autograd work.
"""

from longmesh.testing.failure import RankError, RankFailure
from longmesh.testing.mesh import cpu_mesh
from longmesh.testing.pool import RankPool

__all__ = ["RankError", "RankFailure", "RankPool", "cpu_mesh"]
