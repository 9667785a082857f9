"""Which rank is the cause, from what the launcher knows."""

import signal

from longmesh.cli.rank_exits import RankExit, describe_exits, find_first

SECOND = 10**9


def raised(rank: int, message: str, at: float) -> RankExit:
    return RankExit(rank, 1, message, f"Traceback of rank {rank}\n{message}\n", int(at * SECOND), True)


def silent(rank: int, code: int, at: float) -> RankExit:
    return RankExit(rank, code, "", "", int(at * SECOND), False)


def test_the_earliest_exception_is_the_cause() -> None:
    exits = [raised(0, "RuntimeError: lost", 10.2), raised(1, "ValueError: x", 10.1)]
    assert describe_exits(exits, 2) == (
        "  later rank 0 raised RuntimeError: lost\n"
        "\n"
        "Traceback of rank 1\n"
        "ValueError: x\n"
        "\n"
        "longmesh run: rank 1 of 2 raised ValueError: x"
    )


def test_equal_exceptions_are_told_by_the_lowest_rank() -> None:
    exits = [raised(r, "ValueError: x", 10 - r) for r in range(3)]
    lines = describe_exits(exits, 3, "longmesh train").splitlines()
    assert (lines[0], lines[-1]) == (
        "  likewise rank 1, 2",
        "longmesh train: rank 0 of 3 raised ValueError: x",
    )


def test_a_silent_death_comes_before_what_peers_noticed() -> None:
    exits = [raised(0, "RuntimeError: lost", 10.1), silent(1, -signal.SIGSEGV, 11)]
    assert describe_exits(exits, 2) == (
        "  later rank 0 raised RuntimeError: lost\nlongmesh run: rank 1 of 2 was killed by SIGSEGV"
    )
    assert find_first(exits).exit_code == 128 + signal.SIGSEGV


def test_of_silent_deaths_the_first_that_was_noticed_is_the_cause() -> None:
    exits = [silent(2, 3, 10), silent(0, -signal.SIGABRT, 10), silent(1, 3, 10.1)]
    assert describe_exits(exits, 3).splitlines() == [
        "  later rank 0 was killed by SIGABRT",
        "  likewise rank 1",
        "longmesh run: rank 2 of 3 left with exit code 3",
    ]
    assert find_first(exits).exit_code == 3


def test_a_rank_killed_late_by_the_launcher_is_not_the_cause() -> None:
    exits = [raised(1, "ValueError: x", 10), silent(0, -signal.SIGKILL, 20)]
    assert find_first(exits).rank == 1


def test_a_rank_that_someone_else_terminated_is_the_cause() -> None:
    exits = [silent(1, -signal.SIGTERM, 10), raised(0, "RuntimeError: lost", 9.9)]
    assert describe_exits(exits, 2).endswith("\nlongmesh run: rank 1 of 2 was killed by SIGTERM")


def test_long_messages_of_other_ranks_are_cut() -> None:
    exits = [raised(0, "ValueError: x", 1), raised(1, "RuntimeError: " + "y" * 500, 2)]
    line = describe_exits(exits, 2).splitlines()[0]
    assert line.endswith("yyy...")
    assert len(line) < 200
