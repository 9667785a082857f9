"""The scope of context parallelism on real ranks: cut buffers, exact attention, restored buffers, refusals."""

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from longmesh import flex_attention
from longmesh.attention import masks
from longmesh.errors import LongmeshError
from longmesh.experimental import (
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    disable_context_parallel,
    enable_context_parallel,
    set_rotate_method,
)
from longmesh.testing import cpu_mesh

AS_OP = torch.ops.aten.scaled_dot_product_attention

# Written for torch's own module; only the import is another.
PROGRAM = """
import torch
import torch.nn.functional as F
from {module} import context_parallel
from {unshard_module} import context_parallel_unshard, set_rotate_method

def run(mesh, qkv, rotate):
    set_rotate_method(rotate)
    cp_qkv = [t.detach().clone() for t in qkv]
    with context_parallel(mesh, buffers=cp_qkv, buffer_seq_dims=[2, 2, 2]):
        for t in cp_qkv:
            t.requires_grad = True
        out = F.scaled_dot_product_attention(*cp_qkv, is_causal=True)
        out.sum().backward()
        grads = [t.grad for t in cp_qkv]
        for t in cp_qkv:
            t.requires_grad = False
        whole = context_parallel_unshard(mesh, [out, *grads], [2, 2, 2, 2])
    assert all(torch.equal(a, b) for a, b in zip(cp_qkv, qkv))
    return whole
"""


def tensors(length: int, *, heads: int = 4, kv_heads: int = 4, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, length, 8, generator=generator) for h in (heads, kv_heads, kv_heads)]


def reference(qkv: list[torch.Tensor], **options) -> list[torch.Tensor]:
    """Output and gradients of one process, in double precision."""
    wide = [t.double().requires_grad_() for t in qkv]
    out = F.scaled_dot_product_attention(*wide, **options)
    out.sum().backward()
    return [t.detach().float() for t in (out, *(w.grad for w in wide))]


def attend_in_scope(mesh: DeviceMesh, qkv: list[torch.Tensor], options: dict, scope: dict):
    parts = [t.clone() for t in qkv]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2], **scope):
        local = [p.clone().requires_grad_() for p in parts]
        out = F.scaled_dot_product_attention(*local, **options)
        out.sum().backward()
        found = context_parallel_unshard(mesh, [out.detach(), *(p.grad for p in local)], [2] * 4)
    assert all(torch.equal(a, b) for a, b in zip(parts, qkv, strict=True))
    return found


def run_program(ranks: int, length: int) -> float:
    names = {"module": "longmesh.experimental", "unshard_module": "longmesh.experimental"}
    scope: dict = {}
    exec(PROGRAM.format(**names), scope)
    qkv = tensors(length)
    worst = 0.0
    for rotate in ("allgather", "alltoall"):
        # In a context of its own: the rotate method is a setting that stays.
        found = contextvars.copy_context().run(scope["run"], cpu_mesh(ranks), qkv, rotate)
        expected = reference(qkv, is_causal=True)
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)))
    return worst


@pytest.mark.parametrize(("ranks", "length"), [(1, 9), (2, 16), (3, 17), (4, 3)])
def test_a_program_for_torch_runs_with_another_import(pool, ranks, length):
    assert max(pool.run(run_program, ranks, length, ranks=ranks)) < 2e-5


def run_options(ranks: int) -> list[str]:
    length, wrong = 17, []
    mesh = cpu_mesh(ranks)
    positions = torch.arange(length)
    band = (positions[:, None] >= positions) & (positions[:, None] - positions < 5)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 9, 3]))
    same = (document[:, None] == document) & (positions[:, None] >= positions)
    cases = {
        "full": ({}, {}, {}),
        "scale": ({"scale": 0.3, "is_causal": True}, {}, {"scale": 0.3, "is_causal": True}),
        "bool mask": ({"attn_mask": band}, {}, {"attn_mask": band}),
        "bias": ({"attn_mask": -(positions[:, None] - positions).abs() / 7}, {}, None),
        "scope mask": ({}, {"mask": masks.documents([5, 9, 3])}, {"attn_mask": same}),
        "both": ({"is_causal": True}, {"mask": masks.sliding_window(4)}, {"attn_mask": band}),
        "solve": ({}, {"mask": masks.documents([5, 9, 3]), "layout": "solve"}, {"attn_mask": same}),
        "sparse": ({"attn_mask": None, "is_causal": True}, {"exchange": "sparse"}, {"is_causal": True}),
        "gqa": ({"enable_gqa": True, "is_causal": True}, {}, {"enable_gqa": True, "is_causal": True}),
    }
    for name, (options, scope, expected) in cases.items():
        qkv = tensors(length, kv_heads=2 if name == "gqa" else 4)
        expected = (
            {k: v.double() if name == "bias" else v for k, v in options.items()}
            if expected is None
            else expected
        )
        found = attend_in_scope(mesh, qkv, options, scope)
        for a, b in zip(found, reference(qkv, **expected), strict=True):
            if not torch.allclose(a, b, atol=2e-5):
                wrong.append(f"{name}: {(a - b).abs().max().item()}")
    return wrong


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_argument_of_attention_is_honoured(pool, ranks):
    assert pool.run(run_options, ranks, ranks=ranks) == [[]] * ranks


