"""The op table and the benchmark tables of the site are what the measured files and the rules say."""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as when it is run: one may import another
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def record() -> ModuleType:
    return load("record")


def test_the_benchmark_page_is_that_of_the_results(record):
    page = (ROOT / "docs/benchmarks.md").read_text("utf-8")
    assert page == record.make_page(RESULTS), "run benchmarks/record.py page"


def test_every_result_belongs_to_a_benchmark_and_says_how_it_was_made(record):
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text("utf-8"))
        assert path.stem in record.TABLES
        assert found["command"].startswith(f"python benchmarks/{path.stem}.py")
        assert found["date"] and found["torch"] and found["cores"] > 0 and found["output"]


def test_every_benchmark_with_a_table_is_there(record):
    assert all((ROOT / f"benchmarks/{name}.py").is_file() and record.purpose(name) for name in record.TABLES)


def test_what_a_run_prints_is_written_down(record, tmp_path, capfd):
    script = tmp_path / "made_up.py"
    script.write_text("import sys\nprint('├ one', *sys.argv[1:])\nprint('two  ')\n", encoding="utf-8")
    record.record(script, ["--ranks", "a b"], tmp_path / "results")
    found = json.loads((tmp_path / "results/made_up.json").read_text("utf-8"))
    assert found["output"] == ["├ one --ranks a b", "two"]
    assert found["command"] == "python benchmarks/made_up.py --ranks 'a b'"
    assert "├ one" in capfd.readouterr().out


def test_a_run_that_fails_writes_nothing(record, tmp_path):
    script = tmp_path / "made_up.py"
    script.write_text("print('half')\nraise SystemExit(3)\n")
    with pytest.raises(SystemExit, match=r"made_up.py ended with 3; nothing is written"):
        record.record(script, [], tmp_path)
    assert not list(tmp_path.glob("*.json"))


def test_the_reliability_page_is_that_of_the_measured_faults():
    reliability = load("reliability")
    page = (ROOT / "docs/reliability.md").read_text("utf-8")
    kept = reliability.read_rows(reliability.RESULTS)
    assert page == reliability.make_page(kept), "run benchmarks/reliability.py page"
    assert kept.keys() <= {fault.name for fault in reliability.matrix()}


def test_a_benchmark_that_is_not_there(record):
    with pytest.raises(SystemExit, match="there are: attention, checkpoint, dispatch"):
        record.main(["none"])


def test_the_page_of_models_is_that_of_the_sweep():
    model_sweep = load("model_sweep")
    assert model_sweep.PAGE.read_text("utf-8") == model_sweep.page(), "run benchmarks/model_sweep.py --page"


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_the_op_table_is_that_of_the_coverage_run_and_the_rules():
    op_table = load("op_table")
    measured = op_table.COVERAGE.read_text("utf-8").splitlines()
    page = op_table.PAGE.read_text("utf-8")
    assert page.startswith(op_table.head())
    rows = page.removeprefix(op_table.head()).splitlines(keepends=True)
    assert [row.split(" | ")[0] for row in rows] == [f"| {line.split(chr(9))[0]}" for line in measured]
    # In a thread: every sample seeds torch, which keeps a text of the whole stack each time; there it is short.
    with one_torch_thread(), ThreadPoolExecutor(1) as thread:
        made = list(thread.map(op_table.table_row, measured))
    assert rows == made, "the rules have changed: run benchmarks/op_table.py"


def test_rows_of_the_coverage_run_are_renewed_one_by_one(tmp_path):
    op_coverage = load("op_coverage")
    kept = tmp_path / "rows.tsv"
    first, second = op_coverage.sweep_names()[:2]
    kept.write_text(f"{second}\tright\t\t{second}.default\t2026-01-01\n", "utf-8")
    op_coverage.update_rows([(first, "right", "", "", "2026-01-02")], kept)
    op_coverage.update_rows([(second, "refused", "a\nb", "", "2026-01-03")], kept)
    assert (
        kept.read_text("utf-8") == f"{first}\tright\t\t\t2026-01-02\n{second}\trefused\ta b\t\t2026-01-03\n"
    )


def test_ops_with_steps_of_their_own_are_not_called_replicated():
    page = (ROOT / "docs/ops.md").read_text("utf-8")
    for name in ("var.correction", "argmax.default", "native_layer_norm.default"):
        assert f"`{name}`: steps" in page
        assert f"`{name}`: replicated only" not in page


def test_the_page_of_models_over_axes_is_that_of_the_results():
    axes = load("axes_sweep")
    assert (ROOT / "docs/models-over-axes.md").read_text("utf-8") == axes.page(), (
        "run benchmarks/axes_sweep.py --page"
    )
    assert not [row for row in axes.known_rows().values() if row[2] in ("wrong", "failed")]
