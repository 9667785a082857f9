"""Examples in docstrings are code on the site."""

import pytest

pytest.importorskip("griffe", reason="comes with the extra docs")

from docstring_examples import fence_examples


@pytest.mark.parametrize(
    ("docstring", "shown"),
    [
        ("Told.", "Told."),
        ("Told.\n\n>>> f(1)\n2", "Told.\n\n```pycon\n>>> f(1)\n2\n```"),
        (
            "A\n\n>>> f(\n...     1)\n\nB >>> C\n\n>>> g()",
            "A\n\n```pycon\n>>> f(\n...     1)\n```\n\nB >>> C\n\n```pycon\n>>> g()\n```",
        ),
    ],
)
def test_fences(docstring, shown):
    assert fence_examples(docstring) == shown
