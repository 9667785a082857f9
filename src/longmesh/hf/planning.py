"""The planning state: a model runs without values, as it was found to run when a small copy of it was inspected.

Checks that compare numbers have nothing to compare then, so they ask for this state and are left out. Nothing else
does: shapes, kinds of layers and arguments are checked as in any run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longmesh.hf.adaptation import Adaptation

_planned: ContextVar[Adaptation | None] = ContextVar("longmesh_hf_planning", default=None)


@contextlib.contextmanager
def planning(adaptation: Adaptation) -> Iterator[None]:
    """Models of this thread run without values inside, adapted so."""
    token = _planned.set(adaptation)
    try:
        yield
    finally:
        _planned.reset(token)


def planned_adaptation() -> Adaptation | None:
    """How a model without values is to be run; None where models have values."""
    return _planned.get()
