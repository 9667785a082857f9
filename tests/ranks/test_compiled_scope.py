"""torch.compile of models inside scopes of context parallelism: right or refused, never this rank's tokens alone."""

import shutil
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.utils.checkpoint import checkpoint

import longmesh
from longmesh.attention import ContextParallel, masks
from longmesh.errors import LongmeshError
from longmesh.experimental import context_parallel, context_parallel_shard, context_parallel_unshard
from longmesh.parallel import AttentionParallel, parallelize_module
from longmesh.testing import cpu_mesh

LENGTH = 11
# torch itself warns of torch.jit when it loads its compiler, and asks for .grad after a graph break.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def full_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query=q, key=k, value=v)


def masked_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    band = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=band)


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return longmesh.flex_attention(q, k, v, lambda s, b, h, i, j: s - 0.1 * (i - j).abs())


def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(sdpa, q, k, v, use_reentrant=False)


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.back = nn.Linear(16, 48), nn.Linear(16, 16)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return x + self.back(self.attend(q, k, v).transpose(1, 2).flatten(2))


def whole_input() -> Tensor:
    return torch.randn(2, LENGTH, 16, generator=torch.Generator().manual_seed(1))


def difference(model: nn.Module, out: Tensor, attend: Callable[..., Tensor]) -> float:
    """Of the output, whole, and the weights' gradients of all ranks, from one process without a compiler."""
    plain, x = Layer(attend), whole_input()
    expected = plain(x)
    expected.square().sum().backward()
    worst = (out - expected).abs().max().item()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        total = ours.grad.clone()
        dist.all_reduce(total)
        worst = max(worst, (total - theirs.grad).abs().max().item() / theirs.grad.abs().max().item())
    return worst


def in_scopes(attend: Callable[..., Tensor], backend: str, fullgraph: bool) -> tuple[float, int]:
    """The largest difference over some steps, each in a scope of its own, and the number of graphs."""
    torch._dynamo.reset()
    counters.clear()
    mesh, model = cpu_mesh(2), Layer(attend)
    run = torch.compile(model, backend=backend, fullgraph=fullgraph)
    run(whole_input())  # outside, attention is this process's own
    worst = 0.0
    for backward_inside in (True, False, True):
        if attend is recomputed and not backward_inside:
            continue
        model.zero_grad()
        part = whole_input()
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
            out = run(part)
            if backward_inside:
                out.square().sum().backward()
        if not backward_inside:
            out.square().sum().backward()
        (whole,) = context_parallel_unshard(mesh, [out.detach()], [1])
        worst = max(worst, difference(model, whole, attend))
    return worst, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("attend", "backend"), [(sdpa, "aot_eager"), (full_sdpa, "aot_eager"), (sdpa, "inductor")]
)
def test_a_compiled_model_in_a_scope_is_one_graph(pool, attend, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    for worst, graphs in pool.run(in_scopes, attend, backend, True, ranks=2, timeout=300.0):
        assert worst < 1e-5
        assert graphs == 2  # one inside, however many scopes, and one outside


@pytest.mark.parametrize("attend", [masked_sdpa, flex, recomputed])
def test_what_can_not_be_traced_runs_between_graphs(pool, attend):
    for worst, _ in pool.run(in_scopes, attend, "aot_eager", False, ranks=2, timeout=300.0):
        assert worst < 1e-5


def in_modules(attend: Callable[..., Tensor]) -> float:
    torch._dynamo.reset()
    mesh, model = cpu_mesh(2), Layer(attend)
    run = torch.compile(
        parallelize_module(nn.Sequential(model), mesh, {"0": AttentionParallel()}), backend="aot_eager"
    )
    worst = 0.0
    for _ in range(2):
        model.zero_grad()
        out = run(*context_parallel_shard(mesh, [whole_input()], [1]))
        out.square().sum().backward()
        (whole,) = context_parallel_unshard(mesh, [out.detach()], [1])
        worst = max(worst, difference(model, whole, attend))
    return worst


@pytest.mark.parametrize("attend", [sdpa, flex])
def test_a_compiled_model_of_cut_modules(pool, attend):
    assert max(pool.run(in_modules, attend, ranks=2, timeout=300.0)) < 1e-5


def refusals() -> dict[str, str]:
    mesh, texts = cpu_mesh(2), {}
    attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def heads(x: Tensor) -> Tensor:
        return x.view(2, -1, 4, 4).transpose(1, 2)

    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "mha": lambda x: attention(x, x, x)[0],
        "math": lambda x: torch.ops.aten._scaled_dot_product_attention_math(heads(x), heads(x), heads(x))[0],
        "torch's flex": lambda x: torch_flex_attention(heads(x), heads(x), heads(x)),
        "uncut": lambda x: sdpa(*[torch.ones(1, 1, LENGTH, 4)] * 3) + x.sum(),
        "reentrant": lambda x: checkpoint(sdpa, heads(x), heads(x), heads(x), use_reentrant=True),
    }
    for name, call in calls.items():
        torch._dynamo.reset()
        run, part = torch.compile(call, backend="aot_eager"), whole_input()
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
            try:
                run(part.clone().requires_grad_(name == "reentrant"))
            except (LongmeshError, torch._dynamo.exc.Unsupported) as error:
                texts[name] = str(error)
    torch._dynamo.reset()
    late, part = torch.compile(Layer(recomputed), backend="aot_eager"), whole_input()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
        loss = late(part).sum()
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()
    return texts


def test_what_would_be_local_is_refused(pool):
    local = "inside a scope of context parallelism would attend to this rank's tokens only"
    expected = {
        "mha": "need_weights=False",
        "math": local,
        "torch's flex": local,
        "uncut": "uncut",
        "reentrant": "use_reentrant=False",
    }
    for texts in pool.run(refusals, ranks=2, timeout=300.0):
        assert texts.keys() == expected.keys()
        for name, part in expected.items():
            assert part in texts[name], (name, texts[name])


def recomputed_where_a_rank_has_no_tokens():
    """Each rank compiles a graph of its own; one without tokens must call attention as often as the others."""
    torch._dynamo.reset()
    cp = ContextParallel(cpu_mesh(3), seq_len=2, mask=masks.causal(), layout="contiguous", exchange="ring")
    torch.manual_seed(0)
    parts = [cp.shard(t, 2).clone() for t in torch.randn(3, 1, 2, 2, 8)]

    def run(q, k, v):
        return checkpoint(lambda *given: cp(*given).tanh(), q, k, v, use_reentrant=False)

    found = []
    for function in (run, torch.compile(run, backend="aot_eager")):
        leaves = [t.clone().requires_grad_() for t in parts]
        out = function(*leaves)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    return all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def test_recomputed_where_a_rank_has_no_tokens(pool):
    assert pool.run(recomputed_where_a_rank_has_no_tokens, ranks=3, timeout=120.0) == [True] * 3
