"""The aten calls behind torch's own samples of an op, forward and backward, for checking rules in one process."""

import multiprocessing
import warnings

import torch

from longmesh.rules.op_facts import functional_form
from longmesh.rules.tree import all_tensors
from support.op_sweep import OPS
from support.rule_check import calls_of, check_calls, describe


def sample_calls(name, num_samples, grad):
    """(func, args, kwargs) of the first samples of an op in `op_db`, each once; functional and deterministic ones."""
    op = OPS[name]
    torch.manual_seed(0)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dtype = torch.float64 if torch.float64 in op.dtypes else torch.float32  # terms of sums round less
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=grad and op.supports_autograd))
        for sample in samples[:num_samples]:
            for func, args, kwargs in calls_of(lambda s=sample: _run(op, s, grad), grad):
                func = functional_form(func) or func
                if "out" in kwargs or func._schema.is_mutable:
                    continue
                if _has_one_answer(func) and not _is_by_mask(func, args):
                    call = describe(func, args, kwargs)
                    key = (str(func), str([m.shape for m in call.tensors]), str(call.args), str(call.kwargs))
                    found.setdefault(key, (func, args, kwargs))
    return list(found.values())


def _has_one_answer(func):
    return torch.Tag.nondeterministic_seeded not in func.tags and "empty" not in func._schema.name


def _is_by_mask(func, args):
    """A mask is turned into positions before its rule is asked."""
    by_position = func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)
    return by_position and any(t.dtype is torch.bool for t in all_tensors(args[1]))


def _run(op, sample, grad):
    try:
        result = op(sample.input, *sample.args, **sample.kwargs)
        outputs = [t for t in all_tensors(result) if t.requires_grad]
        if grad and outputs:
            torch.autograd.backward(outputs, [torch.randn_like(t) for t in outputs])
    except (
        RuntimeError,
        NotImplementedError,
    ):  # a sample that plain torch refuses: its calls so far are kept
        pass


def check_op(name, num_samples, grad, ranks):
    """All lines of all rules that an op's samples meet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check_calls(sample_calls(name, num_samples, grad), ranks)


def in_own_process(fn, *args):
    """Run `fn(*args)` in a forked process; its exit code. Some kernels end theirs when a part has no elements."""
    process = multiprocessing.get_context("fork").Process(target=fn, args=args)
    process.start()
    process.join()
    return process.exitcode
