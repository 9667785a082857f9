"""The README's example runs and prints what the README says."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_prints_what_the_readme_says(tmp_path):
    text = (ROOT / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    printed = re.search(r"It prints\n\n```output\n(.*?)```", text, re.DOTALL)
    assert program and printed
    script = tmp_path / "example.py"
    script.write_text(program.group(1))
    command = [sys.executable, "-m", "longmesh", "run", "--ranks", "4", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert [line.rstrip() for line in result.stdout.splitlines()] == printed.group(1).splitlines()
