"""Ranks that part ways: stopped by the check where they do, or told of when the group's time is up."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from longmesh import Replicate, Shard, distribute_tensor
from longmesh.comm import comm_of
from longmesh.comm.p2p import start_send_receive
from longmesh.errors import CollectiveError, LongmeshError, NotDistributedError
from longmesh.testing import cpu_mesh
from longmesh.watch import desync_check


def tensors(mesh):
    x = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)], src_data_rank=None)
    return x, x.sum()


def error_of(run, timeout=60.0):
    """What the check says to `run`, and the seconds until it said so."""
    start = time.monotonic()
    try:
        with desync_check(timeout=timeout):
            run()
    except CollectiveError as error:
        return str(error), time.monotonic() - start
    return None, time.monotonic() - start


def part_ways():
    mesh = cpu_mesh(dist.get_world_size(), names=("tp",))
    x, total = tensors(mesh)
    last = dist.get_rank() == dist.get_world_size() - 1

    def other_collective():
        x.full_tensor()
        if last:
            total.redistribute(placements=[Replicate()])
        else:
            x.full_tensor()

    def other_dtype():
        (x.int() if last else x).full_tensor()

    def other_line():
        if last:
            x.full_tensor()
        else:
            x.full_tensor()

    found = [error_of(run) for run in (other_collective, other_dtype, other_line)]
    x.full_tensor()  # the ranks are together again
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_are_told_who_parted_and_where(pool, ranks):
    results = pool.run(part_ways, ranks=ranks)
    assert all([text for text, _ in result] == [text for text, _ in results[0]] for result in results)
    collective, dtype, line = [text for text, _ in results[0]]
    head = f"desync over axis 'tp' (ranks {', '.join(map(str, range(ranks)))}): ranks of one group came to different"
    for text in (collective, dtype, line):
        assert text.startswith(head)
        assert text.count("test_debug_desync.py:") == ranks
    assert "rank 0: all_gather of (" in collective
    assert f"rank {ranks - 1}: all_reduce of () float32 at" in collective
    assert "float32" in dtype and "int32" in dtype
    assert len({text.rsplit(":", 1)[1] for text in line.splitlines()[1:]}) == 2, "two lines"


def wait_for_each_other():
    """Rank 0 talks along one axis, rank 1 along the other: each waits for ranks that never come."""
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)], src_data_rank=None)

    def run():
        if dist.get_rank() == 1:
            x.redistribute(placements=[Replicate(), Replicate()])
        else:
            x.redistribute(placements=[Shard(0), Replicate()])

    found = error_of(run, timeout=30.0)
    dist.barrier()
    return found


def test_ranks_in_different_groups_are_found_before_the_time_is_up(pool):
    results = pool.run(wait_for_each_other, ranks=4)
    told = {rank: text for rank, (text, _) in enumerate(results) if text}
    assert {0, 1} <= set(told)
    assert all(seconds < 20 for rank, (_, seconds) in enumerate(results) if rank in (0, 1))
    assert "ranks wait for each other:" in told[0] and "rank 1: waits in all_gather" in told[0]


def make_a_group():
    """A step over several axes needs a process group, which its ranks make together: rank 2 goes elsewhere."""
    mesh = cpu_mesh(2, 1, 2, names=("dp", "pp", "tp"))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Replicate(), Replicate()], src_data_rank=None)
    comm = comm_of(mesh)
    found = error_of(x.full_tensor if dist.get_rank() == 2 else lambda: comm.group((0, 1)))
    dist.barrier()
    return found


def test_the_making_of_a_group_is_checked_too(pool):
    results = pool.run(make_a_group, ranks=4)
    assert [text is None for text, _ in results] == [False, True, False, True]
    assert "desync over axis 'dp' x axis 'pp' (ranks 0, 2): ranks wait for each other:" in results[0][0]
    assert "rank 0: the making of a process group at " in results[0][0]
    assert "rank 2: waits in all_gather of (4,) float32 at " in results[0][0]
    assert all(seconds < 20 for _, seconds in results)


def stay_away():
    x, _ = tensors(cpu_mesh(2))
    with desync_check():
        x.full_tensor()
    found = error_of(lambda: x.full_tensor() if dist.get_rank() == 0 else None, timeout=0.5)
    dist.barrier()
    return found


def test_a_rank_that_does_not_come_is_named(pool):
    (text, seconds), (nothing, _) = pool.run(stay_away, ranks=2)
    assert nothing is None
    assert 0.5 <= seconds < 15
    assert "ranks did not come within 0.5 s:" in text
    assert "rank 1: did not come; its last collective was no collective yet" in text


def uneven_and_alone():
    """What is uneven but right passes: shards of 2, 2, 1 and 0 elements, all-to-all, a broadcast, a group of one."""
    mesh = cpu_mesh(4)
    whole = torch.arange(5.0 * 3).view(5, 3)
    with desync_check():
        x = distribute_tensor(whole, mesh, [Shard(0)])
        y = x.redistribute(placements=[Shard(1)])
        same = torch.equal(y.full_tensor(), whole)
        z = distribute_tensor(whole, mesh, [Replicate()])
        return same and torch.equal((x @ z.t()).full_tensor(), whole @ whole.t())


def test_uneven_collectives_pass(pool):
    assert pool.run(uneven_and_alone, ranks=4) == [True] * 4


def short_lived_mesh(ranks, seconds):
    group = dist.new_group(ranks, timeout=timedelta(seconds=seconds))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def hang():
    """No check: ranks 0 and 1 wait in different collectives until the groups' time is up, rank 2 in none."""
    one, two = short_lived_mesh([0, 1, 2], 1), short_lived_mesh([0, 1, 2], 1)
    x, y = tensors(one)[0], tensors(two)[0]
    dist.barrier()
    start = time.monotonic()
    try:
        if dist.get_rank() == 0:
            x.full_tensor()
        elif dist.get_rank() == 1:
            y.sum().full_tensor()
    except CollectiveError as error:
        return str(error), time.monotonic() - start
    return None


