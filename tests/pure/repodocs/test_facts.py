"""What is read from one file."""

import ast
import json

import pytest

from repodocs.discover import decode, discover
from repodocs.facts import Facts, Import, facts_of, first_line

SOURCE = '''"""Purpose of the file,
on two lines.

More."""
import os.path as p
from .near import thing as other
LIMIT: int = 3
first, second = 1, 2

class Box(Base, metaclass=Meta):
    """A box."""
    size: int
    async def open(self, *args: int, key=None, **rest) -> "Box":
        return other.deep.name

def outer(a, /, b=1, *, c):
    def inner(): return LIMIT
    return p.join(a)
'''

PAIR = ast.unparse(ast.parse("first, second = 1, 2"))  # Python 3.10 puts parentheses around both


def test_symbols_have_signatures_lines_and_first_lines():
    facts = facts_of(SOURCE)
    assert first_line(facts.doc) == "Purpose of the file, on two lines."
    assert [(s.name, s.kind, s.line, s.signature, s.summary) for s in facts.symbols] == [
        ("LIMIT", "constant", 7, "LIMIT: int = 3", ""),
        ("first", "constant", 8, PAIR, ""),
        ("second", "constant", 8, PAIR, ""),
        ("Box", "class", 10, "class Box(Base, metaclass=Meta)", "A box."),
        ("Box.size", "field", 12, "size: int", ""),
        ("Box.open", "method", 13, "async def open(self, *args: int, key=None, **rest) -> 'Box'", ""),
        ("outer", "function", 16, "def outer(a, /, b=1, *, c)", ""),
    ]


def test_imports_chains_and_words():
    facts = facts_of(SOURCE)
    assert facts.imports == (Import("os.path", "", 0, "p"), Import("near", "thing", 1, "other"))
    assert facts.chains == ("other.deep", "other.deep.name", "p.join")
    assert facts.words["LIMIT"] == {"": [7], "outer": [17]}
    assert facts.words["other"] == {"": [6], "Box.open": [14]}
    assert "int" not in facts.words


def test_a_definition_under_a_condition_counts():
    names = [
        s.name for s in facts_of("if x:\n  def f(): ...\nelse:\n  f = 1\ntry: y = 2\nexcept E: z = 3").symbols
    ]
    assert names == ["f", "f", "y", "z"]


def test_facts_survive_json():
    facts = facts_of(SOURCE)
    assert Facts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def f(:\n", "does not parse: invalid syntax (line 1)"),
        ("a\0b", "does not parse"),
        ("(" * 500 + ")" * 500, "does not parse"),
        ("x = " + "-" * 100_000 + "1", "does not parse"),
        ("x = " + "a." * 20_000 + "a", "does not parse"),
    ],
    ids=["syntax", "null", "nested", "recursion", "long-chain"],
)
def test_what_does_not_parse_is_a_problem_and_no_crash(text, says):
    facts = facts_of(text)
    assert says in facts.problem and not facts.problem.endswith(": .") and facts.symbols == ()


def test_an_invalid_escape_is_no_warning_of_ours():
    assert facts_of('x = "\\d"').problem == ""


@pytest.mark.parametrize(
    ("data", "text", "is_bad"),
    [
        (b"", "", False),
        (b"\xef\xbb\xbfx = 1", "x = 1", False),
        ("# coding: latin-1\nx = 'é'".encode("latin-1"), "# coding: latin-1\nx = 'é'", False),
        (b"x = '\xff'", "x = '\ufffd'", True),
        (b"# coding: no-such-thing\nx = 1", "# coding: no-such-thing\nx = 1", True),
    ],
)
def test_encodings(data, text, is_bad):
    assert decode(data)[0] == text
    assert bool(decode(data)[1]) == is_bad


def test_a_link_to_a_parent_and_a_dead_link(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "dead.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "b.py").write_text("")
    found = discover(tmp_path)
    assert [s.path for s in found] == ["a.py", "dead.py"]
    assert "could not be read" in found[1].problem
