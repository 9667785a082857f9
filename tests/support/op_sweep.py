"""Any op of torch's `op_db` on DTensors against plain torch: several samples, every tensor argument in a random layout.

Import it before the pool of ranks is made: the ranks are forked and then have `op_db` without importing it again.
"""

import random
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db

from longmesh import DTensor, Layout
from longmesh.debug import explain
from longmesh.errors import LongmeshError
from longmesh.rules.tree import map_tensors
from longmesh.tensor.dispatch import dispatch
from longmesh.testing.mesh import world_mesh
from support.layouts import random_layout
from support.op_check import distribute

# Their samples draw numbers: the random ops have tests of their own.
RANDOM = (
    "cauchy", "exponential", "geometric", "log_normal", "normal", "normal.in_place", "normal.number_mean", "uniform",
    "nn.functional.rrelu", "randn_like", "rand_like", "randint_like", "multinomial", "bernoulli", "svd_lowrank",
    "pca_lowrank", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout.with_train", "nn.functional.feature_alpha_dropout.without_train",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "randn", "randint",
    "nn.functional.multi_head_attention_forward",
)  # fmt: skip

# Terms of a sum give its value up to rounding: these compare exactly, and near a pole rounding grows.
EXACT = ("searchsorted", "eq", "ne", "tan")

# torch reads the memory of a 1-d tensor of indices, and a wrapper has none: it is given as a plain tensor of the CPU.
PLAIN_INDICES = ("tensor_split",)

# Memory as it was: ranks may find another answer to "is it the same twice?" and part ways.
UNSET = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_permuted", "empty_strided")

# Their samples hold sparse tensors, and a DTensor is strided.
SPARSE = ("sparse.sampled_addmm", "sparse.mm.reduce")

OPS = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def sweep_names():
    """The ops of `op_db` that take float32."""
    return [
        name
        for name, op in OPS.items()
        if torch.float32 in op.dtypes
        and name not in RANDOM + SPARSE + UNSET
        and not name.startswith("jiterator")  # compiled for GPUs only
    ]


