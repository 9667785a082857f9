"""Experts over ranks against all experts in one process: results, gradients, bytes, and ranks or
experts without tokens.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from longmesh import hf
from longmesh.comm import record_comm
from longmesh.errors import LongmeshError
from longmesh.experts import ExpertParallel, combine, dispatch
from longmesh.parallel import parallelize_module
from longmesh.testing import cpu_mesh
from support.axes_sweep import make_rows, run_share, sweep_axes, worst_gradient
from support.tiny_models import checkpoint_layers, make_model


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 6, 4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(count, 6, dtype=torch.float64))

    def forward(self, x, chosen, weights):
        every = torch.einsum("th,efh->tef", x, self.up) + self.bias
        taken = every.tanh().gather(1, chosen[..., None].expand(-1, -1, 6))
        return (taken * weights[..., None]).sum(1)[:, :4]


def tokens_of(rank, count, top_k, experts):
    torch.manual_seed(rank)
    x = torch.randn(count, 4, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(count, experts).argsort(-1)[:, :top_k]
    return x, chosen, torch.rand(count, top_k, dtype=torch.float64, requires_grad=True)


def against_one_process(shape, names, counts, experts, top_k, whole_on=None):
    """Each rank's tokens through sharded experts; one process runs the tokens of all. With `whole_on` all are alike."""
    mesh, me = cpu_mesh(*shape, names=names), dist.get_rank()
    plain, module = (
        Experts(experts),
        parallelize_module(Experts(experts), mesh, ExpertParallel(whole_on=whole_on)),
    )
    ranks = range(len(counts)) if whole_on is None else range(1)
    inputs = [tokens_of(rank, counts[rank], top_k, experts) for rank in ranks]
    x, chosen, weights = tokens_of(me if whole_on is None else 0, counts[me], top_k, experts)
    out = module(x, chosen, weights)
    wanted = [plain(*given) for given in inputs]
    torch.testing.assert_close(out, wanted[me if whole_on is None else 0])
    out.square().sum().backward()
    sum(one.square().sum() for one in wanted).backward()
    torch.testing.assert_close(x.grad, inputs[me if whole_on is None else 0][0].grad)
    torch.testing.assert_close(weights.grad, inputs[me if whole_on is None else 0][2].grad)
    for name in ("up", "bias"):
        torch.testing.assert_close(getattr(module, name).grad.full_tensor(), getattr(plain, name).grad)


CASES = {
    "even": ((2,), ("ep",), (3, 5), 4, 2),
    "nothing divides": ((3,), ("ep",), (4, 1, 6), 5, 3),
    "a rank without tokens": ((3,), ("ep",), (0, 1, 0), 4, 1),
    "a rank without experts": ((3,), ("ep",), (2, 3, 4), 2, 1),
    "two axes": ((2, 2), ("dp", "cp"), (2, 0, 3, 5), 7, 2),
    "the same tokens": ((2,), ("tp",), (5, 5), 3, 2, "tp"),
    "one token on two ranks": ((2,), ("tp",), (1, 1), 3, 2, "tp"),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_over_ranks_are_those_of_one_process(pool, case):
    shape = CASES[case][0]
    pool.run(against_one_process, *CASES[case], ranks=torch.Size(shape).numel())


def planned_bytes(counts):
    mesh, me = cpu_mesh(3, names=("ep",)), dist.get_rank()
    x, chosen, weights = tokens_of(me, counts[me], 2, 5)
    with record_comm() as log:
        sent = dispatch(x, chosen, mesh, num_experts=5)
        combine(sent.rows, weights, sent).sum().backward()
    recorded = sum(event.sent_bytes for event in log.events)
    return recorded, 2 * sent.plan.bytes_sent(me) + sent.plan.count_bytes


def test_bytes_are_those_of_the_plan(pool):
    found = pool.run(planned_bytes, (4, 0, 7), ranks=3)
    assert all(recorded == planned and recorded for recorded, planned in found), found


def wrong_choice():
    chosen = torch.tensor([[7 if dist.get_rank() == 1 else 0]])
    with pytest.raises(LongmeshError, match="rank 1 has 1 choices that are no expert's number"):
        dispatch(torch.ones(1, 4), chosen, cpu_mesh(2), num_experts=3)
    with pytest.raises(LongmeshError, match=r"tokens of shape \(2, 4\) and choices of shape \(1, 1\)"):
        dispatch(torch.ones(2, 4), torch.zeros(1, 1, dtype=torch.long), cpu_mesh(2), num_experts=3)
    sent = dispatch(torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.long), cpu_mesh(2), num_experts=3)
    with pytest.raises(LongmeshError, match="give a result per row"):
        combine(torch.ones(9, 4), torch.ones(1, 1), sent)


def test_a_wrong_choice_is_raised_on_every_rank(pool):
    pool.run(wrong_choice, ranks=2)


def wrong_modules():
    with pytest.raises(LongmeshError, match="each of its parameters must have an expert per row"):
        parallelize_module(nn.Sequential(nn.Linear(3, 4)), cpu_mesh(2), ExpertParallel())
    module = parallelize_module(Experts(3), cpu_mesh(2), ExpertParallel())
    with pytest.raises(LongmeshError, match=r"was called with \['Tensor', 'Tensor'\]"):
        module(torch.ones(2, 4), torch.zeros(2, 1))
    with pytest.raises(LongmeshError, match="a weight per choice"):
        module(torch.ones(2, 4), torch.zeros(2, 1), torch.zeros(2, 2))
    with pytest.raises(LongmeshError, match="the mesh has the axes"):
        parallelize_module(Experts(3), cpu_mesh(2), ExpertParallel(whole_on="tp"))


def test_what_experts_must_be_is_said(pool):
    pool.run(wrong_modules, ranks=2)


MODELS = {
    "ep 2": ("qwen3_moe", (2,), ("ep",)),
    "ep 3, a rank without experts": ("mixtral", (3,), ("ep",)),
    "ep 2 x cp 2": ("qwen3_moe", (2, 2), ("ep", "cp")),
    "ep over dp 2 x cp 2": ("qwen3_moe", (2, 2), ("dp", "cp"), {}, {"ep": ("dp", "cp")}),
    "ep 2 x tp 2": ("deepseek_v3", (2, 2), ("ep", "tp")),
    "tp 3": ("gpt_oss", (3,), ("tp",)),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_mixture_of_experts_trains_as_one_process_does(pool, case):
    ranks = torch.Size(MODELS[case][1]).numel()
    for outcome in pool.run(sweep_axes, *MODELS[case], ranks=ranks, timeout=120.0):
        assert outcome.kind == "exact", outcome


def test_a_model_without_experts_is_refused(pool):
    for outcome in pool.run(sweep_axes, "llama", (2,), ("ep",), ranks=2):
        assert outcome.kind == "refused" and "LlamaForCausalLM has none" in outcome.text


def checkpointed(shape, names):
    """The largest difference of gradients where layers run again in the backward pass, experts and exchanges too."""
    mesh = cpu_mesh(*shape, names=names)
    model, plain = (make_model("qwen3_moe", "eager") for _ in range(2))
    hf.parallelize(model, mesh)
    checkpoint_layers(model)
    batch = make_rows(4)
    run_share(model, batch, mesh)
    plain(**batch, use_cache=False).loss.backward()
    return worst_gradient(model, plain)


@pytest.mark.parametrize(("shape", "names"), [((3,), ("ep",)), ((2,), ("tp",))])
def test_experts_under_activation_checkpoints(pool, shape, names):
    assert max(pool.run(checkpointed, shape, names, ranks=shape[0], timeout=120.0)) < 1e-4
