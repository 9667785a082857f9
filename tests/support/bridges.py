"""Where the bridges to transformers and diffusers can be tested: those need Python 3.11."""

import re
import sys

import pytest

HAS_BRIDGES = sys.version_info >= (3, 11)
REASON = "transformers and diffusers need Python 3.11"
needs_bridges = pytest.mark.skipif(not HAS_BRIDGES, reason=REASON)
# Test files that are about the bridges, or import them.
FILES = [
    "*/test_hf*.py",
    "*/test_diffusers.py",
    "*/hf/*",
    "*/test_cache_traps.py",
    "*/test_device_programs.py",
]
IMPORT = re.compile(
    r"^\s*(import|from) (transformers|diffusers|longmesh\.(hf|diffusers)|longmesh import hf)\b", re.MULTILINE
)


def of_code(name: str, code: str):
    """The parameter `name` of a test that runs `code`."""
    return pytest.param(name, marks=[needs_bridges] if IMPORT.search(code) else [])
