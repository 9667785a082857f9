"""Mean losses inside context_parallel: averaged over ranks, the loss and every gradient are those of one process."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from longmesh import DTensor, Replicate, Shard, distribute_tensor
from longmesh.attention import cut_cross_entropy
from longmesh.experimental import (
    context_parallel,
    context_parallel_shard,
    disable_context_parallel,
    enable_context_parallel,
)
from longmesh.parallel import loss_parallel
from longmesh.testing import cpu_mesh

CLASSES = 6
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def flat(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, 1), labels.flatten()


def class_weights() -> Tensor:
    return torch.arange(CLASSES, dtype=torch.float64) / 3  # the first class counts for nothing


def signs(values: Tensor) -> Tensor:
    return torch.where(values > 0, 1.0, -1.0)


def several(values: Tensor) -> Tensor:
    """Some classes of each token, then -1, as multilabel_margin_loss wants them."""
    first = (values[..., 0] > 0).long()
    return torch.stack([first, first + 2, *[torch.full_like(first, -1)] * (CLASSES - 2)], -1)


# Of logits (B, T, C), labels (B, T), some of them ignored, and values (B, T, C).
OF_LABELS: dict[str, Loss] = {
    "cross_entropy": lambda x, y, v: F.cross_entropy(*flat(x, y)),
    "three dims": lambda x, y, v: F.cross_entropy(x.transpose(1, 2), y),
    "module": lambda x, y, v: nn.CrossEntropyLoss()(*flat(x, y)),
    "ignore_index": lambda x, y, v: F.cross_entropy(*flat(x, y.clamp(min=2)), ignore_index=2),
    "weight": lambda x, y, v: F.cross_entropy(*flat(x, y), class_weights()),
    "smoothing": lambda x, y, v: F.cross_entropy(*flat(x, y), label_smoothing=0.2),
    "weight and smoothing": lambda x, y, v: F.cross_entropy(
        *flat(x, y), weight=class_weights(), label_smoothing=0.2
    ),
    "probabilities": lambda x, y, v: F.cross_entropy(x.flatten(0, 1), v.softmax(-1).flatten(0, 1)),
    "weighted probabilities": lambda x, y, v: F.cross_entropy(
        x.mT, v.softmax(-1).mT, class_weights(), label_smoothing=0.1
    ),
    "chosen tokens": lambda x, y, v: F.cross_entropy(x[y >= 0], y[y >= 0]),
    "nll": lambda x, y, v: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten()),
    "weighted nll": lambda x, y, v: nn.NLLLoss(class_weights())(x.log_softmax(-1).mT, y),
    "linear": lambda x, y, v: F.linear_cross_entropy(
        x.flatten(0, 1), v.new_ones(CLASSES, CLASSES).tril(), y.flatten()
    ),
}
OF_VALUES: dict[str, Loss] = {
    "mse": lambda x, y, v: F.mse_loss(x, v),
    "weighted mse": lambda x, y, v: F.mse_loss(x, v, weight=v.square()),
    "old spelling": lambda x, y, v: F.mse_loss(x, v, size_average=True),
    "l1": lambda x, y, v: nn.L1Loss()(x, v),
    "smooth_l1": lambda x, y, v: F.smooth_l1_loss(x, v),
    "huber": lambda x, y, v: F.huber_loss(x, v, "mean", 0.5),
    "weighted huber": lambda x, y, v: F.huber_loss(x, v, weight=v.square()),
    "bce": lambda x, y, v: F.binary_cross_entropy(x.sigmoid(), v.sigmoid(), weight=v.square()),
    "bce of logits": lambda x, y, v: F.binary_cross_entropy_with_logits(
        x, v.sigmoid(), pos_weight=class_weights()
    ),
    "batchmean": lambda x, y, v: F.kl_div(
        x.log_softmax(-1).flatten(0, 1), v.softmax(-1).flatten(0, 1), reduction="batchmean"
    ),
    "kl": lambda x, y, v: F.kl_div(x.log_softmax(-1), v.log_softmax(-1), log_target=True, size_average=True),
    "cosine": lambda x, y, v: F.cosine_embedding_loss(x.flatten(0, 1), v.flatten(0, 1), signs(v[..., 0]).flatten()),
    "gaussian": lambda x, y, v: F.gaussian_nll_loss(x, v, v.square() + 0.1),
    "poisson": lambda x, y, v: F.poisson_nll_loss(x, v.square()),
    "hinge": lambda x, y, v: F.hinge_embedding_loss(x, signs(v)),
    "ranking": lambda x, y, v: F.margin_ranking_loss(x, v, signs(v)),
    "multi_margin": lambda x, y, v: F.multi_margin_loss(*flat(x, y.clamp(min=0)), weight=class_weights()),
    "multilabel_margin": lambda x, y, v: F.multilabel_margin_loss(x.flatten(0, 1), several(v).flatten(0, 1)),
    "multilabel_soft": lambda x, y, v: F.multilabel_soft_margin_loss(x, (v > 0).double()),
    "soft_margin": lambda x, y, v: F.soft_margin_loss(x, signs(v)),
    "triplet": lambda x, y, v: F.triplet_margin_loss(x.flatten(0, 1), v.flatten(0, 1), -v.flatten(0, 1)),
    "triplet with distance": lambda x, y, v: F.triplet_margin_with_distance_loss(x, v, -v),
    "sum of means": lambda x, y, v: F.cross_entropy(*flat(x, y)) + 0.5 * F.mse_loss(x, v),
}  # fmt: skip
LOSSES = {**OF_LABELS, **OF_VALUES}


class Model(nn.Module):
    """Computes its own loss, as a model written for one process does."""

    def __init__(self, loss: Loss, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(CLASSES, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, CLASSES)
        self.loss, self.recompute = loss, recompute
        self.double()

    def forward(self, tokens: Tensor, labels: Tensor, values: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        if self.recompute:
            return checkpoint(self.end, x, labels, values, use_reentrant=False)
        return self.end(x, labels, values)

    def end(self, x: Tensor, labels: Tensor, values: Tensor) -> Tensor:
        return self.loss(self.head(x), labels, values)


def batch(length: int, ignored: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens, labels = torch.randint(CLASSES, (2, 2, length), generator=generator)
    if ignored == "some":
        labels[torch.rand(2, length, generator=generator) < 0.4] = -100
        labels[0, 0] = 3
    elif ignored == "half":  # head-tail or contiguous: all that counts is on one rank
        labels[:, : length // 2] = -100
    values = torch.randn(2, length, CLASSES, generator=generator, dtype=torch.float64)
    return [tokens, labels, values]


def differences(model: nn.Module, loss: Tensor, whole: list[Tensor], expected: Model) -> list[float]:
    """Of the average over ranks of the loss and of each gradient, from one process."""
    wanted = expected(*whole)
    wanted.backward()
    average = loss.detach().clone()
    dist.all_reduce(average)
    found = [(average / dist.get_world_size() - wanted.detach()).abs().item()]
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        found.append((ours.grad - theirs.grad).abs().max().item())
    return found


def average_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def train(names: list[str], length: int, ignored: str, layout: str) -> dict[str, float]:
    mesh, found = cpu_mesh(dist.get_world_size()), {}
    for name in names:
        model, buffers = Model(LOSSES[name]), batch(length, ignored)
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], layout=layout):
            loss = model(*buffers)
            loss.backward()
        average_gradients(model)
        found[name] = max(differences(model, loss, batch(length, ignored), Model(LOSSES[name])))
    return found


@pytest.mark.filterwarnings("ignore:.*size_average and reduce args will be deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:.*'mean' divides the total loss by both:UserWarning")
@pytest.mark.parametrize(("ranks", "length"), [(1, 5), (2, 7), (3, 7), (4, 3)])
def test_every_mean_over_tokens_is_exact_when_ranks_are_averaged(pool, ranks, length):
    for found in pool.run(train, list(LOSSES), length, "some", "zigzag", ranks=ranks):
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}


@pytest.mark.parametrize(("ranks", "length"), [(2, 8), (3, 11), (4, 2)])
def test_a_rank_may_have_no_label_that_counts(pool, ranks, length):
    for found in pool.run(train, list(OF_LABELS), length, "half", "contiguous", ranks=ranks):
        assert {name: off for name, off in found.items() if not off < 1e-12} == {}


def as_called(way: str, model: nn.Module) -> Callable[..., Tensor]:
    match way:
        case "ddp":
            return DistributedDataParallel(model)
        case "compiled":
            torch.compiler.reset()
            return torch.compile(model, backend="aot_eager", fullgraph=True)
        case "functional":
            return lambda *args: torch.func.functional_call(model, dict(model.named_parameters()), args)
        case _:
            return model


@contextlib.contextmanager
def scope(way: str, mesh: DeviceMesh, buffers: list[Tensor]) -> Iterator[list[Tensor]]:
    """This rank's part of the buffers."""
    with contextlib.ExitStack() as stack:
        if way == "enable":
            enable_context_parallel(mesh, seq_len=buffers[0].shape[1])
            stack.callback(disable_context_parallel)
            buffers = context_parallel_shard(mesh, buffers, [1, 1, 1])
        else:
            stack.enter_context(context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]))
        if way == "nested":
            stack.enter_context(context_parallel(mesh, buffers=[torch.zeros(40)], buffer_seq_dims=[0]))
        yield buffers