def run_shapes(ranks: int) -> float:
    mesh = cpu_mesh(ranks)
    worst = 0.0
    for shape in ((13, 8), (3, 13, 8), (2, 2, 3, 13, 8)):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        part = whole.clone()
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[-2]):
            made = [
                attend(part, part, part, is_causal=True) for attend in (F.scaled_dot_product_attention, AS_OP)
            ]
            found = context_parallel_unshard(mesh, made, [part.ndim - 2] * 2)
        expected = F.scaled_dot_product_attention(whole, whole, whole, is_causal=True)
        worst = max(worst, *((one - expected).abs().max().item() for one in found))
    return worst


def test_tensors_of_two_three_and_five_dims_also_by_the_op(pool):
    assert max(pool.run(run_shapes, 3, ranks=3)) < 1e-5


def run_shared(ranks: int):
    mesh = cpu_mesh(ranks)
    batch = torch.arange(2 * 12).reshape(2, 12)
    inputs, labels = batch[:, :-1], batch[:, 1:]
    before = batch.clone()
    seen: tuple = ()

    def raise_inside() -> None:
        nonlocal seen
        buffers = {"buffers": [inputs, labels], "buffer_seq_dims": [1, 1], "no_restore_buffers": {labels}}
        with context_parallel(mesh, **buffers) as cp:
            mine = before[:, :-1][:, cp.positions]
            seen = (inputs + 1).equal(labels), inputs.equal(mine), tuple(inputs.shape)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        raise_inside()
    return *seen, torch.equal(batch, before), inputs.equal(before[:, :-1]), labels.shape[1] == seen[2][1]


def test_buffers_that_share_memory_are_cut_right_and_restored_after_an_exception(pool):
    for rank, found in enumerate(pool.run(run_shared, 3, ranks=3)):
        assert found == (True, True, (2, [4, 4, 3][rank]), True, True, True)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(16, 48)
        self.back = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.back(out.transpose(1, 2).flatten(2))


def run_checkpointed(ranks: int):
    mesh = cpu_mesh(ranks)
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(2))
    plain = Block()
    plain(plain(x)).square().sum().backward()
    block, part = Block(), x.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
        hidden = checkpoint(block, part.clone().requires_grad_(), use_reentrant=False)
        checkpoint(block, hidden, use_reentrant=False).square().sum().backward()
        again = checkpoint(block, checkpoint(block, part, use_reentrant=False), use_reentrant=False)
        grads = torch.autograd.grad(again.square().sum(), list(block.parameters()))
    assert all(torch.allclose(g, p.grad) for g, p in zip(grads, block.parameters(), strict=True))
    worst = 0.0
    for ours, theirs in zip(block.parameters(), plain.parameters(), strict=True):
        torch.distributed.all_reduce(ours.grad)
        worst = max(worst, (ours.grad - theirs.grad).abs().max().item() / theirs.grad.abs().max().item())
    late, part = Block(), x.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
        loss = checkpoint(late, part.clone().requires_grad_(), use_reentrant=False).sum()
        with pytest.raises(LongmeshError, match="use_reentrant=False"):
            checkpoint(late, part.clone().requires_grad_(), use_reentrant=True)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        loss.backward()
    return worst


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_checkpoints_recompute_inside_the_scope_and_raise_after_it(pool, ranks):
    assert max(pool.run(run_checkpointed, ranks, ranks=ranks)) < 1e-5


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def run_pair(ranks: int):
    mesh = cpu_mesh(ranks)
    q, k, v = tensors(10)
    cp = enable_context_parallel(mesh, 10)
    parts = context_parallel_shard(mesh, [q, k, v], [2, 2, 2])
    inner = torch.randn(1, 1, 7, 4, generator=torch.Generator().manual_seed(3))
    part = inner.clone()
    out = F.scaled_dot_product_attention(*parts, is_causal=True)
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[2]):
        nested = F.scaled_dot_product_attention(part, part, part)
        again = F.scaled_dot_product_attention(query=parts[0], key=parts[1], value=parts[2], is_causal=True)
        flexed = flex_attention(
            *parts, block_mask=create_block_mask(causal, None, None, 10, 10, device="cpu")
        )
        (nested,) = context_parallel_unshard(mesh, [nested], [2])
    whole = cp.unshard(out, 2)
    disable_context_parallel()
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (
        torch.equal(out, again) and torch.allclose(out, flexed, atol=1e-5),
        torch.allclose(whole, plain, atol=1e-5),
        torch.allclose(nested, F.scaled_dot_product_attention(inner, inner, inner), atol=1e-5),
    )


