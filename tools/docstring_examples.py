"""Examples in docstrings as code blocks of the site: to Markdown, lines that start with `>>>` are quotations.

An extension of griffe, which reads the docstrings for mkdocstrings.
"""

import re
from typing import Any

import griffe

# From a prompt to the next empty line: a doctest example and what it prints.
EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def fence_examples(docstring: str) -> str:
    """The docstring with its examples in fences."""
    return EXAMPLE.sub(lambda match: f"```pycon\n{match.group()}\n```", docstring)


class DocstringExamples(griffe.Extension):
    """Fences the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
