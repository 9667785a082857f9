"""Second derivatives of any op of torch's `op_db` on DTensors against plain torch: tensors in random layouts, in memory
in the usual order of their dims or in the reverse one. Import it before the pool of ranks is made."""

import random
import warnings

import torch

from longmesh import DTensor, Layout
from longmesh.errors import LongmeshError
from longmesh.rules.tree import all_tensors, map_tensors
from longmesh.testing.mesh import world_mesh
from support.layouts import random_layout
from support.op_check import distribute
from support.op_sweep import OPS, PLAIN_INDICES, sweep_names

# Terms of a sum are rounded one by one.
ROUNDED = ("float",)
# Views of a larger storage, which a DTensor does not have.
STORAGE = ("as_strided", "as_strided.partial_views", "as_strided_copy", "as_strided_scatter")


def twice_differentiable():
    return [
        name
        for name in sweep_names()
        if torch.float64 in OPS[name].dtypes and OPS[name].supports_gradgrad and name not in STORAGE
    ]


def sweep_twice(name, max_samples, mesh_shape):
    """One text a sample and order: "" if right, "refused ...", else what went wrong. Collective: every rank alike."""
    op, rng, mesh = OPS[name], random.Random(name), world_mesh(*mesh_shape)
    torch.manual_seed(0)
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=True))
        samples = [(s.input, s.args, dict(s.kwargs)) for s in samples if not s.kwargs.get("dropout_p")]
        rng.shuffle(samples)
        for packed in samples[:max_samples]:
            for turns in (False, True):
                try:
                    expected = _derivatives(
                        op, map_tensors(lambda t, turns=turns: _leaf(t, t, turns), packed)
                    )
                except Exception:  # not differentiable twice in these arguments
                    continue
                if all(bool((t.abs() < 1e12).all()) for t in expected):  # near a pole rounding grows
                    texts.append(_check(op, packed, expected, mesh, rng, turns))
    return texts


def _turned(tensor, turns):
    """The same values, the dims in memory in the reverse order."""
    back = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(back).contiguous().permute(back) if turns else tensor


def _leaf(tensor, given, turns):
    return _turned(tensor.detach().clone(), turns).detach().requires_grad_(given.requires_grad)


def _check(op, packed, expected, mesh, rng, turns):
    shape, layouts = Layout.replicated(mesh).mesh, []

    def lay(tensor):
        if op.name in PLAIN_INDICES and not tensor.is_floating_point():
            return tensor
        adds = tensor.is_floating_point() and op.name not in ROUNDED
        layouts.append(random_layout(rng, shape, tensor.ndim, ("sum",) if adds else ()))
        return _leaf(distribute(tensor.detach().contiguous(), mesh, layouts[-1]), tensor, turns)

    try:
        found = _derivatives(op, map_tensors(lay, packed))
        wholes = [t.full_tensor() if isinstance(t, DTensor) else t for t in found]
    except LongmeshError as error:
        return f"refused: {[str(y) for y in layouts]}: {str(error)[:200]}"
    except Exception as error:
        return f"error: {[str(y) for y in layouts]}: {type(error).__name__}: {str(error)[:200]}"
    pairs = list(zip(wholes, expected, strict=False))
    if len(wholes) != len(expected) or not all(torch.allclose(a, b, 1e-5, 1e-7) for a, b in pairs):
        return f"wrong: {[str(y) for y in layouts]}, turned: {turns}"
    return ""


def _derivatives(op, packed):
    """The results, their first and their second derivatives."""
    inputs = [t for t in all_tensors(packed) if t.requires_grad]
    results = [t for t in all_tensors(op(packed[0], *packed[1], **packed[2])) if t.requires_grad]
    first = torch.autograd.grad(_total(results), inputs, allow_unused=True, create_graph=True)
    first = [t for t in first if t is not None]
    again = [t for t in first if t.requires_grad]
    second = torch.autograd.grad(_total(again), inputs, allow_unused=True) if again else []
    return [t.detach() for t in (*results, *first, *second) if t is not None]


def _total(tensors):
    total = 0
    for number, tensor in enumerate(tensors):
        real = tensor.abs() if tensor.is_complex() else tensor
        total = total + (real * real).sum() * (number + 1) * 0.5 + real.sin().sum()
    return total
