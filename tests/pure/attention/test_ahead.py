"""Plans made in a helper process are those that are made here, and nothing depends on whether it works."""

import functools
import importlib
import pickle
import subprocess
import sys
import time

from longmesh.attention import AttentionPlan, ContextParallel, masks, plan_attention
from longmesh.attention.plan import ahead
from longmesh.attention.plan.ahead import MadePlan, PlansAhead, Request, key_of, make_plan
from support.processes import is_alive, wait_until_gone

MASK = masks.documents([300, 150, 62])
REQUEST = {"seq_len": 512, "ranks": 3, "mask": MASK}


def waited_for(plans: PlansAhead, request: Request) -> MadePlan | None:
    deadline = time.monotonic() + 60.0
    while not plans._coming[key_of(request)].done() and time.monotonic() < deadline:
        time.sleep(0.05)
    return plans.take(request)


def same(one: AttentionPlan, other: AttentionPlan) -> bool:
    return one.digest == other.digest and one.explain() == other.explain()


def test_a_plan_travels_as_a_small_value():
    plan = plan_attention(seq_len=1 << 16, ranks=8, mask=masks.documents([1 << 14] * 4), layout="solve")
    small = pickle.dumps(plan)
    plan.explain()  # works out much that stays behind
    assert len(pickle.dumps(plan)) == len(small) < 40_000
    assert same(pickle.loads(small), plan)
    assert pickle.loads(small).rows[0].rank(5) == plan.rows[0].rank(5)


def test_the_helpers_plan_is_the_one_made_here():
    plans = PlansAhead(rank=1)
    bad, other = REQUEST | {"layout": "zig"}, REQUEST | {"seq_len": 512, "chunk": 64}
    plans.start(REQUEST)
    plans.start(bad)
    plans.start(REQUEST | {"mask": masks.mask_mod(lambda b, h, q, k: q >= k)})
    assert len(plans._coming) == 2  # a lambda cannot be sent: planned where it is needed
    found = waited_for(plans, REQUEST)
    assert found is not None
    expected = make_plan(REQUEST, 1)
    assert same(found.plan, expected.plan) and found.rank_plans == expected.rank_plans
    assert waited_for(plans, bad) is None and plans.take(other) is None
    assert plans._helper is not None
    plans._helper._process.kill()
    plans.start(other)
    assert waited_for(plans, other) is None


LIMITS = """
LIMIT = 4

def near(b, h, q, k):
    return (q - k).abs() < LIMIT
"""


class NotSent:
    def __reduce__(self):
        raise RuntimeError("it stays here")


def test_code_of_the_program_is_planned_here(tmp_path, monkeypatch):
    """A helper would import it anew, with the limit of before."""
    (tmp_path / "limits_of_a_program.py").write_text(LIMITS)
    monkeypatch.syspath_prepend(tmp_path)
    limits = importlib.import_module("limits_of_a_program")
    limits.LIMIT = 300
    plans = PlansAhead(rank=0)
    plans.start(REQUEST | {"mask": masks.mask_mod(limits.near)})
    plans.start(REQUEST | {"mask": masks.documents([300, 212], within=masks.mask_mod(limits.near))})
    plans.start(REQUEST | {"mask": masks.mask_mod(functools.partial(_same, NotSent()))})
    assert not plans._coming and plans._helper is None


def _same(held, b, h, q, k):
    return q >= k


def test_nobody_waits_for_a_helper_that_is_starting(monkeypatch):
    monkeypatch.setattr(ahead, "_SERVE", "import time; time.sleep(60)")
    plans = PlansAhead(rank=0)
    plans.start(REQUEST)
    start = time.monotonic()
    assert plans.take(REQUEST) is None
    assert time.monotonic() - start < 5.0


def test_a_helper_leaves_with_its_parent_even_while_it_imports(tmp_path):
    importing = ahead._SERVE.replace("from longmesh", "time.sleep(60)\nfrom longmesh")
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import os, subprocess, sys\n"
                "words = [sys.executable, '-c', sys.argv[1], str(os.getpid())]\n"
                "helper = subprocess.Popen(words, stdin=subprocess.PIPE)\n"
                "print(helper.pid, flush=True)\n"
                "sys.stdin.read()\n"
            ),
            importing,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    helper = int(parent.stdout.readline())
    assert is_alive(helper)
    parent.kill()
    parent.communicate()
    assert wait_until_gone([helper])


def test_plans_that_nobody_takes_are_forgotten(monkeypatch):
    monkeypatch.setattr(ahead, "_SERVE", "import time; time.sleep(60)")
    plans = PlansAhead(rank=0)
    for number in range(100):
        plans.start(REQUEST | {"seq_len": 1 + number})
    assert list(plans._coming) == [key_of(REQUEST | {"seq_len": 1 + number}) for number in range(36, 100)]


def test_an_engine_for_another_mask():
    cp = ContextParallel(None, seq_len=512, mask=masks.causal(), num_heads=2, head_dim=8)
    cp.plan_ahead([MASK])
    other = cp.with_mask(MASK)
    assert same(other.plan, ContextParallel(None, seq_len=512, mask=MASK, num_heads=2, head_dim=8).plan)
    assert cp.plan.mask == masks.causal() and other.positions.tolist() == list(range(512))


PROGRAM = """
from longmesh.attention import ContextParallel, masks
print("main runs")
cp = ContextParallel(None, seq_len=8)
cp.plan_ahead([masks.full()])
"""


def test_the_helper_does_not_run_the_program_and_ends_with_it():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and run.stdout == "main runs\n" and run.stderr == ""