def train_in(way: str, name: str, sizes: tuple[int, ...]) -> float:
    """Two steps whose gradients add up, then an evaluation; ranks have unequal numbers of tokens and of labels."""
    mesh, model = cpu_mesh(*sizes), Model(LOSSES[name], recompute=way == "checkpoint")
    run = as_called(way, model)
    for _ in range(2):
        with scope(way, mesh, batch(7, "some")) as buffers:
            run(*buffers).backward()
    with torch.no_grad(), scope(way, mesh, batch(7, "some")) as buffers:
        loss = run(*buffers)
    if way != "ddp":
        average_gradients(model)
    for parameter in model.parameters():
        parameter.grad /= 2
    return max(differences(model, loss, batch(7, "some"), Model(LOSSES[name])))


WAYS = ["plain", "ddp", "checkpoint", "enable", "functional", "nested", "compiled"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_a_model(pool, way):
    for name in ("weight and smoothing", "sum of means"):
        assert max(pool.run(train_in, way, name, (3,), ranks=3, timeout=120)) < 1e-12


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["plain", "compiled"])
def test_a_scope_over_two_axes(pool, way):
    assert max(pool.run(train_in, way, "sum of means", (2, 2), ranks=4, timeout=120)) < 1e-12


def not_over_tokens() -> list[bool]:
    """The same losses of the same values on every rank, and sums: as outside of the scope, bit by bit."""
    torch.manual_seed(0)
    x, v, y = torch.randn(5, CLASSES), torch.randn(5, CLASSES), torch.randint(CLASSES, (5,))
    rank = dist.get_rank() + 1

    def losses() -> list[Tensor]:
        return [
            F.cross_entropy(x, y),
            F.mse_loss(x, v),
            F.binary_cross_entropy_with_logits(x, v.sigmoid()),
            F.mse_loss(x[0, 0], v[0, 0] * rank),  # without dims
            F.cross_entropy(x[:rank], y[:rank], reduction="sum"),
            F.mse_loss(x[:rank], v[:rank], reduction="sum"),
            F.cross_entropy(x[:rank], y[:rank], reduction="none").sum(),
        ]

    expected = losses()
    with context_parallel(cpu_mesh(3), buffers=[torch.zeros(7)], buffer_seq_dims=[0]):
        return [torch.equal(a, b) for a, b in zip(losses(), expected, strict=True)]


