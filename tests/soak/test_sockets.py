"""A local training listens on loopback only, as tests/e2e/test_sockets.py finds of a script under the same launcher."""

import sys
from pathlib import Path

import pytest

from tests.e2e.test_sockets import addresses_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are read from /proc")


def test_a_local_training_listens_on_loopback_only(tmp_path: Path) -> None:
    sizes = ["--seq-len", 64, "--dim", 16, "--steps", 100_000, "--out", tmp_path]
    assert addresses_of(["train", "--ranks", 2, *sizes], "step") == {"127.0.0.1"}
