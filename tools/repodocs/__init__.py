"""A Markdown page for every Python file of a repository, from its syntax tree alone: nothing is imported or run.

    python -m repodocs PATH --out DIR

    discover -> facts (ast, kept by content hash) -> repository (who imports whom) -> pages, indexes, pictures

Each step is a pure function of the one before; only `discover` reads the repository and only `build` writes.
"""

from repodocs.build import Outcome, build

__all__ = ["Outcome", "build"]
