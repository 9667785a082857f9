"""Compare an op on DTensors with the op on plain tensors: values and gradients, on real ranks.

    def cases():                                   # module-level: pool.run ships it to every rank
        x, w = torch.randn(9, 5), torch.randn(5)
        return [*compare_op(torch.add, [x, w]), *compare_op(torch.mul, [x, w], mesh_shape=(2, 2))]

    def test_cases(pool):
        assert pool.run(cases, ranks=3)[0] == []

Every rank calls with equal arguments (seed before making random tensors). Each trial gives every tensor another
layout, drawn from a seeded generator, or the `placements` given.
"""

import random
import warnings

import torch

from longmesh import DTensor
from longmesh.rules.tree import map_tensors
from longmesh.spec import Layout
from longmesh.tensor.dispatch import dispatch
from longmesh.testing.mesh import world_mesh
from support.layouts import random_layout
from support.simulate import make_locals


def compare_op(
    fn,
    tensors,
    mesh_shape=(3,),
    placements=None,
    *,
    trials=6,
    seed=0,
    partials=("sum", "avg"),
    grad=True,
    tolerance=1e-4,
    may_replicate=False,
):
    """What differs between `fn(*tensors)` on DTensors and on plain tensors: texts, none if all is right.

    `placements`: one list per tensor (then there is one trial); else layouts are drawn, pending ones among
    `partials` for floating tensors. An op that falls back to replication counts as a difference unless
    `may_replicate`. Collective: every rank of the mesh. A mesh takes the first ranks of the world.
    """
    mesh = world_mesh(*mesh_shape)
    rng = random.Random(seed)
    shape = Layout.replicated(mesh).mesh
    found = []
    for trial in range(1 if placements else trials):
        if placements:
            layouts = [Layout(mesh, p) for p in placements]
        else:
            layouts = [random_layout(rng, shape, t.ndim, partials if _adds(t) else ()) for t in tensors]
        label = f"trial {trial} {[tuple(t.shape) for t in tensors]} {[str(y) for y in layouts]}"
        try:
            text = _compare(fn, tensors, mesh, layouts, grad, tolerance, may_replicate, trial)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        if text:
            found.append(f"{label}: {text}")
    return found


def distribute(whole, mesh, layout, seed=0):
    """`whole` laid out as `layout`, without communication; pending terms are random and add up to it."""
    generator = torch.Generator().manual_seed(seed)
    local = make_locals(whole.detach(), layout, generator)[tuple(mesh.get_coordinate())]
    return DTensor(local.to(mesh.device_type), mesh, layout, whole.shape, whole.stride())


def _adds(tensor):
    return tensor.is_floating_point() or tensor.is_complex()


def _compare(fn, tensors, mesh, layouts, grad, tolerance, may_replicate, seed):
    differentiate = [grad and _adds(t) for t in tensors]
    plain = [t.detach().clone().requires_grad_(d) for t, d in zip(tensors, differentiate, strict=True)]
    parts = [
        distribute(t, mesh, y, seed + i).requires_grad_(d)
        for i, (t, y, d) in enumerate(zip(tensors, layouts, differentiate, strict=True))
    ]
    expected = _tensors_of(fn(*plain))
    dispatch.warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = _tensors_of(fn(*parts))
        text = _differences("output", results, expected, tolerance) or _gradients(
            results, expected, parts, plain, mesh, seed, tolerance
        )
    replicated = [str(w.message).split(" has no")[0] for w in caught if "no sharding rule" in str(w.message)]
    if not text and replicated and not may_replicate:
        text = f"replicated {', '.join(replicated)}"
    return text


def _tensors_of(result):
    found = []
    map_tensors(found.append, result)
    return found


def _gradients(results, expected, parts, plain, mesh, seed, tolerance):
    """Both programs differentiated with the same cotangents; the DTensors' are replicated or laid out as the output."""
    wanted = [i for i, t in enumerate(plain) if t.requires_grad]
    usable = [i for i, t in enumerate(expected) if t.requires_grad]
    if not wanted or not usable:
        return None
    generator = torch.Generator().manual_seed(seed)
    cotangents = [
        torch.randn(expected[i].shape, generator=generator, dtype=torch.float64).to(expected[i].dtype)
        for i in usable
    ]
    want = torch.autograd.grad(
        [expected[i] for i in usable], [plain[i] for i in wanted], cotangents, allow_unused=True
    )
    replicated = Layout.replicated(mesh)
    places = [
        results[i]._layout if seed % 2 and not results[i]._layout.partial_axes else replicated for i in usable
    ]
    given = [distribute(c, mesh, y) for c, y in zip(cotangents, places, strict=True)]
    got = torch.autograd.grad(
        [results[i] for i in usable], [parts[i] for i in wanted], given, allow_unused=True
    )
    missing = [i for i, w, g in zip(wanted, want, got, strict=True) if (w is None) != (g is None)]
    if missing:
        return f"gradients of {missing} are missing on one side"
    return _differences(
        "gradient", [g for g in got if g is not None], [w for w in want if w is not None], tolerance
    )


def _differences(kind, results, expected, tolerance):
    if len(results) != len(expected):
        return f"{len(results)} {kind}s, expected {len(expected)}"
    for i, (got, want) in enumerate(zip(results, expected, strict=True)):
        got = got.detach()
        name = f"{kind} {i} ({got._layout if isinstance(got, DTensor) else 'plain'})"
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"{name} is {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"
        if isinstance(got, DTensor):
            local = got._layout.local_shape(got.shape, tuple(got._mesh.get_coordinate()))
            if tuple(got._local_tensor.shape) != tuple(local):
                return f"{name} has a local part of {tuple(got._local_tensor.shape)}, its layout says {local}"
        whole = (got.full_tensor() if isinstance(got, DTensor) else got).cpu()
        if not torch.allclose(whole, want.detach(), rtol=tolerance, atol=tolerance, equal_nan=True):
            worst = (
                (whole.to(torch.complex128) - want.detach().to(torch.complex128)).abs().nan_to_num(9e9).max()
            )
            return f"{name} differs by {worst.item():.3g}"
    return None
