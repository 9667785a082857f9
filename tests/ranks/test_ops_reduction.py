"""Reductions, scans and sorts on real ranks: values and gradients against plain torch."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from longmesh import DTensor, Partial, Shard, distribute_tensor
from longmesh.comm import record_comm
from support.op_check import compare_op

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")

SHAPES = [(9, 5), (1, 4), (4, 3, 2)]

OVER_DIMS = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "std": lambda x, dim, keepdim: torch.std(x, dim, correction=0, keepdim=keepdim),
    "var_mean": lambda x, dim, keepdim: torch.var_mean(x, dim, correction=0.5, keepdim=keepdim),
    "logsumexp": torch.logsumexp,
    "amax": torch.amax,
    "amin": torch.amin,
    **{
        f"norm {p}": lambda x, dim, keepdim, p=p: torch.linalg.vector_norm(x, p, dim, keepdim)
        for p in (0, 1, 2, 3, -1.5, math.inf, -math.inf)
    },
    "nansum": torch.nansum,
}
ONE_DIM = {
    "max": torch.max,
    "min": torch.min,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "prod": torch.prod,
    "aminmax": lambda x, dim, keepdim: torch.aminmax(x, dim=dim, keepdim=keepdim),
    "any": lambda x, dim, keepdim: torch.any(x > 0.5, dim, keepdim),
    "all": lambda x, dim, keepdim: torch.all(x > -1, dim, keepdim),
    "median": torch.median,
    "mode": torch.mode,
    "kthvalue": lambda x, dim, keepdim: torch.kthvalue(x, 1, dim, keepdim),
    "quantile": lambda x, dim, keepdim: torch.quantile(x, 0.3, dim, keepdim),
}
FULL = {
    "sum": torch.sum,
    "mean": torch.mean,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.linalg.vector_norm,
    "max": torch.max,
    "min": torch.min,
    "argmax": torch.argmax,
    "argmin": torch.argmin,
    "aminmax": torch.aminmax,
    "prod": torch.prod,
    "median": torch.median,
    "count_nonzero": lambda x: torch.count_nonzero(x > 0),
}


def distinct(shape):
    """Distinct small integers: pending sums of them are exact, so a maximum is found again in the backward."""
    return torch.randperm(math.prod(shape)).view(shape) / 2 - 3


def over_dims(name, mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape in SHAPES[::2]:
        for dim, keepdim in (([0], False), ([-1], True), (list(range(len(shape))), False)):
            x = distinct(shape)
            found += compare_op(
                lambda t, d=dim, k=keepdim: OVER_DIMS[name](t, dim=d, keepdim=k),
                [x], mesh_shape, trials=2, seed=len(shape), may_replicate=True,
            )  # fmt: skip
    return found


def over_one_dim(name, mesh_shape):
    torch.manual_seed(0)
    found = []
    for shape in SHAPES[:2]:
        for dim, keepdim in ((0, False), (-1, True)):
            x = distinct(shape)
            found += compare_op(
                lambda t, d=dim, k=keepdim: ONE_DIM[name](t, d, k),
                [x], mesh_shape, trials=2, seed=dim + 7, may_replicate=True,
            )  # fmt: skip
    return found


def of_everything(name, mesh_shape):
    torch.manual_seed(0)
    return [
        text
        for shape in (*SHAPES, ())
        for text in compare_op(
            FULL[name], [distinct(shape)], mesh_shape, trials=2 if shape else 1, may_replicate=True
        )
    ]


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", OVER_DIMS)
def test_over_dims(pool, name, ranks):
    assert pool.run(over_dims, name, (3,) if ranks == 3 else (2, 2), ranks=ranks)[0] == []


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", ONE_DIM)
def test_over_one_dim(pool, name, ranks):
    assert pool.run(over_one_dim, name, (3,) if ranks == 3 else (2, 2), ranks=ranks)[0] == []


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("name", FULL)
def test_of_everything(pool, name, ranks):
    assert pool.run(of_everything, name, (3,) if ranks == 3 else (2, 2), ranks=ranks)[0] == []


SCANS = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "logcumsumexp": torch.logcumsumexp,
    "cummax": torch.cummax,
    "cummin": torch.cummin,
    "sort": torch.sort,
    "topk": lambda x, d: torch.topk(x, min(3, x.shape[d]), d),
    "smallest": lambda x, d: torch.topk(x, min(2, x.shape[d]), d, largest=False),
    "argsort": torch.argsort,
    "diff": lambda x, d: torch.diff(x, dim=d),
}


def scans(mesh_shape):
    torch.manual_seed(0)
    found = []
    for name, op in SCANS.items():
        for shape in SHAPES[:2]:
            for dim in (0, -1):
                found += [
                    f"{name}: {text}"
                    for text in compare_op(
                        lambda t, o=op, d=dim: o(t, d),
                        [distinct(shape) / 9],
                        mesh_shape,
                        trials=2,
                        may_replicate=True,
                    )
                ]
    x = torch.randint(0, 3, (9, 5)).float()
    found += compare_op(lambda t: torch.cummax(t, 0), [x], mesh_shape, [[Shard(0)] * len(mesh_shape)])
    found += compare_op(lambda t: torch.histc(t, 4), [x], mesh_shape, partials=(), grad=False)
    found += compare_op(lambda t: torch.cumsum(t > 0, 0), [x], mesh_shape, partials=(), grad=False)
    rows = torch.arange(5.0)
    found += compare_op(torch.searchsorted, [rows, x], mesh_shape, grad=False)
    found += compare_op(lambda t, b: torch.bucketize(t, b), [x, rows], mesh_shape, grad=False)
    return found


@pytest.mark.parametrize("ranks", [3, 4])
def test_scans_and_sorts(pool, ranks):
    assert pool.run(scans, (3,) if ranks == 3 else (2, 2), ranks=ranks)[0] == []


def ties_and_nans():
    """Nine rows over all ranks, with ties and NaNs on several of them."""
    mesh_shape = (4,)
    torch.manual_seed(0)
    ties = torch.randint(0, 2, (9, 5)).float()
    nans = torch.randn(9, 5).masked_fill(torch.rand(9, 5) < 0.2, math.nan)
    found = []
    for x in (ties, nans, torch.full((9, 5), -math.inf), torch.full((1, 5), 3.0)):
        for op in (
            torch.amax, torch.amin, torch.argmax, torch.argmin, torch.max, torch.min,
            lambda t, d: torch.aminmax(t, dim=d), torch.cummax, torch.cummin, torch.logsumexp, torch.softmax,
        ):  # fmt: skip
            for placement in (Shard(0), Shard(1)):
                found += compare_op(lambda t, o=op: o(t, 0), [x], mesh_shape, [[placement]], grad=False)
        for op in (torch.max, torch.min, torch.argmax, torch.argmin, torch.aminmax):
            for placement in (Shard(0), Shard(1)):
                found += compare_op(op, [x], mesh_shape, [[placement]], grad=False)
    return found


def shifted_by_a_maximum():
    """Terms of a maximum are -inf on a rank with nothing: no arithmetic with them may make a NaN."""
    x = torch.tensor([1.0, -math.inf, 3.0, -math.inf])
    return [
        text
        for fn in (
            lambda t: t - t.amax(), lambda t: t.amin() + t, lambda t: t.amax() * 0.0,
            lambda t: t.amax() + math.inf, lambda t: torch.log_softmax(t, 0),
        )
        for text in compare_op(fn, [x], (3,), [[Shard(0)]], grad=False)
    ]  # fmt: skip


def test_infinite_terms_of_a_maximum(pool):
    assert pool.run(shifted_by_a_maximum, ranks=3)[0] == []


def test_ties_nans_and_infinities(pool):
    assert pool.run(ties_and_nans, ranks=4)[0] == []


def of_nothing():
    mesh = init_device_mesh("cpu", (3,))
    x = distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)])
    texts = []
    for op in (
        torch.amax,
        torch.max,
        torch.argmax,
        torch.aminmax,
        lambda t: torch.linalg.vector_norm(t, math.inf),
    ):
        try:
            op(x)
            texts.append("no error")
        except (RuntimeError, IndexError) as error:
            texts.append(type(error).__name__)
    empty = [x.sum().item(), x.prod().item(), x.any().item(), x.all().item(), math.isnan(x.mean().item())]
    return texts, empty


def test_reductions_of_an_empty_tensor_raise_as_in_torch_on_all_ranks(pool):
    wanted = []
    x = torch.empty(0, 4)
    for op in (
        torch.amax,
        torch.max,
        torch.argmax,
        torch.aminmax,
        lambda t: torch.linalg.vector_norm(t, math.inf),
    ):
        with pytest.raises((RuntimeError, IndexError)) as error:
            op(x)
        wanted.append(error.type.__name__)
    assert pool.run(of_nothing, ranks=3) == [(wanted, [0.0, 1.0, False, True, True])] * 3


def one_number():
    mesh = init_device_mesh("cpu", (3,))
    pending = DTensor.from_local(torch.tensor(float(dist.get_rank() + 1)), mesh, [Partial()])
    return pending.item(), float(pending), bool(pending == 6), int(pending.sum())


def test_item_of_a_pending_sum_is_one_number_on_all_ranks(pool):
    assert pool.run(one_number, ranks=3) == [(6.0, 6.0, True, 6)] * 3


def traffic():
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.randn(1000, 3), mesh, [Shard(0)])
    sent = {}
    for name, op in {
        "sum": lambda: x.sum(0),
        "mean": lambda: x.mean(),
        "amax": lambda: x.amax(0),
        "var": lambda: x.var(0),
        "argmax": lambda: x.argmax(0),
        "topk": lambda: x.topk(2, 0),
        "cumsum": lambda: x.cumsum(0),
        "norm": lambda: torch.linalg.vector_norm(x),
    }.items():
        with record_comm() as log:
            op()
        sent[name] = (len(log.events), sum(e.sent_bytes for e in log.events))
    return sent


def test_what_reductions_send(pool):
    sent = pool.run(traffic, ranks=2)[0]
    assert all(sent[name] == (0, 0) for name in ("sum", "mean", "amax"))
    assert {name: count for name, (count, _) in sent.items() if count} == {
        "var": 1, "argmax": 2, "topk": 2, "cumsum": 1, "norm": 1,
    }  # fmt: skip
    assert max(size for _, size in sent.values()) <= 2 * 3 * 8 * 2
