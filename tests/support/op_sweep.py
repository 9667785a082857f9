"""Any op of torch's `op_db` on DTensors against plain torch: several samples, every tensor argument in a random layout.

Import it before the pool of ranks is made: the ranks are forked and then have `op_db` without importing it again.
"""

import random
import warnings

import torch
from torch.testing._internal.common_methods_invocations import op_db

from longmesh import DTensor, Layout
from longmesh.tensor.dispatch import dispatch
from longmesh.tensor.tree import map_tensors
from longmesh.testing import cpu_mesh
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

# Terms of a sum give its value up to rounding, and a search compares exactly.
EXACT = ("searchsorted",)

# Their samples hold sparse tensors, and a DTensor is strided.
# Memory as it was: ranks may find another answer to "is it the same twice?" and part ways.
UNSET = ("empty", "empty_like", "new_empty", "new_empty_strided", "empty_permuted", "empty_strided")

SPARSE = ("sparse.sampled_addmm", "sparse.mm.reduce")

OPS = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def sweep_names():
    """The ops of `op_db` that take float32."""
    return [
        name for name, op in OPS.items() if torch.float32 in op.dtypes and name not in RANDOM + SPARSE + UNSET
    ]


def sweep_op(name, max_samples, grad, mesh_shape=(3,)):
    """One text a sample: "" if right, "replicated ..." if right by replication, else what went wrong. None: not
    deterministic. Collective: every rank with the same arguments."""
    op = OPS[name]
    mesh = cpu_mesh(*mesh_shape)
    rng = random.Random(name)
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))
    samples = [s for s in samples if not s.kwargs.get("dropout_p")]
    rng.shuffle(samples)
    texts = []
    for number, sample in enumerate(samples[:max_samples]):
        packed = (sample.input, sample.args, dict(sample.kwargs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                expected = _run(op, _copy(packed))
                again = _run(op, _copy(packed))
            except Exception:  # a sample that plain torch refuses on this machine
                continue
        if not _same(expected, again):
            return None
        text = _check_sample(op, packed, expected, mesh, rng, grad and op.supports_autograd, number)
        texts.append(text)
    return texts


def _check_sample(op, packed, expected, mesh, rng, grad, seed):
    shape = Layout.replicated(mesh).mesh
    layouts = []

    def lay(tensor):
        adds = tensor.is_floating_point() or tensor.is_complex()
        pending = ("sum",) if adds and op.name not in EXACT else ()
        layouts.append(random_layout(rng, shape, tensor.ndim, pending))
        part = distribute(tensor, mesh, layouts[-1], seed)
        return part.requires_grad_() if grad and adds else part

    parts = map_tensors(lay, _copy(packed))
    label = f"{[str(y) for y in layouts]}"
    dispatch.warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            results = _run(op, parts)
            wholes = [r.detach().full_tensor() if isinstance(r, DTensor) else r for r in results]
            if grad:
                text = _check_gradients(op, packed, parts, results)
                if text:
                    return f"wrong: {label}: {text}"
        except Exception as error:
            return f"error: {label}: {type(error).__name__}: {str(error)[:300]}"
    if not _same(wholes, expected):
        return (
            f"wrong: {label}: {[tuple(t.shape) for t in wholes]} against {[tuple(t.shape) for t in expected]}"
        )
    replicated = [str(w.message).split(" has no")[0] for w in caught if "no sharding rule" in str(w.message)]
    return f"replicated {', '.join(replicated)}" if replicated else ""


def _check_gradients(op, packed, parts, results):
    plain = map_tensors(
        lambda t: t.requires_grad_() if t.is_floating_point() or t.is_complex() else t, _copy(packed)
    )
    expected = _run(op, plain)
    usable = [i for i, t in enumerate(expected) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not usable:
        return None
    wanted, given = [], []
    map_tensors(lambda t: wanted.append(t) if t.requires_grad else None, plain)
    map_tensors(lambda t: given.append(t) if t.requires_grad else None, parts)
    want = torch.autograd.grad([_total(expected[i]) for i in usable], wanted, allow_unused=True)
    got = torch.autograd.grad([_total(results[i]) for i in usable], given, allow_unused=True)
    for number, (w, g) in enumerate(zip(want, got, strict=True)):
        if w is None or g is None:
            if (w is None) != (g is None) and bool((w if g is None else g.full_tensor()).any()):
                return f"gradient {number} is missing"
            continue
        whole = g.full_tensor() if isinstance(g, DTensor) else g
        if not _close(whole, w):
            return f"gradient {number} differs by {(whole - w).abs().nan_to_num(9e9).max():.3g}"
    return None


def _total(tensor):
    weights = torch.linspace(0.5, 1.5, max(tensor.numel(), 1))[: tensor.numel()].view(tensor.shape)
    if isinstance(tensor, DTensor):
        whole = Layout.replicated(tensor._mesh)
        weights = DTensor(weights, tensor._mesh, whole, weights.shape, weights.stride())
    product = tensor * weights
    return product.abs().sum() if product.is_complex() else product.sum()


def _run(op, packed):
    first, args, kwargs = packed
    found = []
    map_tensors(found.append, op(first, *args, **kwargs))
    return found


def _copy(packed):
    return map_tensors(lambda t: t.detach().clone(), packed)


def _same(results, expected):
    return len(results) == len(expected) and all(_close(r, e) for r, e in zip(results, expected, strict=True))


def _close(result, expected):
    if result.shape != expected.shape or result.dtype != expected.dtype:
        return False
    if result.layout is not torch.strided or expected.layout is not torch.strided:
        result, expected = result.to_dense(), expected.to_dense()
    return torch.allclose(result.detach(), expected.detach(), rtol=1e-3, atol=1e-3, equal_nan=True)
