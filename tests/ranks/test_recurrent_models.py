"""A hybrid of gated delta layers and attention: compiled, checkpointed, in bf16, under DDP and FSDP2."""

import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from longmesh.attention import ContextParallel, masks
from longmesh.recurrent import RecurrentParallel
from longmesh.testing import cpu_mesh

EXAMPLE = Path(__file__).parents[2] / "examples" / "hybrid_model.py"
DOCUMENTS = [20, 3, 14]


def losses_and_gradients(mesh, way: str):
    """One step of the example's model: its loss, and gradients whole, as one process has them."""
    example = runpy.run_path(str(EXAMPLE), run_name="example")
    rp = RecurrentParallel(mesh, seq_len=37, documents=DOCUMENTS)
    sizes = {"num_heads": example["HEADS"], "head_dim": example["DIM"] // example["HEADS"]}
    cp = ContextParallel(mesh, seq_len=37, mask=masks.documents(DOCUMENTS), layout="ordered", **sizes)
    torch.manual_seed(0)
    model = example["Hybrid"]()
    tokens = torch.randint(example["VOCABULARY"], (1, 38))
    run = plain = model
    ranks = 1 if mesh is None else mesh.size()
    if way == "compile":
        # Where a graph ends the compiler looks at the gradients of the tensors that go on.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        run = torch.compile(model, backend="aot_eager")
    elif way == "checkpoint":
        run = lambda *args: checkpoint(model, *args, use_reentrant=False)  # noqa: E731
    elif way == "ddp" and mesh is not None:
        run = DistributedDataParallel(model, process_group=mesh.get_group())
    elif way == "fsdp2" and mesh is not None:
        # FSDP2 warns of every module whose output is a view, as that of a linear layer on three dims is.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        logits = run(rp.shard(tokens[:, :-1], 1), rp, cp)
    labels = rp.shard(tokens[:, 1:], 1).flatten()
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="sum") / 37
    averaged = way in ("ddp", "fsdp2")
    (loss * (ranks if averaged else 1)).backward()
    total = loss.detach().clone()
    gradients = []
    for parameter in plain.parameters():
        gradient = parameter.grad.full_tensor() if way == "fsdp2" and mesh is not None else parameter.grad
        if mesh is not None and not averaged:
            dist.all_reduce(gradient)
        gradients.append(gradient)
    if mesh is not None:
        dist.all_reduce(total)
    return total, gradients


def worst(ranks: int, way: str) -> float:
    loss, gradients = losses_and_gradients(cpu_mesh(ranks), way)
    wanted_loss, wanted = losses_and_gradients(None, "autocast" if way == "autocast" else "plain")
    differences = [(loss - wanted_loss).abs().item()]
    for found, expected in zip(gradients, wanted, strict=True):
        differences.append(((found - expected).abs().max() / expected.abs().max()).item())
    return max(differences)


@pytest.mark.parametrize("way", ["plain", "compile", "checkpoint", "ddp", "fsdp2"])
def test_a_hybrid_trains_as_in_one_process(pool, way):
    assert max(pool.run(worst, 2, way, ranks=2, timeout=300.0)) < 1e-4


def test_a_hybrid_under_autocast(pool):
    # bf16 has 8 bits: sums over ranks round differently from one process, states in fp32 do not.
    assert max(pool.run(worst, 2, "autocast", ranks=2, timeout=300.0)) < 5e-2
