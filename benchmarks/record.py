"""Run benchmarks and keep what they print, with the command, the date and the machine, for the page on the site.

    python benchmarks/record.py                           every benchmark that prints a table
    python benchmarks/record.py dispatch --ranks 2        one of them, with options of its own
    python benchmarks/record.py page                      none: only the page, where a docstring has changed

Writes benchmarks/results/NAME.json, then docs/benchmarks.md from all that are there.
"""

from __future__ import annotations

import ast
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
TABLES = (
    "attention",
    "checkpoint",
    "dispatch",
    "kernel",
    "layout",
    "memory",
    "op_coverage",
    "parallel",
    "plan_scale",
    "predict",
    "randomness",
    "recurrent",
    "redistribute",
    "repodocs",
    "serve",
    "train",
)
# What the op table on the site is made from, beside the rules.
COVERAGE = "benchmarks/results/op_coverage.tsv"
DEFAULTS = {"op_coverage": ["--out", COVERAGE]}

HEAD = """# Benchmarks

<!-- Made by benchmarks/record.py from benchmarks/results; edits are lost. -->

Look up here how fast longmesh is, and how it was measured. Each benchmark runs both sides in one run, so compare the
ratios; absolute times depend on the machine. The output is shown as printed, below the command that produced it.
`make bench` runs all benchmarks.
"""


def record(script: Path, options: list[str], results: Path) -> None:
    """Run a benchmark, show what it prints as it comes, and write it down; if it fails, exit as it did."""
    started = time.perf_counter()
    command = [sys.executable, "-u", str(script), *options]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if not line.startswith("USDT:"):  # the profiler's own log
                lines.append(line.rstrip())
    if process.returncode:
        sys.exit(f"{script.name} ended with {process.returncode}; nothing is written")
    shown = f"python benchmarks/{script.name} {shlex.join(options)}".rstrip()
    found = describe_run(shown, time.perf_counter() - started, lines)
    results.mkdir(exist_ok=True)
    text = json.dumps(found, indent=1, ensure_ascii=False)
    (results / f"{script.stem}.json").write_text(text + "\n", encoding="utf-8")


def describe_run(command: str, seconds: float, lines: list[str]) -> dict[str, Any]:
    return {
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "torch": version("torch"),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "seconds": round(seconds),
        "output": lines,
    }


def make_page(results: Path) -> str:
    """The page of all results in a directory, in the order of `TABLES`."""
    return "\n".join([HEAD, *(section(name, results / f"{name}.json") for name in TABLES)])


def section(name: str, result: Path) -> str:
    head = f"## {name}\n\n{purpose(name)} [Its file](files/benchmarks/{name}.py.md).\n\n"
    if not result.is_file():
        return f"{head}Not recorded yet.\n"
    found = json.loads(result.read_text("utf-8"))
    where = f"torch {found['torch']}, Python {found['python']}, {found['cores']} cores ({found['machine']})"
    output = "\n".join(found["output"]).strip("\n")
    return (
        f"{head}```sh\n{found['command']}\n```\n\n"
        f"{found['date']}, {where}, {found['seconds']} s:\n\n```text\n{output}\n```\n"
    )


def purpose(name: str) -> str:
    """What a benchmark's docstring says, but for how it is called."""
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text("utf-8"))
    paragraphs = (ast.get_docstring(tree) or "").split("\n\n")
    return "\n\n".join(" ".join(text.split()) for text in paragraphs if not text.startswith("    "))


def main(arguments: list[str]) -> None:
    names = list(TABLES) if not arguments else [name for name in arguments[:1] if name != "page"]
    unknown = set(names) - set(TABLES)
    if unknown:
        sys.exit(f"{unknown.pop()} is no benchmark with a table; there are: {', '.join(TABLES)}")
    try:
        for name in names:
            print(f"== {name}", flush=True)
            record(ROOT / "benchmarks" / f"{name}.py", arguments[1:] or DEFAULTS.get(name, []), RESULTS)
    finally:
        PAGE.write_text(make_page(RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
