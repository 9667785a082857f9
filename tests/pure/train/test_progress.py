"""What is seen of a run: a bar on a terminal, lines elsewhere."""

import contextlib
import os
import re
from collections.abc import Iterator

from longmesh.train.progress import StepRecord, progress


def show_all(steps=20, first=0, **where):
    with progress(steps=steps, step_tokens=1000, num_ranks=3, **{"terminal": None, **where}) as show:
        for step in range(first, steps):
            show(StepRecord(step, 4.0, 0.5, 0.1))


def test_lines_come_now_and_then_and_at_the_end(capsys):
    show_all(steps=25)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 ranks: step  1/25  loss 4.0000  2,000 tokens/s  rank 0 waits 20%"
    assert [int(re.findall(r"(\d+)/25", line)[0]) for line in lines] == [*range(1, 26, 2)]


def test_a_resumed_run_ends_with_a_line(capsys):
    show_all(steps=24, first=23)
    assert "step 24/24" in capsys.readouterr().out


def pieces_of(master: int) -> Iterator[bytes]:
    """All that was written to a terminal that is closed now: one read may give a part of it."""
    with contextlib.suppress(OSError):
        while piece := os.read(master, 1 << 16):
            yield piece


def test_a_bar_moves_on_the_terminal_that_is_named(capsys):
    master, slave = os.openpty()
    show_all(steps=3, terminal=os.ttyname(slave))
    os.close(slave)
    drawn = b"".join(pieces_of(master)).decode()
    os.close(master)
    for step in (1, 2, 3):
        assert f"step {step}/3  loss 4.0000  2,000 tokens/s  rank 0 waits 20%" in drawn
    assert "━" in drawn and drawn.count("\n") == 1
    assert capsys.readouterr().out == ""
