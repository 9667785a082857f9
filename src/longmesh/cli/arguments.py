"""The parts that all commands share: one line for a mistake, lengths such as 64K, and how ranks are started.

Nothing here imports torch, and neither do the files that check a command's arguments: a mistake is answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple, NoReturn

USAGE_ERROR = 2
MOST_RANKS = MOST_THREADS = 1024  # of one machine
LONGEST_S = 1e9
DEFAULT_TIMEOUT_S = 900.0  # half of what torch waits; longmesh train has its own
SCRIPT_ARGS = "args"  # the one argument that is a list


class OneLineParser(argparse.ArgumentParser):
    """Reports a mistake in one line, with where to look."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - the stubs have overloads
        self, args: Any = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse does, but that it takes `--name=--` for an empty list, and leaves the command's own unknown
        options to the parser of all commands, which has another help."""
        self._given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        for name, value in vars(found).items():
            if value == [] and name != SCRIPT_ARGS:
                self.error(f"argument {flag(name)}: '--' is not a value for it")
        if rest:
            self.error(self._describe_unknown(rest))
        return found, rest

    def _describe_unknown(self, rest: Sequence[str]) -> str:
        option = next((word for word in rest if word.startswith("-")), None)
        if option is None:
            return f"no argument {rest[0]!r} is expected"
        name = option.partition("=")[0]
        return f"no option {name}{suggest(name, self._option_string_actions)}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            names = ", ".join(action.choices)
            raise argparse.ArgumentError(
                None, f"no command {value!r}{suggest(value, action.choices)}; the commands are {names}"
            )
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        for word in self._given if message.startswith("the following arguments are required") else ():
            name = word.partition("=")[0]  # of what is missing, one may have been misspelt
            known = self._option_string_actions
            close = difflib.get_close_matches(name, known, n=1) if name not in known else []
            if name.startswith("--") and close and close[0] in message:
                message = self._describe_unknown([word])
                break
        self.exit(refuse(self.prog, f"{message}; `{self.prog} --help` lists what it takes"))


def refuse(program: str, problem: str) -> int:
    """Report a mistake, and the exit code for it. Of torchrun's ranks, the first of each host speaks for all."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{program}: {problem}", file=sys.stderr)
    return USAGE_ERROR


def flag(name: str) -> str:
    """The option as it is typed: `seq_len` -> `--seq-len`."""
    return "--" + name.replace("_", "-")


def suggest(word: str, known: Iterable[str]) -> str:
    """` (did you mean ...?)` if a known word is close; else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


class RankRange(NamedTuple):
    """How many ranks a run starts with, and with how few it may continue."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.most) if self.least == self.most else f"{self.least}:{self.most}"


def read_ranks(text: str) -> RankRange:
    """`4`, or `2:4` for at least 2 and at first 4."""
    parts = [whole_number(part) for part in text.split(":")]
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text!r} has too many parts; give N or LEAST:MOST")
    return RankRange(parts[0], parts[-1])


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def token_count(text: str) -> int:
    """A number of tokens: `65536`, `64K` (1,024 each), `1M` (1,048,576 each), or `1e6` (1,000,000)."""
    found = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?(?:e\d{1,2})?)([KMG]?)", text.strip(), re.IGNORECASE)
    value = Decimal(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ") if found else None
    if value is None or value != int(value):
        try:
            return int(text)  # a sign: the command says what it takes
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number of tokens; give one such as 65536, 64K, 1M or 1e6"
            ) from None
    return int(value)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


class Launch(NamedTuple):
    """How ranks are started, watched, stopped and started again."""

    ranks: RankRange = RankRange(1, 1)
    threads: int | None = None
    timeout: float | None = None
    grace: float = 60.0
    max_restarts: int = 0

    @staticmethod
    def of(options: argparse.Namespace) -> Launch:
        """What was given; the rest as it is by default."""
        given = {name: value for name, value in vars(options).items() if name in Launch._fields}
        return Launch(**{name: value for name, value in given.items() if value is not None})

    def find_problem(self) -> str | None:
        """What is wrong with it, in words; None if nothing is."""
        if self.ranks.least < 1:
            return f"--ranks {self.ranks}: a run has at least 1 rank"
        if self.ranks.least > self.ranks.most:
            swapped = RankRange(self.ranks.most, self.ranks.least)
            return f"--ranks {self.ranks}: the smaller number comes first; give --ranks {swapped}"
        if self.ranks.most > MOST_RANKS:
            return f"--ranks {self.ranks}: at most {MOST_RANKS} are started on one machine; use torchrun on several"
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            return f"--threads {self.threads}: a rank has 1 to {MOST_THREADS} threads; leave it out to share the cores"
        if self.timeout is not None and not 0 < self.timeout <= LONGEST_S:
            return f"--timeout {self.timeout:g}: give a positive number of seconds, or leave it out"
        if not 0 <= self.grace <= LONGEST_S:
            return f"--grace {self.grace:g}: give a number of seconds, 0 to end at once"
        if self.max_restarts < 0:
            return f"--max-restarts {self.max_restarts}: give 0 or more"
        return None


def add_launch_options(parser: Any, *, needs_ranks: bool, timeout: str) -> None:
    """Add what `Launch` takes; `timeout` says what that option does."""
    parser.add_argument(
        "--ranks",
        type=read_ranks,
        required=needs_ranks,
        metavar="N",
        help="processes to start; LEAST:MOST starts MOST and may continue with fewer after restarts"
        + ("" if needs_ranks else " (not under torchrun; default 1)"),
    )
    parser.add_argument(
        "--threads",
        type=whole_number,
        metavar="N",
        help="threads per rank (default: OMP_NUM_THREADS if set, else the cores divided by the ranks)",
    )
    parser.add_argument("--timeout", type=number, metavar="S", help=timeout)
    parser.add_argument(
        "--grace",
        type=number,
        metavar="S",
        help="seconds that ranks have to stop after SIGTERM, SIGINT or SIGUSR1 before they are killed (default 60)",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole_number,
        metavar="N",
        help="number of restarts after a failure (default 0)",
    )
