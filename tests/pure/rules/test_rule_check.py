"""The check of rules can fail: an op without a rule, or without a line for a call, is not taken as tried."""

import pytest
import torch

from support.rule_check import assert_held, assert_lines_hold, check_program


def test_an_op_without_a_rule_is_not_taken_as_tried():
    checked = check_program(lambda: torch.rot90(torch.randn(4, 2)))
    assert checked.untried == {"rot90.default"}
    with pytest.raises(AssertionError, match=r"no line was tried of \{'rot90.default'\}"):
        assert_held(checked)
    assert_held(checked, untried={"rot90.default"})


def test_an_op_whose_rule_has_no_line_is_not_taken_as_tried():
    with pytest.raises(AssertionError, match="no line was tried of"):
        assert_lines_hold(lambda: torch.pdist(torch.randn(5, 3)))


def test_a_program_without_ops_is_no_check():
    with pytest.raises(AssertionError, match="no op was called"):
        assert_lines_hold(lambda: torch.zeros(3))
