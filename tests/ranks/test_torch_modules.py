"""Modules of torch's own that make plain tensors or views inside: recurrent layers, attention, transformers."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from longmesh import Shard, distribute_tensor
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.module_check import WEIGHTS, module_error, shard_weights

DIMS = (None, 0, 1, 2)
ATTENTION = list(
    itertools.product(
        WEIGHTS,
        DIMS,
        ("train", "eval"),
        (True, False),
        ("none", "mean", "each"),
        ("self", "cross", "other sizes", "biases"),
        (None, "bool", "float", "padding"),
    )
)
LAYERS = list(
    itertools.product(
        ("encoder", "decoder", "transformer"), WEIGHTS, DIMS, ("train", "eval"), (True, False), (True, False)
    )
)
RECURRENT = list(
    itertools.product(
        ("RNN", "LSTM", "GRU"), WEIGHTS, DIMS, (True, False), (False, True), ("float64", "float32")
    )
)


def attention_error(weights, dim, mode, batch_first, needs, kind, mask):
    torch.manual_seed(0)
    options = {"other sizes": {"kdim": 5, "vdim": 4}, "biases": {"add_bias_kv": True, "add_zero_attn": True}}
    layer = nn.MultiheadAttention(6, 2, batch_first=batch_first, **options.get(kind, {})).double()
    batch, queries, keys = 5, 3, 3 if kind == "self" else 7

    def draw(length, width):
        shape = (batch, length, width) if batch_first else (length, batch, width)
        return torch.randn(shape, dtype=torch.float64)

    inputs = [draw(queries, 6)]
    if kind != "self":
        inputs += [draw(keys, layer.kdim), draw(keys, layer.vdim)]
    given = {}
    if mask == "bool":
        given["attn_mask"] = torch.ones(queries, keys).tril().logical_not()
    elif mask == "float":
        given["attn_mask"] = torch.linspace(-1, 1, queries * keys, dtype=torch.float64).view(queries, keys)
    elif mask == "padding":
        given["key_padding_mask"] = torch.zeros(batch, keys, dtype=torch.bool)
        given["key_padding_mask"][1, -1] = True

    def call(module, tensors):
        q, k, v = tensors * 3 if kind == "self" else tensors
        return module(q, k, v, need_weights=needs != "none", average_attn_weights=needs == "mean", **given)

    return module_error(
        layer, inputs, cpu_mesh_of_run(), weights=weights, dim=dim, call=call, training=mode == "train"
    )


def layer_error(kind, weights, dim, mode, batch_first, norm_first):
    torch.manual_seed(0)
    options = {"dim_feedforward": 9, "dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first}
    shape = (lambda n: (5, n, 6)) if batch_first else (lambda n: (n, 5, 6))
    source, target = (torch.randn(shape(n), dtype=torch.float64) for n in (7, 3))
    causal = torch.ones(3, 3).tril().logical_not()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor")
        if kind == "encoder":
            layer, inputs = nn.TransformerEncoderLayer(6, 2, **options), [target]
        elif kind == "decoder":
            layer, inputs = nn.TransformerDecoderLayer(6, 2, **options), [target, source]
        else:
            layer, inputs = nn.Transformer(6, 2, 1, 1, **options), [source, target]
    name = "src_mask" if kind == "encoder" else "tgt_mask"
    return module_error(
        layer.double(),
        inputs,
        cpu_mesh_of_run(),
        weights=weights,
        dim=dim,
        call=lambda module, tensors: module(*tensors, **{name: causal}),
        training=mode == "train",
    )


def recurrent_error(kind, weights, dim, batch_first, deep, dtype):
    """In float32 an LSTM without projections is one op a layer."""
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": True} if deep else {}
    if deep and kind == "LSTM" and dtype == "float64":
        options["proj_size"] = 3
    layer = getattr(nn, kind)(5, 7, batch_first=batch_first, **options).to(getattr(torch, dtype))
    x = torch.randn(4, 4, 5, dtype=getattr(torch, dtype))  # on 3 ranks one has nothing
    error = module_error(
        layer, [x], cpu_mesh_of_run(), weights=weights, dim=dim, call=lambda module, tensors: module(*tensors)
    )
    return error if dtype == "float64" else error * 1e-5  # the same bar, times float32's precision


def cell_error(kind, weights, dim):
    torch.manual_seed(0)
    layer = getattr(nn, kind)(5, 7).double()
    x = torch.randn(5, 5, dtype=torch.float64) if dim != "one row" else torch.randn(5, dtype=torch.float64)
    dim = None if dim == "one row" else dim
    return module_error(
        layer, [x], cpu_mesh_of_run(), weights=weights, dim=dim, call=lambda module, tensors: module(*tensors)
    )


def cpu_mesh_of_run():
    return cpu_mesh(torch.distributed.get_world_size())


def errors(measure, cases):
    """The cases that differ, by how much; and how many were tried."""
    found = {case: measure(*case) for case in cases}
    return {case: error for case, error in found.items() if not error < 1e-10}, len(found)


def check(pool, measure, cases, ranks):
    for wrong, count in pool.run(errors, measure, cases, ranks=ranks, timeout=240.0):
        assert wrong == {}
        assert count == len(cases) > 0


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention(pool, ranks):
    check(pool, attention_error, ATTENTION[ranks::95], ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_transformer_layers(pool, ranks):
    check(pool, layer_error, LAYERS[ranks::35], ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_recurrent_layers(pool, ranks):
    check(pool, recurrent_error, RECURRENT[ranks::35], ranks)


def test_recurrent_cells(pool):
    cases = list(itertools.product(("RNNCell", "LSTMCell", "GRUCell"), WEIGHTS, (None, 0, 1, "one row")))
    check(pool, cell_error, cases[::2], 3)


def layer_and_input():
    mesh = cpu_mesh(2)
    layer = shard_weights(nn.LSTM(3, 4, batch_first=True), mesh, "first dim")
    return mesh, layer, torch.ones(2, 5, 3)


def state_layouts():
    """The state that a layer makes is sharded as the batch is; one that is given is left alone, also by name."""
    mesh, layer, x = layer_and_input()
    _, (hidden, cell) = layer(distribute_tensor(x, mesh, [Shard(0)]))
    state = [distribute_tensor(torch.ones(1, 2, 4), mesh, [Shard(1)]) for _ in range(2)]
    _, (given, _) = layer(input=distribute_tensor(x, mesh, [Shard(0)]), hx=tuple(state))
    return hidden.shape, cell.shape, bool((given.full_tensor() == hidden.full_tensor()).all())


def test_states(pool):
    for hidden, cell, same in pool.run(state_layouts, ranks=2):
        assert tuple(hidden) == tuple(cell) == (1, 2, 4) and not same


def refusals():
    mesh, layer, x = layer_and_input()
    state = torch.ones(1, 2, 4), torch.ones(1, 2, 4)
    calls = [
        lambda: layer(pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)),
        lambda: layer(distribute_tensor(x, mesh, [Shard(0)]), state),
    ]
    found = []
    for call in calls:
        with pytest.raises(LongmeshError) as caught:
            call()
        found.append(str(caught.value))
    return found


def test_what_recurrent_layers_refuse(pool):
    for packed, plain_state in pool.run(refusals, ranks=2):
        assert "LSTM with DTensor weights takes no PackedSequence" in packed and "padded batch" in packed
        assert "mixes a DTensor with a plain tensor" in plain_state
