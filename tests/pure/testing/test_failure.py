"""Which failure of a run is the cause, and how it reads."""

import pickle

from longmesh.testing.failure import AFTER_ALL_OTHERS, BEFORE_ALL_OTHERS, RankError, RankFailure


def raised(rank: int, what: str, time_ns: int) -> RankFailure:
    return RankFailure(rank, "raised", f"raised {what}", f"Traceback of rank {rank}\n{what}\n", time_ns)


def error(*failures: RankFailure, num_ranks: int = 4) -> RankError:
    return RankError("module.function", num_ranks, {f.rank: f for f in failures})


def test_the_first_failure_is_the_cause() -> None:
    found = error(raised(0, "RuntimeError: lost", 7), raised(3, "ValueError: x", 5))
    assert (found.rank, found.traceback) == (3, "Traceback of rank 3\nValueError: x\n")
    assert str(found) == (
        "rank 3 of 4 raised ValueError: x\n"
        "  in module.function\n"
        "  then rank 0 raised RuntimeError: lost\n"
        "\n"
        "Traceback of rank 3\n"
        "ValueError: x"
    )


def test_of_equal_failures_the_lowest_rank_speaks() -> None:
    found = error(*(raised(r, "ValueError: x", 9 - r) for r in (1, 2, 3)))
    assert found.rank == 1
    assert str(found).splitlines()[2] == "  likewise on rank 2, 3"


def test_a_death_comes_before_what_peers_noticed() -> None:
    death = RankFailure(2, "died", "was killed by SIGSEGV", "", BEFORE_ALL_OTHERS)
    assert str(error(raised(0, "RuntimeError: lost", 3), death)) == (
        "rank 2 of 4 was killed by SIGSEGV\n  in module.function\n  then rank 0 raised RuntimeError: lost"
    )


def test_of_a_hang_all_stacks_are_shown() -> None:
    hung = RankFailure(1, "hung", "did not finish within 2 s and was ended", "stack 1\n", BEFORE_ALL_OTHERS)
    waits = RankFailure(0, "hung", "was waiting for it in a collective", "stack 0\n", AFTER_ALL_OTHERS)
    assert str(error(waits, hung, num_ranks=2)) == (
        "rank 1 of 2 did not finish within 2 s and was ended\n"
        "  in module.function\n"
        "  then rank 0 was waiting for it in a collective\n"
        "\n"
        "stack 1\n"
        "\n"
        "rank 0:\n"
        "stack 0"
    )


def test_an_error_survives_pickling_as_its_text() -> None:
    found = error(raised(0, "ValueError: x", 1))
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
