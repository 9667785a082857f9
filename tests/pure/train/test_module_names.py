"""The trainer's program is started by its path, so its directory comes first where Python looks for modules."""

import sys
from pathlib import Path

from longmesh import train


def test_no_module_has_the_name_of_one_of_pythons():
    names = {path.stem for path in Path(train.__file__).parent.glob("*.py")}
    assert "loop" in names
    assert not names & sys.stdlib_module_names