def test_the_plain_pair_and_nested_scopes(pool):
    assert pool.run(run_pair, 2, ranks=2) == [(True, True, True)] * 2


def run_threads(ranks: int) -> list[bool]:
    """Two threads with scopes of their own over groups of their own, and one without, at the same time."""
    group = torch.distributed.new_group(list(range(ranks)))  # messages of two threads must not meet in one
    meshes = [cpu_mesh(ranks), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("other",))]
    meeting = threading.Barrier(3)

    def inside(mesh: DeviceMesh, length: int) -> bool:
        qkv = tensors(length, seed=length)
        parts = [t.clone() for t in qkv]
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2, 2, 2]):
            meeting.wait(30)
            out = F.scaled_dot_product_attention(*parts, is_causal=True)
            (whole,) = context_parallel_unshard(mesh, [out], [2])
            meeting.wait(30)
        return torch.allclose(whole, reference(qkv, is_causal=True)[0], atol=1e-5)

    def outside() -> bool:
        qkv = tensors(5)
        meeting.wait(30)
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        meeting.wait(30)
        return torch.allclose(out, reference(qkv, is_causal=True)[0], atol=1e-5)

    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(inside, mesh, n) for mesh, n in zip(meshes, (11, 8), strict=True)]
        calls.append(threads.submit(outside))
        found = [call.result() for call in calls]
    torch.distributed.destroy_process_group(group)
    return found


def test_scopes_of_threads_do_not_meet(pool):
    assert pool.run(run_threads, 2, ranks=2) == [[True] * 3] * 2


def run_layouts(ranks: int) -> list[str]:
    """What is found of a layout inside and after its scope, and the texts where it can't be."""
    mesh, x = cpu_mesh(ranks), torch.arange(11.0)
    texts: list[str] = []

    def restored(part: torch.Tensor, **options) -> None:
        try:
            (whole,) = context_parallel_unshard(mesh, [part], [0], **options)
            texts.append("right" if torch.equal(whole, x) else "wrong")
        except LongmeshError as error:
            texts.append(str(error))

    part = x.clone()
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[0], no_restore_buffers={part}):
        pass
    restored(part)  # the default is found
    for layout in ("striped", "solve"):
        part = x.clone()
        options = {"mask": masks.documents([2, 9]), "layout": layout, "no_restore_buffers": {part}}
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[0], **options) as cp:
            restored(part)
            with context_parallel(mesh, buffers=[torch.zeros(7)], buffer_seq_dims=[0]):
                restored(part)  # a scope of another length inside
        restored(part)
        restored(part, load_balancer=layout)
        texts.append("right" if torch.equal(cp.unshard(part, 0), x) else "wrong")
    return texts


def test_a_layout_is_found_or_asked_for_and_never_guessed(pool):
    asked = "there was a scope with layout"
    striped = ["right", "right", asked, "right", "right"]
    solved = ["right", "right", asked, "follows a mask", "right"]
    for texts in pool.run(run_layouts, 3, ranks=3):
        assert len(texts) == 11
        for text, part in zip(texts, ["right", *striped, *solved], strict=True):
            assert part in text


