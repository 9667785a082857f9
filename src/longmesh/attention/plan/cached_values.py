"""What frozen values work out and keep: by the value itself, so that it goes with it, and stays behind when pickled."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

Owner = TypeVar("Owner")
Result = TypeVar("Result")


class PickledByFields:
    """For frozen dataclasses with cached properties and kept results: only their fields travel between processes."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]


def kept_by_instance(method: Callable[[Owner, int], Result]) -> Callable[[Owner, int], Result]:
    """A method of one number that works out each result once. `functools.cache` would keep every instance alive."""
    name = f"_kept_{method.__name__}"

    @functools.wraps(method)
    def call(self: Owner, number: int) -> Result:
        results: dict[int, Result] = self.__dict__.setdefault(name, {})
        if number not in results:
            results[number] = method(self, number)
        return results[number]

    return call
