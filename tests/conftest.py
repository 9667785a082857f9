"""One pool of ranks for the whole session, forked before any test can run a threaded op.

After the tests are collected: what their files import is there for every rank, which else imports it by itself.
"""

import gc
import signal

import pytest
import torch._dynamo  # noqa: F401 - else every forked rank imports it by itself, at its first op on a subclass
from hypothesis import settings

from longmesh.testing import RankPool
from support.bridges import FILES, HAS_BRIDGES, REASON

POOL = pytest.StashKey[RankPool]()
LARGE_POOL = pytest.StashKey[RankPool]()

collect_ignore_glob = [] if HAS_BRIDGES else FILES

# No deadline: the time of an example is that of its slowest rank on a shared machine.
settings.register_profile("longmesh", deadline=None, print_blob=True)
settings.load_profile("longmesh")


def pytest_report_header() -> str | None:
    return None if HAS_BRIDGES else f"without {', '.join(FILES)}: {REASON}"


def pytest_configure() -> None:
    # A shell lets what it runs in the background ignore interrupts, and `make test` runs one half so; tests send some.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish(session: pytest.Session) -> None:
    # Most of what is in memory is torch, which is never collected: looking through it seldom saves a tenth of the time.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    stash = session.config.stash
    stash[POOL] = RankPool(4)
    stash[LARGE_POOL] = RankPool(8)


def pytest_unconfigure(config: pytest.Config) -> None:
    for key in (
        LARGE_POOL,
        POOL,
    ):  # the one that was forked last holds the other's pipes; none, if collecting failed
        if key in config.stash:
            config.stash[key].close()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> RankPool:
    """`pool.run(fn, *args, ranks=1..4)`, shared by all tests."""
    return request.config.stash[POOL]


@pytest.fixture(scope="session")
def large_pool(request: pytest.FixtureRequest) -> RankPool:
    """The same with 8 ranks: slower on few cores, so for few tests."""
    return request.config.stash[LARGE_POOL]
