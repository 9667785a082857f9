"""The page and what is said at the end."""

import base64
import json
import re
from dataclasses import asdict, replace
from xml.dom import minidom

import pytest

from longmesh.attention import masks, plan_attention
from longmesh.errors import LongmeshError
from longmesh.train.loop import choose_drawn
from longmesh.train.options import TrainOptions
from longmesh.train.parallel import DrawnPlan
from longmesh.train.progress import StepRecord, describe_step
from longmesh.train.report import (
    Summary,
    add_part,
    compare_speeds,
    describe,
    largest_difference,
    make_page,
    read_summary,
    write_part,
    write_report,
)

OPTIONS = TrainOptions(context=2, steps=3, seq_len=1000)
# The median step counts, not those that were disturbed.
TWO = Summary(OPTIONS.curve, (1, 2, 1), [5.5, 5.0, 4.0], [1.0, 9.0, 0.9, 1.0, 1.1], [3.0, 2.5], [0.5, 1.0])
ONE = Summary(OPTIONS.curve, (1, 1, 1), [5.5, 5.00001, 4.0, 3.0], [1.5, 1.5, 1.2, 1.8, 7.0], [4.5], [0.0])


def plan_of_two(exchange="auto"):
    lengths = [400, 90, 510]
    plan = plan_attention(seq_len=1000, ranks=2, mask=masks.documents(lengths), exchange=exchange, chunk=64)
    return DrawnPlan(plan, 3)


def test_the_last_word_is_the_difference():
    figures, speed, difference = describe(TWO, ONE)
    assert figures == (
        "2 ranks: 3 steps of 1,000 tokens, loss 5.5000 to 4.0000, 1,000 tokens/s, waiting for others: rank 0 14% to "
        "rank 1 29% of its time"
    )
    assert speed == (
        "1.50 times the 667 tokens/s of the one-process run, by the median step; 0.27 to 4.63 times over the middle "
        "half of the steps"
    )
    assert difference == "largest difference from the one-process loss: 1.0e-05 over 3 steps, within 1e-04"


@pytest.mark.parametrize("loss", [4.0002, float("nan"), float("inf")])
def test_a_difference_is_never_hidden(loss):
    off = Summary(OPTIONS.curve, (1, 2, 1), [5.5, 5.0, loss], [1.0], [3.0, 2.5], [0.5, 1.0])
    assert largest_difference(off, ONE) > 1.9e-4
    assert describe(off, ONE)[-1].endswith("over 3 steps, NOT within 1e-04")


def pictures(page):
    drawn = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    charts = re.findall(r'<img alt="[^"]*" src="data:image/svg\+xml;base64,([^"]*)">', page)
    for picture in (*drawn, *(base64.b64decode(data) for data in charts)):
        minidom.parseString(picture)
    return [*drawn, *charts]


def test_the_page_stands_alone_and_has_every_picture(tmp_path):
    options = TrainOptions(context=2, steps=3, seq_len=1000, out=str(tmp_path / "new"))
    said = write_report(TWO, ONE, plan_of_two(), options)
    page = (tmp_path / "new" / "report.html").read_text()
    assert said.splitlines()[0] == f"page: {tmp_path / 'new' / 'report.html'}"
    assert said.splitlines()[-1] == describe(TWO, ONE)[-1]
    assert len(pictures(page)) == 5
    assert "largest difference from the one-process loss: 1.0e-05" in page
    assert "attention over 1000 tokens on 2 ranks: documents(" in page
    assert "http" not in page and "<script" not in page
    assert Summary(**json.loads((tmp_path / "new" / "run.json").read_text())).losses == TWO.losses


def test_a_page_without_matplotlib_has_tables(monkeypatch):
    monkeypatch.setattr("longmesh.train.report.can_draw", lambda: False)
    page = make_page(TWO, ONE, plan_of_two(), describe(TWO, ONE))
    assert page.count("<table>") == 4 and len(pictures(page)) == 1  # the plan is drawn by ourselves
    assert "<tr><td>1</td><td>5.5</td><td>5.5</td></tr>" in page
    assert "pip install &#x27;longmesh[plot]&#x27; brings the charts" in page


def test_a_run_alone_has_a_page_too():
    assert len(pictures(make_page(ONE, None, None, describe(ONE, None)))) == 2


def test_baselines_that_do_not_fit_are_refused(tmp_path):
    def read(summary, **changes):
        (tmp_path / "run.json").write_text(json.dumps(asdict(summary)) if summary else "{")
        return read_summary(TrainOptions(**{"seq_len": 1000, "steps": 3, **changes}, baseline=str(tmp_path)))

    assert read(ONE).losses == ONE.losses
    for summary, changes, text in [
        (ONE, {"steps": 9}, "has 4 steps, this run will have 9; run it again with as many"),
        (ONE, {"dim": 64}, "ran with --dim 128 (here 64); compare runs that differ in the mesh only"),
        (None, {}, "has no figures of a run in it"),
    ]:
        with pytest.raises(LongmeshError) as error:
            read(summary, **changes)
        assert text in str(error.value)
    with pytest.raises(LongmeshError, match=r"has no figures of a run in it: .*No such file"):
        read_summary(TrainOptions(baseline=str(tmp_path / "nowhere")))