def sweep_op(name, max_samples, grad, mesh_shape=(3,), seed=""):
    """One text a sample: "" if right, "replicated ..." if right by replication, "refused ..." where an error of ours
    says what to do instead, else what went wrong; with `grad` only samples that plain torch differentiates. None: not
    deterministic. Collective: every rank with the same arguments."""
    op = OPS[name]
    mesh = world_mesh(*mesh_shape)
    rng = random.Random(name + seed)
    torch.manual_seed(0)
    if grad and not op.supports_autograd:
        return []
    texts = []
    for number, packed in enumerate(_samples(op, rng, grad, max_samples)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = _run(op, _copy(packed, leaves=False))
                again = _run(op, _copy(packed, leaves=False))
            except Exception:  # a sample that plain torch refuses on this machine
                continue
            if not _same(expected, again):
                return None
            gradients = _gradients(op, _copy(packed)) if grad and not _has_nan(packed) else None
        if not grad or gradients is not None:
            texts.append(_check_sample(op, packed, expected, gradients, mesh, rng, number))
    return texts


def ops_that_keep_shards(name, max_samples, mesh_shape=(3,), seed=""):
    """The aten ops of some samples that ran on sharded or pending inputs, at least once, without making all of them
    whole first: by a line of a rule, or by steps of their own. Sorted. Collective, as `sweep_op`."""
    op, mesh, rng = OPS[name], world_mesh(*mesh_shape), random.Random(name + seed)
    shape = Layout.replicated(mesh).mesh
    torch.manual_seed(0)
    kept = set()
    for packed in _samples(op, rng, False, max_samples):

        def lay(tensor):
            if op.name in PLAIN_INDICES and not tensor.is_floating_point():
                return tensor.cpu()
            return distribute(tensor, mesh, random_layout(rng, shape, tensor.ndim, ()), 0)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                first, args, kwargs = map_tensors(lay, _copy(packed))
                told = explain(op, first, *args, **kwargs)
            except Exception:  # refused, or no sample of plain torch
                continue
        for ran in told.ops:
            given = [i for i, x in enumerate(ran.inputs) if not x.layout.is_replicated]
            whole = {m.input for m in ran.redistributions if m.plan.dst.is_replicated}
            if given and not ran.how.startswith("no rule") and not whole >= set(given):
                kept.add(ran.name.removeprefix("aten."))
    return sorted(kept)


def _samples(op, rng, grad, max_samples):
    """Arguments of some samples, in a random order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=grad))
    samples = [s for s in samples if not s.kwargs.get("dropout_p")]
    rng.shuffle(samples)
    return [(s.input, s.args, dict(s.kwargs)) for s in samples[:max_samples]]


def _check_sample(op, packed, expected, gradients, mesh, rng, seed):
    shape = Layout.replicated(mesh).mesh
    layouts = []

    def lay(tensor):
        if op.name in PLAIN_INDICES and not tensor.is_floating_point():
            return tensor.cpu()
        adds = tensor.is_floating_point() or tensor.is_complex()
        pending = ("sum",) if adds and op.name not in EXACT else ()
        layouts.append(random_layout(rng, shape, tensor.ndim, pending))
        part = distribute(tensor, mesh, layouts[-1], seed)
        return part.requires_grad_() if tensor.requires_grad and gradients else part

    parts = map_tensors(lay, _copy(packed))
    label = f"{[str(y) for y in layouts]}"
    dispatch.warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results = _run(op, parts)
            wholes = [_whole(r) for r in results]
            if gradients:
                text = _check_gradients(gradients, parts, results)
                if text:
                    return f"wrong: {label}: {text}"
        except LongmeshError as error:
            return f"refused: {label}: {str(error)[:300]}"
        except Exception as error:
            return f"error: {label}: {type(error).__name__}: {str(error)[:300]}"
    if not _same(wholes, expected):
        return (
            f"wrong: {label}: {[tuple(t.shape) for t in wholes]} against {[tuple(t.shape) for t in expected]}"
        )
    replicated = [str(w.message).split(" has no")[0] for w in caught if "no sharding rule" in str(w.message)]
    return f"replicated {', '.join(replicated)}" if replicated else ""


def _whole(result):
    """A result as a plain CPU tensor, or the number that it is."""
    if isinstance(result, DTensor):
        result = result.detach().full_tensor()
    return result.cpu() if isinstance(result, torch.Tensor) else result


def _gradients(op, packed):
    """Which results plain torch differentiates, and the gradients of the inputs; None where it does not."""
    wanted = []
    map_tensors(lambda t: wanted.append(t) if t.requires_grad else None, packed)
    try:
        results = _run(op, packed)
        usable = [i for i, t in enumerate(results) if isinstance(t, torch.Tensor) and t.requires_grad]
        found = torch.autograd.grad([_total(results[i]) for i in usable], wanted, allow_unused=True)
    except Exception:  # not differentiable in these arguments
        return None
    return (usable, found) if any(g is not None for g in found) else None


def _check_gradients(gradients, parts, results):
    usable, want = gradients
    given = []
    map_tensors(lambda t: given.append(t) if t.requires_grad else None, parts)
    got = torch.autograd.grad([_total(results[i]) for i in usable], given, allow_unused=True)
    for number, (w, g) in enumerate(zip(want, got, strict=True)):
        if w is None or g is None:
            if (w is None) != (g is None) and bool((w if g is None else g.full_tensor()).any()):
                return f"gradient {number} is missing"
            continue
        whole = _whole(g)
        if not _close(whole, w):
            return f"gradient {number} differs by {(whole - w).abs().nan_to_num(9e9).max():.3g}"
    return None


def _has_nan(packed):
    """At NaN a gradient is not defined: torch's formulas for plain tensors and for subclasses differ there."""
    found = []
    map_tensors(lambda t: found.append(bool(t.isnan().any())), packed)
    return any(found)


def _total(tensor):
    weights = torch.linspace(0.5, 1.5, max(tensor.numel(), 1))[: tensor.numel()].view(tensor.shape)
    if isinstance(tensor, DTensor):
        whole = Layout.replicated(tensor._mesh)
        weights = DTensor(weights.to(tensor.device), tensor._mesh, whole, weights.shape, weights.stride())
    product = tensor * weights.to(tensor.device)
    return product.abs().sum() if product.is_complex() else product.sum()


def _run(op, packed):
    first, args, kwargs = packed
    found = []
    map_tensors(found.append, op(first, *args, **kwargs))
    return found


def _copy(packed, leaves=True):
    return map_tensors(lambda t: t.detach().clone().requires_grad_(leaves and t.requires_grad), packed)


def _same(results, expected):
    return len(results) == len(expected) and all(_close(r, e) for r, e in zip(results, expected, strict=True))


def _close(result, expected):
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.layout is not torch.strided or expected.layout is not torch.strided:
        result, expected = result.to_dense(), expected.to_dense()
    return torch.allclose(result.detach(), expected.detach(), rtol=1e-3, atol=1e-3, equal_nan=True)
