"""Every line of the rules of scans, sorts and searches, on simulated ranks."""

import torch

from longmesh.rules import find_rule
from longmesh.rules.op_facts import rule_name, run_on_meta
from support.rule_check import Checked, assert_held, assert_lines_hold, calls_of, check_program, describe

RANKS = (2, 3, 4)


def test_scans_and_sorts():
    torch.manual_seed(0)
    ops = [
        torch.cumsum, torch.cumprod, torch.logcumsumexp, torch.cummax, torch.cummin, torch.sort,
        lambda x, d: torch.topk(x, min(2, x.shape[d]), d), lambda x, d: torch.sort(x, dim=d, stable=True),
    ]  # fmt: skip
    checked = Checked()
    for op in ops:
        for shape in ((9, 5), (3, 2, 4), (7,)):
            for dim in (0, -1):
                checked.add(check_program(lambda o=op, s=shape, d=dim: o(torch.randn(s), d), RANKS))
    assert_held(checked)


def test_searches_and_histograms():
    torch.manual_seed(0)
    rows = torch.randn(4, 6).sort(1)[0]
    order = torch.arange(6).expand(4, 6).contiguous()
    x = torch.randn(4, 5)
    assert_lines_hold(lambda: torch.searchsorted(rows[0], x), RANKS)
    assert_lines_hold(lambda: torch.searchsorted(rows, x, right=True), RANKS)
    assert_lines_hold(lambda: torch.searchsorted(rows, x, sorter=order), RANKS)
    assert_lines_hold(lambda: torch.bucketize(x, rows[0]), RANKS)
    assert_lines_hold(lambda: torch.histc(x, 5, -1, 1), RANKS)


def test_output_metas_are_those_of_torch():
    x = torch.randn(4, 5, 6).permute(2, 0, 1)
    for op in (torch.cumsum, torch.cummax, torch.logcumsumexp):
        for func, args, kwargs in calls_of(lambda o=op: o(x, 1)):
            call = describe(func, args, kwargs)
            rule = find_rule(rule_name(func))
            assert rule and rule.out_meta and rule.out_meta(call) == run_on_meta(call)
