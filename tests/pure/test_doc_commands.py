"""The shell blocks of the README and of the pages: they parse, and every command in them is one that there is.

Nothing is run here: options are parsed by the programs that would get them. tests/e2e runs the trainer, torchrun on two
hosts and the tutorial.
"""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from longmesh.cli.main import make_parser

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"python", "output", "sh", "text"}  # output and text are what programs print


def written_pages() -> list[Path]:
    docs = [
        path for path in sorted((ROOT / "docs").rglob("*.md")) if "files" not in path.relative_to(ROOT).parts
    ]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *docs]


def shell_blocks() -> list[str]:
    return [
        block
        for path in written_pages()
        for language, block in FENCE.findall(path.read_text())
        if language == "sh"
    ]


def commands(block: str) -> list[list[str]]:
    """The commands of a block as words; a variable counts as 0, a pipe ends a command."""
    text = re.sub(r"\$\w+", "0", block.replace("\\\n", " "))
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return [line for line in lines if line]


def check(words: list[str]) -> None:
    """Raise unless the command is one that there is, with options that it has."""
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {rest[0]}"
    elif program == "longmesh":
        make_parser().parse_args(rest)
        scripts = [word for word in rest if word.startswith("examples/")]
        assert all((ROOT / script).is_file() for script in scripts)
    elif program == "torchrun":
        options = get_args_parser().parse_args(rest)
        if options.module:
            check([options.training_script, *options.training_script_args])
    elif program == "python":
        source = (ROOT / rest[0]).read_text()
        assert all(word in source for word in rest[1:] if word.startswith("--")), words
    elif program == "pip":
        assert rest[:3] == ["install", "-c", "constraints.txt"] and (ROOT / rest[2]).is_file()
    elif program == "srun":
        assert rest[:2] == ["bash", "-c"]
        check(shlex.split(rest[2]))
    elif program == "export":
        assert re.match(r"\w+=\$\((scontrol|hostname)\b", rest[0])
    elif program == "[":
        assert "||" in rest and rest[-3:-1] == ["scontrol", "requeue"]
    else:
        raise AssertionError(f"{program} is not known here: {shlex.join(words)}")


def test_every_fence_says_what_it_holds():
    for path in written_pages():
        assert {language for language, _ in FENCE.findall(path.read_text())} <= LANGUAGES, path.name


@pytest.mark.parametrize("block", shell_blocks())
def test_shell_block(block):
    parsed = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    assert (parsed.returncode, parsed.stderr) == (0, "")
    found = commands(block)
    assert found
    for words in found:
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "make none",
        "longmesh run --seats 4 x.py",
        "longmesh train --sequence 3",
        "torchrun --nodes 2 x.py",
        "rm -r x",
    ],
)
def test_a_command_that_there_is_not_is_found(line):
    with pytest.raises((AssertionError, SystemExit)):
        check(shlex.split(line))
