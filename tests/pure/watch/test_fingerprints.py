"""What the desync check compares, without ranks."""

from longmesh.comm import CommEvent
from longmesh.watch.desync import Fingerprint, find_mismatch


def gather(site="/a/train.py:7", shape=(3, 2), dtype="float32", kind="all_gather"):
    return Fingerprint.of(CommEvent(kind, ("axis 'tp'",), 2, 8, shape, dtype, site))


def exchange(send, recv, site="/a/train.py:9"):
    return Fingerprint.of(
        CommEvent("all_to_all", ("axis 'tp'",), 2, 8, (sum(send),), "float32", site, send, recv)
    )


def test_equal_calls_agree_and_travel():
    assert find_mismatch({0: gather(), 1: gather()}) is None
    assert Fingerprint.parse(gather().to_json()) == gather()
    sent = exchange((0, 3), (0, 5))
    assert Fingerprint.parse(sent.to_json()) == sent


def test_hosts_may_keep_the_program_in_different_directories():
    assert find_mismatch({0: gather("/a/train.py:7"), 1: gather("/home/b/train.py:7")}) is None


def test_a_difference_names_all_ranks_and_call_sites():
    text = find_mismatch({4: gather(), 5: gather(), 7: gather("/a/train.py:12", (3, 1))})
    assert text == (
        "ranks of one group came to different collectives:\n"
        "  rank 4: all_gather of (3, 2) float32 at /a/train.py:7\n"
        "  rank 5: all_gather of (3, 2) float32 at /a/train.py:7\n"
        "  rank 7: all_gather of (3, 1) float32 at /a/train.py:12"
    )
    assert find_mismatch({0: gather(), 1: gather(dtype="int64")})
    assert find_mismatch({0: gather(), 1: gather(kind="all_reduce")})
    assert find_mismatch({0: gather(), 1: gather("/a/train.py:8")}), "the same call from another line"


def test_an_exchange_may_be_uneven_but_must_add_up():
    assert find_mismatch({0: exchange((0, 3), (0, 5)), 1: exchange((5, 0), (3, 0))}) is None
    text = find_mismatch({0: exchange((0, 3), (0, 5)), 1: exchange((5, 0), (2, 0))})
    assert text.startswith(
        "rank 0 sends 3 elements to rank 1, which expects 2:\n  rank 0: all_to_all of float32"
    )
