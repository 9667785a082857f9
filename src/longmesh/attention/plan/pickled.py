"""Values that travel between processes by their fields: what they have worked out and keep besides stays behind."""

import dataclasses
from typing import Any


class PickledByFields:
    """For frozen dataclasses with cached properties."""

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]
