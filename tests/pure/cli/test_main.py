"""The command line's own messages; no rank is started."""

import re
from pathlib import Path

import pytest

import longmesh
from longmesh.cli import run
from longmesh.cli.main import main, make_parser

SCRIPT = __file__


def messages(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        code = main(arguments)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--ranks", "0", SCRIPT], "longmesh run: --ranks 0: a run has at least 1 rank\n"),
        (["run", "--ranks", "-2", SCRIPT], "longmesh run: --ranks -2: a run has at least 1 rank\n"),
        (
            ["run", "--ranks", "2", "--threads", "0", SCRIPT],
            "longmesh run: --threads 0: a rank has 1 to 1024 threads; leave it out to share the cores\n",
        ),
        (
            ["run", "--ranks", "2", "nowhere.py"],
            f"longmesh run: no such script: nowhere.py (looked in {Path.cwd()})\n",
        ),
        (
            ["run", "--ranks", "2", str(Path(SCRIPT).parent)],
            f"longmesh run: {Path(SCRIPT).parent} is a directory: give the Python file in it\n",
        ),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert messages(arguments, capsys) == (2, text)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", SCRIPT], "longmesh run: the following arguments are required: --ranks"),
        (["run", "--ranks", "2"], "longmesh run: the following arguments are required: script"),
        (
            ["run", "--ranks", "two", SCRIPT],
            "longmesh run: argument --ranks: 'two' is not a whole number",
        ),
    ],
)
def test_missing_or_malformed_arguments_are_usage_errors(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = messages(arguments, capsys)
    assert code == 2
    assert err.startswith(text) and err.endswith("; `longmesh run --help` lists what it takes\n")
    assert err.count("\n") == 1


def test_without_a_command_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "run a script on several local ranks" in capsys.readouterr().out


def test_the_version_is_the_one_in_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    pyproject = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert re.findall(r'^version = "(.*)"$', pyproject, re.M) == [longmesh.__version__]
    assert capsys.readouterr().out == f"longmesh {longmesh.__version__}\n"


def test_what_follows_the_script_belongs_to_the_script() -> None:
    options = make_parser().parse_args(["run", "--ranks", "2", "a.py", "--ranks", "7", "-x", "--", "y"])
    assert (options.ranks, options.script) == ((2, 2), "a.py")
    assert options.args == ["--ranks", "7", "-x", "--", "y"]


def test_scripts_are_watched_with_a_limit_by_default(monkeypatch, capsys) -> None:
    """A rank in another collective than the others would mean torch's 30 minutes of silence."""
    started = []
    monkeypatch.setattr(run, "run_program", lambda program, launch: started.append((program, launch)) or 0)
    for given, limits in (([], (300.0, 900.0, 900.0)), (["--timeout", "60"], (60.0, 60.0, 60.0))):
        assert main(["run", "--ranks", "2", *given, SCRIPT]) == 0
        program, launch = started[-1]
        assert program.limits == limits
        source = "" if given else ", the default"
        said = f"the limit is {limits[1]:g} s (--timeout{source}): give a larger one if ranks may wait for longer"
        assert program.describe_limit(launch) == said
