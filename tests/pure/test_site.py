"""The site leaves out no public name and no page, as far as that can be told without building it."""

import importlib
import re
from pathlib import Path

import pytest

from support.bridges import needs_bridges

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Torch's own, and a module that has a page to itself.
ELSEWHERE = {"DeviceMesh", "init_device_mesh", "masks"}
REFERENCE = {
    "longmesh": ("tensor", "attention", "tiles"),
    "longmesh.attention": ("attention",),
    "longmesh.attention.masks": ("masks",),
    "longmesh.checkpoint": ("checkpoint",),
    "longmesh.debug": ("debug",),
    "longmesh.errors": ("errors",),
    "longmesh.experimental": ("experimental",),
    "longmesh.hf": ("bridges",),
    "longmesh.interop": ("bridges",),
    "longmesh.parallel": ("parallel",),
    "longmesh.recurrent": ("recurrent",),
    "longmesh.cache": ("cache",),
    "longmesh.testing": ("testing",),
    "longmesh.watch": ("debug",),
}


@pytest.mark.parametrize("module", REFERENCE)
def test_the_reference_has_every_public_name(module):
    text = "\n".join((DOCS / "reference" / f"{page}.md").read_text() for page in REFERENCE[module])
    documented = set(re.findall(r"^::: longmesh[\w.]*\.(\w+)$", text, re.MULTILINE))
    assert set(importlib.import_module(module).__all__) - ELSEWHERE - documented == set()


@needs_bridges
def test_what_the_reference_names_exists():
    for page in (DOCS / "reference").glob("*.md"):
        for module, name in re.findall(r"^::: (longmesh[\w.]*)\.(\w+)$", page.read_text(), re.MULTILINE):
            assert hasattr(importlib.import_module(module), name), f"{page.name}: {module}.{name}"


def test_the_tables_of_the_reference_list_its_names():
    for page in (DOCS / "reference").glob("*.md"):
        text = page.read_text()
        documented = re.findall(r"^::: longmesh[\w.]*\.(\w+)$", text, re.MULTILINE)
        if documented:
            table = text.partition("::: ")[0]
            cells = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
            listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
            assert sorted(listed) == sorted(documented), page.name


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    written = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert {name for name in written if not name.startswith("files/")} == {
        name for name in listed if not name.startswith("files/")
    }
