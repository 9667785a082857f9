"""Training on DTensor parameters against plain torch: optimizers, clipping, scaling, checkpointing, hooks."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from longmesh import DTensor, Partial, Replicate, Shard, distribute_tensor
from longmesh.comm import record_comm
from longmesh.spec import Layout
from longmesh.testing import cpu_mesh
from support.op_check import distribute

PLACEMENTS = {
    (3,): {"0.weight": [Shard(0)], "0.bias": [Shard(0)], "2.weight": [Shard(1)], "2.bias": [Replicate()]},
    (2, 2): {
        "0.weight": [Shard(0), Shard(1)],
        "0.bias": [Shard(0), Shard(0)],
        "2.weight": [Replicate(), Shard(1)],
        "2.bias": [Replicate(), Replicate()],
    },
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    "adamax": (torch.optim.Adamax, {"lr": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}),
    "radam": (torch.optim.RAdam, {"lr": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1}),
}
FUSED = ("sgd", "adam", "adamw", "adagrad")


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()


def distribute_net(net, mesh, placements):
    """A copy whose parameters are DTensors."""
    net = copy.deepcopy(net)
    for name, param in list(net.named_parameters()):
        owner, leaf = name.split(".")
        held = distribute_tensor(param.detach(), mesh, placements[name], src_data_rank=None)
        net.get_submodule(owner).register_parameter(leaf, nn.Parameter(held))
    return net


def make_pair(mesh_shape=(3,), rows=4):
    """A plain net and input, and the same distributed; 7 columns and 4 rows are cut unevenly by 3 ranks."""
    mesh = cpu_mesh(*mesh_shape)
    net = make_net()
    x = torch.randn(rows, 5, dtype=torch.float64)
    places = [Shard(0), *[Replicate()] * (len(mesh_shape) - 1)]
    return (
        net,
        x,
        distribute_net(net, mesh, PLACEMENTS[mesh_shape]),
        distribute_tensor(x, mesh, places, src_data_rank=None),
    )


def loss_of(net, x):
    return net(x).square().sum()


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(net, other, what=lambda p: p.detach()):
    return [
        name
        for (name, p), q in zip(net.named_parameters(), other.parameters(), strict=True)
        if not torch.allclose(whole(what(p)), whole(what(q)), rtol=1e-9, atol=1e-9)
    ]


def train(mesh_shape, names):
    found = []
    for name in names:
        kind, options = OPTIMIZERS[name]
        modes = [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if name in FUSED else [])]
        for mode in modes:
            net, x, held_net, held_x = make_pair(mesh_shape)
            plain, held = (kind(n.parameters(), **options, **mode) for n in (net, held_net))
            for _ in range(3):
                for n, optimizer, value in ((net, plain, x), (held_net, held, held_x)):
                    optimizer.zero_grad()
                    loss_of(n, value).backward()
                    optimizer.step()
            found += [(name, mode, p) for p in differences(net, held_net)]
            places = {n: list(p.placements) for n, p in held_net.named_parameters()}
            assert places == PLACEMENTS[mesh_shape], (name, mode, places)
    return found


@pytest.mark.parametrize(
    ("mesh_shape", "names"), [((3,), list(OPTIMIZERS)), ((2, 2), ["sgd", "adam", "adagrad", "rprop"])]
)
def test_optimizers(pool, mesh_shape, names):
    ranks = torch.Size(mesh_shape).numel()
    assert pool.run(train, mesh_shape, names, ranks=ranks) == [[]] * ranks


def silent_step():
    _, _, net, x = make_pair()
    loss_of(net, x).backward()
    for p in net.parameters():
        p.grad = p.grad.redistribute(placements=p.placements)
    events = []
    for mode in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}):
        optimizer = torch.optim.AdamW(net.parameters(), **mode)
        with record_comm() as log:
            optimizer.step()
        events += log.events
        states = [(p.placements, optimizer.state[p]["exp_avg"].placements) for p in net.parameters()]
    return events, [have == want for have, want in states]


def test_a_step_sends_nothing_where_gradients_lie_as_parameters(pool):
    assert pool.run(silent_step, ranks=3) == [([], [True] * 4)] * 3


# -- clipping --------------------------------------------------------------------------------------


def clipped():
    world = cpu_mesh(2, 2, names=("dp", "tp"))
    shapes = [(9, 5), (7,), (1, 3), (5, 2)]
    layouts = [
        Layout(world, [Shard(0), Shard(0)]),
        Layout(world, [Partial(), Replicate()]),
        Layout(world["tp"], [Shard(0)]),
        None,
    ]
    meshes = [world, world, world["tp"], None]
    found = []
    for foreach in (None, True, False):
        for order in (2.0, 1.0, float("inf")):
            torch.manual_seed(0)
            grads = [torch.randn(s, dtype=torch.float64) * 3 for s in shapes]
            params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
            held_params = []
            for p, g, mesh, layout in zip(params, grads, meshes, layouts, strict=True):
                p.grad = g.clone()
                home = None if mesh is None else Layout(mesh, [Replicate()] * mesh.ndim)
                held = nn.Parameter(
                    p.detach().clone() if mesh is None else distribute(p.detach(), mesh, home)
                )
                held.grad = g.clone() if mesh is None else distribute(g, mesh, layout)
                held_params.append(held)
            want = nn.utils.clip_grad_norm_(params, 1.5, order, foreach=foreach)
            got = nn.utils.clip_grad_norm_(held_params, 1.5, order, foreach=foreach)
            close = torch.allclose(whole(got), want) and all(
                torch.allclose(whole(h.grad), p.grad) for h, p in zip(held_params, params, strict=True)
            )
            nn.utils.clip_grad_value_(params, 0.05, foreach=foreach)
            nn.utils.clip_grad_value_(held_params, 0.05, foreach=foreach)
            close &= all(
                torch.allclose(whole(h.grad), p.grad) for h, p in zip(held_params, params, strict=True)
            )
            found += [] if close else [(foreach, order)]
    return found


def test_clipping_over_meshes_layouts_and_plain_parameters(pool):
    assert pool.run(clipped, ranks=4) == [[]] * 4


# -- mixed precision -------------------------------------------------------------------------------


def scaled():
    found = []
    for foreach in (True, False):
        for broken in (False, True):
            net, x, held_net, held_x = make_pair()
            scales = []
            for n, value in ((net, x), (held_net, held_x)):
                scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
                optimizer = torch.optim.SGD(n.parameters(), lr=0.1, foreach=foreach)
                for step in range(2):
                    optimizer.zero_grad()
                    # Only the last row overflows: one rank alone sees it.
                    bad = torch.zeros(4, 5, dtype=torch.float64)
                    bad[-1] = float("inf") if broken and step else 0.0
                    if isinstance(value, DTensor):
                        bad = distribute(bad, value.device_mesh, value._layout)
                    scaler.scale(loss_of(n, value + bad)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                scales.append(scaler.get_scale())
            found += [] if scales[0] == scales[1] else [("scale", foreach, broken, scales)]
            found += [(foreach, broken, p) for p in differences(net, held_net)]
    return found


def test_grad_scaler(pool):
    assert pool.run(scaled, ranks=3) == [[]] * 3


def autocast():
    net, x, held_net, held_x = make_pair()
    net, held_net = net.float(), held_net.float()
    results = []
    for n, value in ((net, x.float()), (held_net, held_x.float())):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = n(value)
        y.float().square().sum().backward()
        results.append(y)
    dtypes = [str(y.dtype) for y in results]
    close = torch.allclose(whole(results[1].detach()).float(), results[0].float(), atol=0.03)
    grads = [
        torch.allclose(whole(q.grad), p.grad, atol=0.1, rtol=0.1)
        for p, q in zip(net.parameters(), held_net.parameters(), strict=True)
    ]
    return dtypes, close, grads


def test_autocast(pool):
    # bfloat16 keeps 8 bits: partial sums over ranks round otherwise than one sum does.
    assert pool.run(autocast, ranks=3) == [(["torch.bfloat16"] * 2, True, [True] * 4)] * 3


# -- autograd's own features -------------------------------------------------------------------------


def checkpointed():
    net, x, held_net, held_x = make_pair()
    loss_of(net, x).backward()
    checkpoint(held_net, held_x, use_reentrant=False).square().sum().backward()
    return differences(net, held_net, lambda p: p.grad)


def test_activation_checkpointing(pool):
    assert pool.run(checkpointed, ranks=3) == [[]] * 3


def functional():
    net, x, held_net, held_x = make_pair()
    results = []
    for n, value in ((net, x), (held_net, held_x)):
        params = {k: p.detach() for k, p in n.named_parameters()}

        def loss(params, n=n, value=value):
            return torch.func.functional_call(n, params, (value,)).square().sum()

        results.append(torch.func.grad(loss)(params))
    return [k for k, g in results[0].items() if not torch.allclose(whole(results[1][k]), g)]


def test_func_grad(pool):
    assert pool.run(functional, ranks=3) == [[]] * 3


def hooked():
    net, x, held_net, held_x = make_pair()
    seen = []
    for n in (net, held_net):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in n.parameters()}
        for p in n.parameters():
            p.register_hook(lambda grad: grad * 2)

            def step(p, optimizers=optimizers):
                seen.append(p.grad is not None and type(p.grad) is type(p.data))
                optimizers[p].step()
                p.grad = None

            p.register_post_accumulate_grad_hook(step)
    loss_of(net, x).backward()
    loss_of(held_net, held_x).backward()
    return differences(net, held_net), seen


def test_hooks(pool):
    assert pool.run(hooked, ranks=3) == [([], [True] * 8)] * 3


def accumulated():
    net, x, held_net, held_x = make_pair()
    for n, value in ((net, x), (held_net, held_x)):
        for _ in range(3):
            loss_of(n, value).backward()
    found = differences(net, held_net, lambda p: p.grad)
    for n in (net, held_net):
        torch.optim.SGD(n.parameters()).zero_grad(set_to_none=False)
    return found + differences(net, held_net, lambda p: p.grad)


def test_gradients_accumulate_and_are_cleared(pool):
    assert pool.run(accumulated, ranks=3) == [[]] * 3
