"""The figures that `longmesh generate` prints."""

from longmesh.cli.generate.report import Figures


def test_one_token_is_one_token() -> None:
    one = Figures(1, [7], 0.01, 0.5, [(1 << 20, 0)])
    assert one.lines()[:2] == [
        "prompt  1 token, 0.01 s, none to compute",
        "new     1 token, 0.50 s, 2.0 tokens/s",
    ]
    assert one.compared(one).startswith("against one process: the same 1 token; time of prompt x 1.00, ")
    three = Figures(3, [7, 8], 0.5, 0.5, [(1 << 20, 0)])
    assert three.lines()[0] == "prompt  3 tokens, 0.50 s, 4.0 tokens/s"
