"""Texts of refusals that need no ranks to be met: what was given, what is allowed, what to do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from longmesh import hf
from longmesh.attention.mask.band import Band
from longmesh.attention.scope.cut_mask import CutMask
from longmesh.errors import LongmeshError
from longmesh.hf import accelerator, call_checks, cut, gather, loop, loss, mask_functions, scores
from longmesh.hf.state import AttentionRequest, OutsideState

LABELS = torch.tensor([[3, 4, 5]])
WHOLE = SimpleNamespace(shard=lambda tensor, dim: tensor)  # an engine of one rank


def parallelism(cp: int, kind: str = "NO") -> Any:
    sizes = SimpleNamespace(cp_size=cp, sp_size=1, tp_size=1)
    return SimpleNamespace(parallelism_config=sizes, distributed_type=SimpleNamespace(value=kind))


def small_mesh(*names: str) -> Any:
    return SimpleNamespace(mesh_dim_names=names, shape=(2,), size=lambda: 2)


class NoItems(nn.Module):
    def forward(self, input_ids, labels=None):
        return input_ids


class ZeroPadding(nn.Module):
    config = SimpleNamespace(altup_num_inputs=2)

    def get_input_embeddings(self):
        return nn.Embedding(9, 2, padding_idx=0)


def padded() -> Any:
    padding = torch.tensor([[1, 1, 0]])
    return SimpleNamespace(padding=padding, embeds=None, tokens=torch.tensor([[3, 4, 0]]))


def raising(*args: Any) -> Any:
    raise RuntimeError("size of tensor a must match")


def gathered(forward: Any) -> Any:
    """A layer without a mask on a plain batch of one rank."""
    cut = SimpleNamespace(lead=WHOLE, num_tokens=5)
    batch: Any = SimpleNamespace(cut=cut, is_packed=False, padding=None, rows=1)
    state = gather.GatheredState(OutsideState())
    return gather.run_whole(batch, state, nn.Linear(2, 2).eval(), forward, (), {})


def asked(mask: Any = None, sinks: Any = None) -> AttentionRequest:
    x = torch.zeros(1, 2, 3, 4)
    return AttentionRequest(nn.Linear(2, 2), x, x, x, mask, sinks=sinks)


def in_model() -> Any:
    """The loss of a model that is running."""
    found = loss.SharedLoss(WHOLE.shard, LABELS)
    found.in_model = True
    return found


def blocks() -> Any:
    return SimpleNamespace(cut=SimpleNamespace(mesh=None, lead=WHOLE), in_blocks=None)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: accelerator._refuse_own_cp(parallelism(4)),
            "ParallelismConfig with cp_size=4, sp_size=1, tp_size=1",
        ),
        (
            lambda: accelerator._refuse_own_cp(parallelism(1, "DEEPSPEED")),
            "DeepSpeed is not supported; use DDP or",
        ),
        (lambda: accelerator._check_mesh(small_mesh("cp"), 4), "mesh= has 2 ranks and there are 4 processes"),
        (
            lambda: accelerator.MeshAccelerator.gather_for_metrics(
                SimpleNamespace(), [], use_gather_object=True
            ),
            "gather_for_metrics of objects with context parallelism",
        ),
        (lambda: loop._check_loss(NoItems()), "hf.prepare: NoItems takes no num_items_in_batch"),
        (lambda: loop.plain_model(nn.Linear(2, 2)), "Linear has no transformers model inside"),
        (
            lambda: gather._check_shapes(nn.Linear(2, 2), 13, [torch.zeros(25, 4)]),
            r"Linear is given a tensor of \(25, 4\), made from this rank's 13 tokens in a way that can't be gathered",
        ),
        (
            lambda: gather._check_shapes(nn.Linear(2, 2), 13, {"bias": torch.zeros(2, 4, 13, 13)}),
            "can't be gathered",
        ),
        (
            lambda: call_checks.refuse_zero_padding(ZeroPadding(), padded()),
            "ZeroPadding embeds padding as zeros and divides by the size of hidden states, .* pad with another token",
        ),
        (
            lambda: gathered(raising),
            r"Linear does not run on the whole sequence of this batch \(size of tensor",
        ),
        (
            lambda: OutsideState().attend(asked(sinks=torch.zeros(2))),
            "attention sinks outside hf.context_parallel: use attn_implementation='eager' there",
        ),
        (
            lambda: cut.engine_for_request(None, asked(CutMask.of(Band(lo=1, hi=0), 1, 5, "cpu"))),
            "Linear has a sliding window of 0 tokens; set sliding_window to 1 or more",
        ),
        (
            lambda: mask_functions.block_rule(torch.zeros(1, 3), None, blocks()),
            "give token_type_ids or mm_token_type_ids in the",
        ),
        (
            lambda: mask_functions.block_rule(torch.full((1, 3), 7), torch.tensor([[0, 1, 1]]), blocks()),
            "masks by blocks of tokens in a way that is not known; give the mask",
        ),
        (
            lambda: loss.SharedLoss(WHOLE.shard, LABELS)(torch.zeros(3, 9), LABELS.view(-1), torch.ones(9)),
            "a cross entropy with class weights or an ignore_index of its own",
        ),
        (
            lambda: loss.SharedLoss(WHOLE.shard, LABELS)(torch.zeros(2, 9), torch.tensor([1, 2])),
            "a cross entropy on 2 targets inside hf.context_parallel, which are not this rank's 3 labels",
        ),
        (
            lambda: in_model()(torch.zeros(2, 9), torch.tensor([1, 2]), reduction="sum"),
            "a cross entropy on 2 targets inside hf.context_parallel, which are not this rank's 3 labels",
        ),
    ],
)
def test_functions_of_the_bridge(call, text):
    with pytest.raises(LongmeshError, match=text):
        call()


def test_an_unknown_way_with_layers_and_an_unknown_name():
    mesh: Any = None
    with (
        pytest.raises(LongmeshError, match=r"unknown='drop'\): give 'refuse' or 'gather'"),
        hf.context_parallel(mesh, {}, unknown="drop"),
    ):
        pass
    with pytest.raises(AttributeError, match="has no attribute 'trainer_of'"):
        _ = hf.trainer_of


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("cumsum", lambda s: s.cumsum(-1)),
        ("softmax", lambda s: s.softmax(0)),
        ("matmul before softmax", lambda s: torch.matmul(s, torch.zeros(1, 2, 5, 4))),
        ("mul", lambda s: s.softmax(-1) * 2.0),
        ("mul", lambda s: s * -1.0),
        ("div", lambda s: 1.0 / s),
        ("add", lambda s: s + torch.ones(5, 5)),
        ("masked_fill", lambda s: s.masked_fill(torch.ones(5, 5, dtype=torch.bool), 0.0)),
        ("where", lambda s: torch.where(torch.ones(5, 5, dtype=torch.bool), s, 0.0)),
        ("dropout", lambda s: torch.nn.functional.dropout(s, 0.1)),
        ("reshape", lambda s: s.reshape(2, 25)),
    ],
)
def test_attention_of_a_models_own_does_something_that_is_not_known(name, use):
    q = torch.zeros(1, 2, 5, 4)
    made = scores.Scores.of(scores.Attention(q, q), (1, 2, 5, 5))
    with pytest.raises(LongmeshError, match=f"does something with its scores that is not known \\(.*{name}"):
        use(made)