def test_a_step_in_one_line():
    line = describe_step(StepRecord(6, 2.34567, 0.5, 0.1), 20, 8192, 2)
    assert line == "step  7/20  loss 2.3457  16,384 tokens/s  rank 0 waits 20%"
    assert describe_step(StepRecord(6, 2.34567, 0.5, 0.0), 20, 8192, 1).endswith("16,384 tokens/s")


def test_the_files_of_an_earlier_run_are_kept(tmp_path):
    options = TrainOptions(context=2, steps=3, seq_len=1000, out=str(tmp_path))
    earlier = []
    for number in (1, 2):
        write_report(TWO, None, None, options)
        earlier.append((tmp_path / "report.html").read_text())
        said = write_report(ONE, None, None, options)
        assert said.splitlines()[0] == f"the earlier run's page: {tmp_path / f'report-{2 * number - 1}.html'}"
    assert (tmp_path / "report-1.html").read_text() == earlier[0]
    assert json.loads((tmp_path / "run-1.json").read_text())["losses"] == TWO.losses
    assert json.loads((tmp_path / "run-2.json").read_text())["losses"] == ONE.losses
    assert json.loads((tmp_path / "run.json").read_text())["losses"] == ONE.losses


def test_more_than_the_ranks_can_give_is_noise_and_no_figure():
    busy = replace(ONE, step_seconds=[36.85, 36.85])
    said = describe(TWO, busy)
    assert said[1] == (
        "the speed can't be compared: by these figures 2 ranks are more than 2 times as fast as the one-process run, "
        "so the machine did other work meanwhile; run it again when it is idle"
    )
    assert "36.85" not in make_page(TWO, busy, None, said)
    few = replace(TWO, step_seconds=[1.0])
    assert describe(few, ONE)[1].endswith("by the median step; too few steps to show how much they vary")
    # Of as many ranks as the other run had, one may well be faster.
    assert "1.50 times the 667 tokens/s of the 2-rank run" in compare_speeds(
        TWO, replace(ONE, busy_seconds=[4.5, 4.5], wait_seconds=[0.0, 0.0]), "2-rank"
    )


def test_one_step_is_one_step():
    one = replace(TWO, losses=[5.5], step_seconds=[0.9])
    said = describe(one, replace(ONE, losses=[5.5]))
    assert said[0].startswith("2 ranks: 1 step of 1,000 tokens, loss 5.5000 to 5.5000, 1,111 tokens/s, ")
    assert said[-1].endswith("over 1 step, within 1e-04")


def test_the_summary_of_a_step_has_what_its_line_says():
    """The line has the first rank's share; the summary has the first rank's, too, where ranks differ."""
    step = StepRecord(0, 5.5, 1.0, 0.04)
    one = replace(TWO, losses=[5.5], step_seconds=[1.0], busy_seconds=[0.96, 0.02], wait_seconds=[0.04, 0.98])
    assert describe_step(step, 1, 1000, 2).endswith("rank 0 waits 4%")
    assert describe(one, None)[0].endswith("waiting for others: rank 0 4% to rank 1 98% of its time")


def test_the_halves_of_a_run_are_added_up(tmp_path):
    options = TrainOptions(context=2, steps=3, seq_len=1000, out=str(tmp_path))
    half = replace(TWO, losses=TWO.losses[:2], step_seconds=[2.0])
    write_part(half, options)
    both = add_part(TWO, options)
    assert both.step_seconds == [2.0, *TWO.step_seconds]
    assert (both.busy_seconds, both.wait_seconds) == ([6.0, 5.0], [1.0, 2.0])
    assert add_part(TWO, options) == TWO  # it was there once
    write_part(replace(half, losses=[7.0]), options)
    assert add_part(TWO, options) == TWO  # of another run


def test_the_plan_that_shows_most_is_drawn():
    plan = plan_of_two().plan
    few, many = DrawnPlan(plan, 1), DrawnPlan(plan, 7)
    assert choose_drawn(None, few) is few and choose_drawn(few, None) is few
    assert choose_drawn(few, many) is many and choose_drawn(many, few) is many
    assert choose_drawn(None, None) is None


def test_long_lines_of_the_plan_are_wrapped():
    assert "pre{font-size:12px;white-space:pre-wrap}" in make_page(TWO, None, plan_of_two(), [])
