"""The generations of a run's checkpoints: their names, which of them stay, and what a killed save has left.

step-00000100             whole: it got this name when all of it was on disk
.step-00000200.saving     being written, or left by a save that was killed
.step-00000050.removing   being removed, or left by a removal that was killed
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from longmesh.checkpoint.disk import remove
from longmesh.errors import LongmeshError

_NAME = re.compile(r"step-(\d{8,})")
_GARBAGE = re.compile(r"\.step-\d{8,}\.(saving|removing)")
_REPLACED = re.compile(r"\.(step-\d{8,})\.previous")


def find_bad_step(step: int) -> LongmeshError | None:
    """What is wrong with a checkpoint's step, if something is."""
    if not isinstance(step, int) or step < 0:
        return LongmeshError(f"step={step}: a checkpoint's step is a whole number, 0 or more")
    return None


def generation_path(root: Path, step: int) -> Path:
    wrong = find_bad_step(step)
    if wrong is not None:
        raise wrong
    return root / f"step-{step:08}"


def list_steps(root: Path) -> list[int]:
    """The steps that have a checkpoint, oldest first; none if there is no directory."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(found.group(1)) for found in map(_NAME.fullmatch, names) if found)


def choose_removed(order: Sequence[int], *, newest: int, keep: int, keep_every: int) -> list[int]:
    """Which steps go after `newest` was saved: all but the last `keep` and those that `keep_every` divides.

    `order` has those of earlier runs first. Steps beyond `newest` stay: an earlier run got further.
    """
    past = [*(step for step in order if step < newest), newest]
    return [step for step in past[:-keep] if not (keep_every and step % keep_every == 0)]


def remove_generation(root: Path, step: int) -> None:
    """Remove a checkpoint: it is gone in one step, and a removal that is cut off leaves no part with its name."""
    path = generation_path(root, step)
    leaving = root / f".{path.name}.removing"
    remove(leaving)
    os.rename(path, leaving)
    remove(leaving)


def remove_garbage(root: Path) -> None:
    """Remove what killed saves and removals have left. Only for the one run that writes there."""
    for entry in list(root.iterdir()):
        replaced = _REPLACED.fullmatch(entry.name)
        if replaced and not (root / replaced.group(1)).exists():
            os.rename(entry, root / replaced.group(1))  # cut off between the two renames of a replacement
        elif replaced or _GARBAGE.fullmatch(entry.name):
            remove(entry)
