"""How an attempt ended, and what was asked of it meanwhile: what counts as a failure, and the exit code."""

import signal

import pytest

from longmesh.cli.rank_exits import RankExit
from longmesh.cli.run import Ended
from longmesh.cli.signals import ReceivedSignal

NOBODY, TERM, INT = ReceivedSignal(), ReceivedSignal(signal.SIGTERM), ReceivedSignal(signal.SIGINT)
RAISED = RankExit(0, 1, "CheckpointError: the disk is full", "Traceback", 5, recorded=True)
KILLED = RankExit(1, -signal.SIGKILL, "", "", 5, recorded=False)
ENDED = RankExit(1, -signal.SIGTERM, "", "", 5, recorded=False)
LEFT = RankExit(0, 130, "", "", 5, recorded=False)  # KeyboardInterrupt: a Ctrl-C reaches the ranks, too
FOLLOWS = RankExit(0, 1, "RuntimeError: connection closed", "Traceback", 6, recorded=True)


@pytest.mark.parametrize(
    ("exits", "told"), [([RAISED], NOBODY), ([KILLED], NOBODY), ([RAISED], TERM), ([KILLED, FOLLOWS], TERM)]
)
def test_a_rank_that_fails_by_itself_is_a_failure_also_while_the_run_is_to_stop(exits, told):
    assert Ended(exits, False, None, False).has_failed(told)


@pytest.mark.parametrize(
    ("exits", "told", "stopped", "cut_off", "code", "said"),
    [
        ([], NOBODY, False, None, 0, ""),
        ([], TERM, False, None, 0, ""),  # it came in the last step: the run is through
        ([], TERM, True, None, 75, "stopped by SIGTERM as asked; exit code 75: start it again to go on"),
        ([], NOBODY, True, None, 75, "stopped as asked; exit code 75: start it again to go on"),
        ([], TERM, False, "", 143, "ended by SIGTERM; so are the ranks"),
        ([], TERM, True, ": late", 143, "ended by SIGTERM; so are the ranks: late"),
        ([], NOBODY, True, ": late", 124, "a rank has stopped as asked, and others were ended: late"),
        ([ENDED, FOLLOWS], TERM, False, None, 143, "ended by SIGTERM; so are the ranks"),
        ([LEFT], INT, False, None, 130, "ended by SIGINT; so are the ranks"),
    ],
)
def test_what_is_no_failure_is_told_by_its_exit_code(capsys, exits, told, stopped, cut_off, code, said):
    ended = Ended(exits, stopped, cut_off, reader_left=False)
    assert not ended.has_failed(told)
    assert ended.say("longmesh run", told) == code
    assert capsys.readouterr().err == (f"longmesh run: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("exits", "told", "cut_off", "code", "said"),
    [
        ([], TERM, "", 75, "stopped by SIGTERM while ranks started; exit code 75: start it again to go on"),
        (
            [ENDED],
            TERM,
            None,
            75,
            "stopped by SIGTERM while ranks started; exit code 75: start it again to go on",
        ),
        ([], TERM, ": late", 143, "ended by SIGTERM; so are the ranks: late"),
        ([], ReceivedSignal(signal.SIGINT, at_once=True), "", 130, "ended by SIGINT; so are the ranks"),
    ],
)
def test_a_run_that_resumes_is_queued_again_also_if_its_ranks_did_not_listen_yet(
    capsys, exits, told, cut_off, code, said
):
    ended = Ended(exits, False, cut_off, reader_left=False)
    assert ended.say("longmesh train", told, resumes=True) == code
    assert capsys.readouterr().err == f"longmesh train: {said}\n"
