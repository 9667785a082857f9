"""A rank that ended by a signal without a word: what its last lines and faulthandler's dump say, in words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from longmesh.watch.thread.stacks import find_wait, format_places, parse_dump

_GLOO_SIZES = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_WHAT = re.compile(r"what\(\):\s+(.*)")
_MAX_WHAT = 200


class Crash(NamedTuple):
    """One line, which may be empty, and the Python stack, innermost first."""

    message: str
    stack: str


def read_crash(dump: Path, last_errors: str) -> Crash:
    """What is known of the crash of a rank."""
    stacks = parse_dump(dump.read_text(errors="replace")) if dump.exists() else []
    waits = [wait for stack in stacks if (wait := find_wait(stack)) is not None]
    # The thread that waits for others, else the main one, which is dumped last.
    shown = next((s for s in stacks if find_wait(s) is not None), stacks[-1] if stacks else [])
    words = [f"it was in {waits[0]}"] if waits else []
    sizes, what = _GLOO_SIZES.search(last_errors), _WHAT.search(last_errors)
    if "gloo::EnforceNotMet" in last_errors and sizes is not None:
        words.append(
            f"gloo received {sizes[1]} bytes where {sizes[2]} were expected, so another rank came to another "
            "collective or has a tensor of another shape or element type there; longmesh.watch.desync_check() stops "
            "where ranks part ways"
        )
    elif what is not None:
        words.append(what[1][:_MAX_WHAT])
    return Crash("; ".join(words), "\n".join(f"  {line}" for line in format_places(shown)))