def test_losses_that_are_not_means_over_tokens_stay_as_they_are(pool):
    assert pool.run(not_over_tokens, ranks=3) == [[True] * 7] * 3


def equal_counts() -> bool:
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(4, CLASSES), torch.randint(CLASSES, (4,))
    expected = F.cross_entropy(x, y), F.mse_loss(x, -x)
    with context_parallel(cpu_mesh(2), buffers=[torch.zeros(8)], buffer_seq_dims=[0]):
        found = F.cross_entropy(x, y), F.mse_loss(x, -x)
    return all(map(torch.equal, found, expected))


def test_equal_counts_change_nothing(pool):
    assert all(pool.run(equal_counts, ranks=2))


def half_precision(dtype: torch.dtype, autocast: bool) -> tuple[torch.dtype, float, float]:
    """The average of a loss whose sum a half can't hold, and of its gradient's sum; rank 1 has one label."""
    tokens = 20_000 if dist.get_rank() == 0 else 1
    x = torch.zeros(tokens, CLASSES, dtype=dtype).requires_grad_()
    y = torch.zeros(tokens, dtype=torch.long)
    with context_parallel(cpu_mesh(2), buffers=[torch.zeros(8)], buffer_seq_dims=[0]):
        with torch.autocast("cpu", enabled=autocast):
            loss = F.cross_entropy(x * 1 - 9 * F.one_hot(y, CLASSES), y)
        loss.float().backward()
    sums = torch.stack([loss.detach().double(), x.grad[:, 0].double().sum()])
    dist.all_reduce(sums)
    return loss.dtype, *(sums / 2).tolist()


