"""Working directories."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def in_folder(folder: str) -> Iterator[None]:
    """Inside, `folder` is the working directory."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