def test_without_the_check_a_hang_ends_with_the_last_collective_of_each_rank(pool):
    *told, nothing = pool.run(hang, ranks=3)
    assert nothing is None
    for text, seconds in told:
        assert seconds < 30
        assert "did not end: " in text
        assert "the last collective of each rank of the group:" in text
        assert "rank 0: all_gather of (6,) float32 over axis 'tp', called at " in text
        assert "rank 1: all_reduce of () float32 over axis 'tp', called at " in text
        assert "rank 2: no answer within 5 s: it is in no collective (it ended, died or computes)" in text
        assert text.count("test_debug_desync.py:") == 2


def refuse():
    texts = []
    for timeout in (0, -1.0):
        try:
            with desync_check(timeout=timeout):
                pass
        except LongmeshError as error:
            texts.append(str(error))
    return texts


def test_bad_arguments(pool):
    assert pool.run(refuse, ranks=1)[0][0] == "desync_check(timeout=0): give a positive number of seconds"
    with pytest.raises(NotDistributedError, match=r"desync_check\(\) needs a process group"):
        desync_check().__enter__()


def exchange(wrong):
    """Two ranks send each other rows; the second expects another number of rows, or of columns."""
    group = comm_of(cpu_mesh(2)).group((0,))
    other, off = 1 - group.rank, wrong if group.rank else ""
    rows = torch.zeros(2, 4 if off == "columns" else 3)
    send = [2 if i == other else 0 for i in range(2)]
    receive = [(3 if off == "rows" else 2) if i == other else 0 for i in range(2)]

    def run():
        for _ in range(2):
            start_send_receive(rows, send_counts=send, recv_counts=receive, group=group).wait()

    return error_of(run, timeout=20.0)[0]


def test_messages_between_two_ranks_are_checked(pool):
    assert pool.run(exchange, "", ranks=2) == [None, None]
    first, second = pool.run(exchange, "rows", ranks=2)
    assert first == second
    assert first.startswith(
        "desync over axis 0 (ranks 0, 1): rank 0 sends 2 elements to rank 1, which expects 3:\n"
    )
    first, second = pool.run(exchange, "columns", ranks=2)
    assert first == second
    assert "ranks of one group came to different collectives:" in first
    assert "rank 1: send_receive of float32, sending [2, 0] and receiving [2, 0], at " in first


def redistribute_after_a_group_of_some() -> list[float]:
    """Ranks 0 and 1 know a group more than the others when those of "dp" and "pp" first make one."""
    dist.new_group([0, 1])
    mesh = cpu_mesh(2, 1, 2, names=("dp", "pp", "tp"))
    group = comm_of(mesh).group((0, 1))
    total = torch.full((1,), float(dist.get_rank()))
    dist.all_reduce(total, group=group.process_group)
    return total.tolist()


def test_members_that_know_different_numbers_of_groups_make_one(pool):
    assert pool.run(redistribute_after_a_group_of_some, ranks=4) == [[2.0], [4.0], [2.0], [4.0]]
