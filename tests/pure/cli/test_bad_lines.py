"""Every option of every command against wrong values: one line with the remedy, exit code 2, and no rank is started."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from longmesh.cli import run
from longmesh.cli.arguments import Launch
from longmesh.cli.generate import find_model
from longmesh.cli.main import main, make_parser
from support.bridges import needs_bridges

# For options that are swept: what is right. Everything else is refused.
HUGE = str(10**30)
VALUES = (
    "-1",
    "0",
    "3",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1.5",
    "",
    "x",
    "2:",
    ":2",
    "3:2",
    "1:2:3",
    "auto",
    "--",
    HUGE,
)
LONG = "x" * 300  # no file system has such a name
NAMES = {"-1", "0", "3", "nan", "inf", "-inf", "1e400", "1.5", "x", "2:", ":2", "3:2", "1:2:3", "auto", HUGE}
RIGHT = {
    "ranks": {"3"},
    "threads": {"3"},
    "timeout": {"3", "1.5"},
    "grace": {"0", "3", "1.5"},
    "max-restarts": {"0", "3", HUGE},
    "data": {"3"},
    "context": {"3"},
    "tensor": set(),  # 3 does not divide the key heads
    "seq-len": {"3"},
    "batch": {"3"},
    "steps": {"3", HUGE},
    "dim": set(),  # 3 is no even number for each head
    "layers": {"3"},
    "heads": set(),
    "kv-heads": set(),
    "seed": {"0", "3"},
    "save-every": {"0", "3", HUGE},
    "check-replicas": {"0", "3", HUGE},
    "keep": {"3", HUGE},
    "keep-every": {"0", "3", HUGE},
    "learning-rate": {"3", "1.5", HUGE},
    "mask": set(),
    "exchange": {"auto"},
    "out": NAMES,
    "json": NAMES,
    "save": set(),  # none ends in .json
    "resume": {"auto"},
    "baseline": set(),
    "prompt": set(),
    "random-tokens": {"3"},
    "model": NAMES,
    "new-tokens": {"3"},
    "dtype": set(),
    "page": {"3"},
    "chunk": {"3"},
    "cluster": set(),
}
RANKS = {"data": "3", "context": "3", "tensor": "3", "batch": "1", "seq-len": "3"}


def options_of(command: str) -> list[str]:
    """The options of a command that take a value."""
    parser = make_parser()
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    actions = commands.choices[command]._actions
    return [
        a.option_strings[-1][2:] for a in actions if a.option_strings and a.nargs != 0 and a.dest != "help"
    ]


def call(arguments: list[str], monkeypatch, capsys) -> tuple[int, str, bool]:
    """The exit code, what was said, and whether ranks would have been started."""
    started: list[Launch] = []
    monkeypatch.setattr(run, "run_program", lambda program, launch: started.append(launch) or 0)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(find_model, "_find_hub_problem", lambda name: None)
    try:
        code = main(arguments)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    return code, capsys.readouterr().err, bool(started)


def arguments_for(command: str, option: str, value: str) -> list[str]:
    given = {"ranks": RANKS.get(option, "2" if option == "save" else "1"), option: value}
    if option == "data":
        given["batch"] = value
    words = [f"--{name}={text}" for name, text in given.items()]
    return [command, *words, *([__file__] if command == "run" else [])]


@pytest.mark.parametrize(
    ("command", "option"),
    [
        pytest.param(command, name, marks=[needs_bridges] if command == "generate" else [])
        for command in ("run", "train", "generate", "doctor")
        for name in options_of(command)
    ],
)
def test_a_wrong_value_is_told_in_one_line(command, option, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    accepted = set()
    for value in (
        *VALUES,
        *([LONG] if option in ("out", "resume", "baseline", "json", "save", "prompt") else []),
    ):
        code, err, started = call(arguments_for(command, option, value), monkeypatch, capsys)
        assert started == (code == 0) == (err == ""), (option, value, code, err)
        if started:
            accepted.add(value)
            continue
        assert code == 2, (value, err)
        assert err.startswith(f"longmesh {command}: ") and err.count("\n") == 1, (value, err)
        assert "Traceback" not in err
        named = f"--{option}" in err or value == LONG
        assert named or option in RANKS, (value, err)
    assert (
        accepted - {"--"} == RIGHT[option]  # a later Python takes it for text
    )  # a later Python takes the one for text; names may have ends


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["train", "--no-such"],
            "longmesh train: no option --no-such; `longmesh train --help` lists what it takes",
        ),
        (
            ["train", "--seqlen", "2"],
            "longmesh train: no option --seqlen (did you mean --seq-len?); `longmesh train --help` lists what it takes",
        ),
        (
            ["run", "--rnaks", "2", "x.py"],
            "longmesh run: no option --rnaks (did you mean --ranks?); `longmesh run ",
        ),
        (
            ["run", "--rnaks=2", "x.py"],
            "longmesh run: no option --rnaks (did you mean --ranks?); `longmesh run ",
        ),
        (["train", "--seqlen=2"], "longmesh train: no option --seqlen (did you mean --seq-len?); "),
        (
            ["generate", "--random-token-count", "2"],
            "longmesh generate: no option --random-token-count (did you ",
        ),
        (
            ["train", "something"],
            "longmesh train: no argument 'something' is expected; `longmesh train --help` ",
        ),
        (
            ["walk"],
            "longmesh: no command 'walk'; the commands are run, train, generate, plan, doctor; `longmesh --help` ",
        ),
        (["trian"], "longmesh: no command 'trian' (did you mean train?); the commands are "),
        (
            ["run", "--ranks", "2", "--timeout"],
            "longmesh run: argument --timeout: expected one argument; `longmesh run",
        ),
        (
            ["train", "--ranks", "3", "--seq-len", "2"],
            "longmesh train: --seq-len 2 over --context 3: a rank needs at least 1 token; use fewer ranks or longer",
        ),
        (
            ["train", "--mask", "window"],
            "longmesh train: --mask window: it is not known; give one of documents, causal",
        ),
        (
            ["train", "--exchange", "fax"],
            "longmesh train: --exchange fax: it is not known; give one of auto, ",
        ),
        (
            ["train", "--resume", "nowhere"],
            "longmesh train: --resume nowhere is not a directory; give another run's",
        ),
        (
            ["train", "--learning-rate", "nan"],
            "longmesh train: --learning-rate nan: give a positive number, such as",
        ),
        (["train", "--save-every", "-1"], "longmesh train: --save-every -1: give 0 or more"),
        (["train", "--ranks", "-1"], "longmesh train: --ranks -1: a run has at least 1 rank"),
        (
            ["train", "--ranks", "4:2"],
            "longmesh train: --ranks 4:2: the smaller number comes first; give --ranks 2:4",
        ),
        (
            ["train", "--grace", "-2"],
            "longmesh train: --grace -2: give a number of seconds, 0 to end at once",
        ),
        (
            ["train", "--seq-len", HUGE],
            f"longmesh train: --seq-len {HUGE} --batch 1 --dim 128 --layers 2 take ",
        ),
        (["train", "--seed", HUGE], f"longmesh train: --seed {HUGE}: give a number below 2 ** 63"),
        (
            ["train", "--ranks", "4096"],
            "longmesh train: --ranks 4096: at most 1024 are started on one machine; use torchrun on several",
        ),
        (
            ["train", "--threads", HUGE],
            f"longmesh train: --threads {HUGE}: a rank has 1 to 1024 threads; leave it out to share the cores",
        ),
        (
            ["train", "--out", LONG],
            f"longmesh train: '{LONG}' can't be used as a directory: File name too long; give",
        ),
        (
            ["train", "--out", "\udcff"],
            r"longmesh train: --out '\udcff' can't be written in UTF-8, as the report is; g",
        ),
        (
            ["train", "--resume", "."],
            "longmesh train: --resume . has no checkpoint in it; give another run's --out, or leave out --resume to",
        ),
        (
            ["train", "--baseline", "."],
            "longmesh train: --baseline . has no figures of a run in it; give another run's --out",
        ),
        (
            ["run", "--ranks", "1", LONG],
            f"longmesh run: {LONG} can't be read: File name too long; give a Python file",
        ),
        (["run", "--ranks", "1", "."], "longmesh run: . is a directory: give the Python file in it"),
        (["run", "--ranks", "1", "no.py"], "longmesh run: no such script: no.py (looked in "),
        (
            ["run", "--ranks", "1"],
            "longmesh run: the following arguments are required: script; `longmesh run --help` lists",
        ),
        (
            ["run", "no.py"],
            "longmesh run: the following arguments are required: --ranks; `longmesh run --help` lists",
        ),
        (["doctor", "--json", ""], "longmesh doctor: --json '': give the name of a file"),
        (["doctor", "--save", "."], "longmesh doctor: --save .: give the name of a file"),
        (
            ["doctor", "--json", "a/b"],
            "longmesh doctor: --json a/b: its folder does not exist; make it first",
        ),
        (
            ["doctor", "--json", LONG],
            f"longmesh doctor: --json {LONG}: it can't be written: File name too long; give another name",
        ),
        pytest.param(
            ["doctor", "--save", "/proc/none.json"],
            "longmesh doctor: --save /proc/none.json: it can't be written: No such file or directory; give another",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="a file system that takes no files"),
        ),
        (
            ["doctor", "--save", "cluster"],
            "longmesh doctor: --save cluster: give a name that ends in .json, by which --cluster and cluster= know a",
        ),
        (
            ["doctor", "--ranks", "x"],
            "longmesh doctor: argument --ranks: 'x' is not a whole number; `longmesh doc",
        ),
        (
            ["doctor", "--ranks", "1", "--save", "x.json"],
            "longmesh doctor: --save needs 2 ranks at least: links are",
        ),
        (["generate", "--ranks", "0"], "longmesh generate: --ranks 0: a run has at least 1 rank"),
        (
            ["generate", "--threads", "0"],
            "longmesh generate: --threads 0: a rank has 1 to 1024 threads; leave it",
        ),
        (["generate", "--new-tokens", "0"], "longmesh generate: --new-tokens 0: give 1 to 2147483648"),
        (["generate", "--random-tokens", "0"], "longmesh generate: --random-tokens 0: give 1 to 2147483648"),
        (
            ["generate", "--model", ""],
            "longmesh generate: --model '': give a folder or a name; leave it out for a",
        ),
        (["generate", "--model", "/nope"], "longmesh generate: --model /nope: no such folder\n"),
        (["generate", "--model", "./nope"], "longmesh generate: --model ./nope: no such folder (looked in "),
        (["generate", "--model", "a/b/c"], "longmesh generate: --model a/b/c: no such folder (looked in "),
        (
            ["generate", "--model", "."],
            "longmesh generate: --model .: there is no config.json in it; give a folder",
        ),
        (
            ["generate", "--model", __file__],
            f"longmesh generate: --model {__file__}: it is a file; give the folder",
        ),
        (
            ["generate", "--cluster", "x"],
            "longmesh generate: --cluster x: it is not known; use one of cpu, a100, h10",
        ),
        (
            ["train", "--cluster", "x"],
            "longmesh train: --cluster x: it is not known; use one of cpu, a100, h100, h200, b200",
        ),
        (
            ["train", "--cluster", "no.json"],
            "longmesh train: --cluster no.json: the cluster file no.json can't be read: No such file or directory; ",
        ),
        (
            ["train", "--seq-len", "64Q"],
            "longmesh train: argument --seq-len: '64Q' is not a number of tokens; give one such as 65536, 64K, 1M or",
        ),
        (["generate", "--page", "-1"], "longmesh generate: --page -1: give 1 to 2147483648"),
        (["generate", "--seed", "-1"], "longmesh generate: --seed -1: give 0 to 2147483648"),
        (
            ["generate", "--dtype", "int8"],
            "longmesh generate: --dtype int8: give one of float64, float32, bfloat16,",
        ),
        (["generate", "--prompt", "."], "longmesh generate: --prompt .: it is a directory; give a text file"),
        (["generate", "--prompt", "no.txt"], "longmesh generate: --prompt no.txt: no such file (looked in "),
        (
            ["generate", "--prompt", "/dev/null"],
            "longmesh generate: --prompt /dev/null: it is empty; give a text, or",
        ),
        (
            ["generate", "--prompt", sys.executable],
            f"longmesh generate: --prompt {sys.executable}: it is not UTF-8; ",
        ),
        (
            ["generate", "--prompt", "a", "--random-tokens", "2"],
            "longmesh generate: --prompt and --random-tokens: give one of them",
        ),
        (["train", "--max-restarts", "-2"], "longmesh train: --max-restarts -2: give 0 or more"),
    ],
)
def test_the_texts(arguments, text, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, err, started = call(arguments, monkeypatch, capsys)
    assert (code, started) == (2, False)
    assert err.startswith(text) and err.count("\n") == 1, err


def test_an_out_that_can_not_be_a_directory(monkeypatch, capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "below"):
        code, err, started = call(["train", "--out", str(out)], monkeypatch, capsys)
        assert (code, started) == (2, False)
        assert err == f"longmesh train: --out {out} is not a directory and can't become one; give another\n"


def test_an_out_without_permission(monkeypatch, capsys, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != closed)
    code, err, _ = call(["train", "--out", str(closed / "out")], monkeypatch, capsys)
    assert code == 2
    assert err.startswith(
        f"longmesh train: --out {closed / 'out'} can't be written: no permission in {closed}"
    )


def test_the_model_of_a_hub_that_is_not_there_is_one_line(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    problem = find_model._find_hub_problem("no-one/nothing")
    assert problem is not None and problem.count("\n") == 0
    assert problem.startswith(
        f"no such folder, it is not in the cache ({tmp_path}), and http://127.0.0.1:9 can't be"
    )


def test_the_first_rank_of_a_host_speaks_for_all(monkeypatch, capsys):
    for rank, said in (("0", "longmesh train: --ranks 0: a run has at least 1 rank\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["train", "--ranks", "0"]) == 2
        assert capsys.readouterr().err == said


MISTAKES = [
    ["plan", "--help"], ["plan", "--seqlen", "2"],
    ["--help"], ["--version"], ["walk"], ["run", "--help"], ["train", "--help"], ["generate", "--help"],
    ["doctor", "--help"], ["run", "--ranks", "0", __file__], ["run", "--ranks", "1", "no.py"],
    ["train", "--ranks", "0"], ["train", "--seqlen", "2"], ["train", "--seq-len", "0"], ["train", "--dim", "3"],
    ["train", "--mask", "x"], ["train", "--exchange", "x"], ["train", "--cluster", "x"], ["train", "--resume", "no"],
    ["train", "--seq-len", HUGE], ["generate", "--page", "0"], ["generate", "--cluster", "x"],
    ["generate", "--prompt", "no"], ["generate", "--model", "/no"], ["doctor", "--ranks", "0"],
    ["doctor", "--json", "no/no"],
]  # fmt: skip


def test_a_mistake_is_answered_before_torch_is_imported(tmp_path):
    """Importing torch takes seconds; `python -m longmesh` imports what the command does."""
    program = (
        "import contextlib, io, json, sys\n"
        "import longmesh.__main__\n"
        "from longmesh.cli.main import main\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        try:\n"
        "            code = main(line)\n"
        "        except SystemExit as leaving:\n"
        "            code = leaving.code or 0\n"
        "    wanted = 0 if line[-1] in ('--help', '--version') else 2\n"
        "    found = [name for name in ('torch', 'transformers', 'rich') if name in sys.modules]\n"
        "    assert (code, found) == (wanted, []), (line, code, found)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(MISTAKES)],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