@pytest.mark.parametrize(
    ("dtype", "autocast"), [(torch.float16, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
def test_half_precision_does_not_overflow(pool, dtype, autocast):
    for found, loss, slope in pool.run(half_precision, dtype, autocast, ranks=2):
        assert found == (torch.float32 if autocast else dtype)
        assert loss == pytest.approx(10.6, rel=0.02)
        assert slope == pytest.approx(-1, rel=0.02)


def own_mean_inside() -> bool:
    """cut_cross_entropy in a scope is what it is outside."""
    _, labels, values = batch(7, "some")
    expected = F.cross_entropy(*flat(values, labels))
    with context_parallel(cpu_mesh(3), buffers=[labels, values], buffer_seq_dims=[1, 1]):
        return torch.allclose(cut_cross_entropy(values, labels, cpu_mesh(3)), expected)


def test_the_mean_of_all_ranks_is_left_alone(pool):
    assert all(pool.run(own_mean_inside, ranks=3))


def sharded_classes(name: str, parallel: bool) -> float:
    """Tokens over one axis, classes (the head's columns) over another."""
    mesh = cpu_mesh(2, 2, names=("cp", "tp"))
    torch.manual_seed(0)
    weight = torch.randn(CLASSES, CLASSES, dtype=torch.float64)
    _, labels, values = batch(7, "some")
    whole = weight.clone().requires_grad_()
    (expected,) = torch.autograd.grad(LOSSES[name](values @ whole, labels, values), whole)
    ours = distribute_tensor(weight, mesh["tp"], [Shard(1)], src_data_rank=None).requires_grad_()
    with (
        context_parallel(mesh["cp"], buffers=[labels, values], buffer_seq_dims=[1, 1]),
        loss_parallel() if parallel else contextlib.nullcontext(),
    ):
        parts = [DTensor.from_local(t, mesh["tp"], [Replicate()]) for t in (labels, values)]
        LOSSES[name](parts[1] @ ours, *parts).backward()
    found = ours.grad.full_tensor().clone()
    dist.all_reduce(found, group=mesh["cp"].get_group())
    return (found / 2 - expected).abs().max().item()


@pytest.mark.parametrize(
    ("name", "parallel"),
    [("cross_entropy", False), ("cross_entropy", True), ("mse", False), ("weighted mse", False)],
)
def test_losses_of_dtensors(pool, name, parallel):
    assert max(pool.run(sharded_classes, name, parallel, ranks=4)) < 1e-12


def under_transforms() -> list[bool]:
    _, labels, values = batch(7, "some")
    weight = torch.eye(CLASSES, dtype=torch.float64)
    with context_parallel(cpu_mesh(2), buffers=[labels, values], buffer_seq_dims=[1, 1]):

        def loss(w: Tensor) -> Tensor:
            return F.cross_entropy(*flat(values @ w, labels)) + F.mse_loss(values @ w, -values)

        expected = torch.autograd.grad(loss(weight.requires_grad_()), weight)[0]
        both = torch.func.vmap(torch.func.grad(loss))(torch.stack([weight, weight]))
        return [torch.allclose(found, expected) for found in (torch.func.grad(loss)(weight), *both)]


def test_transforms_of_the_loss(pool):
    assert pool.run(under_transforms, ranks=2) == [[True] * 3] * 2


def each_token(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return torch.func.vmap(F.cross_entropy)(x.flatten(0, 1)[:, None], y.flatten()[:, None])


def error_of(loss: Loss) -> str:
    _, labels, values = batch(7, "some")
    with (
        context_parallel(cpu_mesh(2), buffers=[labels, values], buffer_seq_dims=[1, 1]),
        pytest.raises((ValueError, IndexError)) as found,
    ):
        loss(values, labels, values)
    return str(found.value)


def batchmean_of_rows(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return F.kl_div(x.log_softmax(-1), v.softmax(-1), reduction="batchmean")


def ctc(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    sizes = torch.full((2,), x.shape[1])
    return F.ctc_loss(x.transpose(0, 1), y.clamp(min=1), sizes, sizes)


def wrong_on_rank_1(x: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return F.cross_entropy(*flat(x, y + 90 * dist.get_rank()))


def test_what_has_no_exact_weight_is_refused(pool):
    for text in pool.run(error_of, batchmean_of_rows, ranks=2):
        assert text == (
            "kl_div(reduction='batchmean') of a tensor of 3 dims inside a scope of context parallelism: it sums over "
            "this rank's tokens, and the average of such sums over ranks is too small; flatten tokens into the first "
            "dim, or use reduction='sum', divide by the rows and multiply by the ranks"
        )
    for text in pool.run(error_of, each_token, ranks=2):
        assert text == (
            "a mean loss under torch.vmap inside a scope of context parallelism: each sample has labels of its own, "
            "whose numbers ranks can't add up; use reduction='sum' and divide by the number of labels of all ranks"
        )
    for text in pool.run(error_of, ctc, ranks=2):
        assert text == (
            "ctc_loss inside a scope of context parallelism would align this rank's tokens alone; gather the log "
            "probabilities with context_parallel_unshard or ContextParallel.unshard and call it outside the scope"
        )


def test_a_mistake_of_one_rank_is_an_error_on_both(pool):
    first, second = pool.run(error_of, wrong_on_rank_1, ranks=2, timeout=20)
    assert "out of bounds" in second
    assert first == (
        "cross_entropy: 1 of the 2 ranks got invalid arguments and report them; this rank's arguments are valid"
    )
