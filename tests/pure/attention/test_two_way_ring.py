"""A ring of both ways, added by one file and one row, does what it should; every test of exchanges draws it, too."""

from longmesh.attention import masks, plan_attention
from support.two_way_ring import TwoWayRing


def test_shards_go_both_ways_in_half_the_stages():
    plan = plan_attention(seq_len=50, ranks=5, mask=masks.full(), layout="zigzag", exchange=TwoWayRing())
    assert len(plan.rows[0].rank(0).stages) == 3
    assert [rows.rank for rows in plan.rows[0].rank(0).stages[2].receives] == [1, 4]
    assert "stage 1: passed on by both neighbours" in plan.explain()
    one_way = plan_attention(seq_len=50, ranks=5, mask=masks.full(), layout="zigzag", exchange="ring")
    assert [s.received_bytes for s in plan.stats()] == [s.received_bytes for s in one_way.stats()]
