"""The planning state: a model runs without values, as it was found to run when a small copy of it was inspected.

Checks that compare numbers have nothing to compare then, so they ask for `planned` and are left out. Nothing else
does: shapes, kinds of layers and arguments are checked as in any run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from longmesh.hf.state import NestedState, OutsideState, current, entered

if TYPE_CHECKING:
    from longmesh.hf.adaptation import Adaptation


class PlanningState(NestedState):
    """Around the scope of a model without values, which is run as `planned` says."""

    def __init__(self, outer: OutsideState, planned: Adaptation) -> None:
        super().__init__(outer)
        self.planned = planned


def planning(adaptation: Adaptation) -> AbstractContextManager[None]:
    """Models of this thread run without values inside, adapted so."""
    return entered(PlanningState(current(), adaptation))
