"""Counts that users give: whole numbers of any integer type, nothing rounded silently."""

import operator

from longmesh.errors import LongmeshError


def whole_number(what: str, value: object) -> int:
    """The value as an int, if it is an integer of any kind; `what` names it in the error."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise LongmeshError(f"{what} must be a whole number, given {value!r}") from None