def run_dropout(ranks: int):
    mesh = cpu_mesh(ranks)
    torch.manual_seed(mesh.get_rank())
    ones = torch.ones(1, 2, 9, 9)
    part = ones.clone()
    found = []
    with context_parallel(mesh, buffers=[part], buffer_seq_dims=[2]):
        for _ in range(2):
            out = F.scaled_dot_product_attention(part, part, part, dropout_p=0.5)
            found += context_parallel_unshard(mesh, [out], [2])
    return found


def test_dropout_draws_one_seed_for_all_ranks(pool):
    alone = pool.run(run_dropout, 1, ranks=1)[0]
    for found in pool.run(run_dropout, 2, ranks=2):
        assert all(torch.allclose(a, b) for a, b in zip(found, alone, strict=True))
        assert not torch.equal(found[0], found[1])


def refusals(ranks: int) -> dict[str, str]:
    mesh, other = cpu_mesh(ranks), cpu_mesh(1, ranks)
    texts: dict[str, str] = {}

    def text(name: str, call) -> None:
        try:
            call()
        except LongmeshError as error:
            texts[name] = str(error)

    def scope(*buffers, dims=None, **options):
        return context_parallel(
            mesh, buffers=list(buffers), buffer_seq_dims=dims or [1] * len(buffers), **options
        )

    def enter(*buffers, **options) -> None:
        with scope(*buffers, **options):
            pass

    def inside(call) -> None:
        with scope(torch.zeros(2, 8)):
            call()

    def other_mesh() -> None:
        with context_parallel(other, buffers=[torch.zeros(2, 8)], buffer_seq_dims=[1]):
            pass

    uncut = torch.randn(1, 1, 8, 4)
    cut = torch.randn(1, 1, 8 // ranks, 4)
    mha = torch.nn.MultiheadAttention(4, 1)
    text("lengths", lambda: enter(torch.zeros(2, 8), torch.zeros(2, 9)))
    text("count", lambda: enter(torch.zeros(2, 8), dims=[1, 1]))
    text("dim", lambda: enter(torch.zeros(2, 8), dims=[2]))
    text("none", lambda: enter())
    text("devices", lambda: enter(torch.zeros(2, 8), torch.zeros(2, 8, device="meta")))
    text("parameter", lambda: enter(torch.nn.Parameter(torch.zeros(2, 8))))
    text("kept", lambda: enter(torch.zeros(2, 8), no_restore_buffers={torch.zeros(2, 8)}))
    text("mesh", lambda: inside(other_mesh))
    text("uncut", lambda: inside(lambda: F.scaled_dot_product_attention(uncut, uncut, uncut)))
    text("mask", lambda: inside(lambda: F.scaled_dot_product_attention(cut, cut, cut, torch.zeros(4, 4))))
    heads = torch.randn(1, 2, 8 // ranks, 4)
    text("heads", lambda: inside(lambda: F.scaled_dot_product_attention(heads, cut, cut)))
    text("mha", lambda: inside(lambda: mha(cut[0], cut[0], cut[0])))
    kernel = torch.ops.aten._flash_attention_forward
    text("kernel", lambda: inside(lambda: kernel(cut, cut, cut, None, None, 4, 4, 0.0, True, False)))
    text("rotate", lambda: set_rotate_method("ring"))
    text("close", disable_context_parallel)
    assert F.scaled_dot_product_attention(uncut, uncut, uncut).shape == uncut.shape
    return texts


def test_bad_input_is_told_with_the_fix(pool):
    expected = {
        "lengths": "disagree about the length",
        "count": "1 buffers, but 2 sequence dims",
        "dim": "has no dim 2",
        "none": "no buffers",
        "devices": "several devices: cpu, meta",
        "parameter": "requires grad",
        "kept": "not among the buffers",
        "mesh": "close the outer one first",
        "uncut": "uncut",
        "mask": "must cover the whole of it",
        "heads": "enable_gqa=True",
        "mha": "call it with need_weights=False",
        "kernel": "_flash_attention_forward inside a scope of context parallelism would attend to this rank's tokens",
        "rotate": "'allgather' and 'alltoall'",
        "close": "no scope",
    }
    for texts in pool.run(refusals, 2, ranks=2):
        assert texts.keys() == expected.keys()
        for name, part in expected.items():
            assert part in texts[name], (name, texts[name])
