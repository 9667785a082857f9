"""A tiny random transformer of diffusers over latents that are cut: outputs and gradients are those of one process."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import longmesh.diffusers
from longmesh.errors import LongmeshError
from longmesh.testing.mesh import cpu_mesh

pytest.importorskip("diffusers", reason="the extra diffusers is not installed")

from diffusers import (
    ChronoEditTransformer3DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HeliosTransformer3DModel,
    LTXVideoTransformer3DModel,
    MiniMaxH3Transformer3DModel,
    QwenImageTransformer2DModel,
    UNet2DModel,
    WanTransformer3DModel,
)


def tiny_wan(kind: type[nn.Module] = WanTransformer3DModel) -> nn.Module:
    torch.manual_seed(0)
    return kind(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=32,
    ).double()  # fmt: skip


def run(model: nn.Module, shape: tuple[int, ...], text: int) -> list[torch.Tensor]:
    """The output, and the gradients of the latents, the text and the parameters."""
    torch.manual_seed(1)
    latents = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    words = torch.randn(shape[0], text, 16, dtype=torch.float64, requires_grad=True)
    out = model(latents, torch.tensor([7] * shape[0]), words, return_dict=False)[0]
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    wanted = [latents, words, *(p for p in model.parameters() if p.requires_grad)]
    return [out.detach(), *(g for g in torch.autograd.grad(loss, wanted, allow_unused=True) if g is not None)]


def check(ranks: int, kind: type[nn.Module]) -> int:
    """Compare with the model by itself, in this process. Collective."""
    model = tiny_wan(kind)
    # Tokens: 3 * 3 * 5 = 45, 1 * 1 * 1 on several ranks, 2 * 2 * 2; texts as long as a rank's tokens among them.
    cases = [((1, 4, 3, 6, 10), 7), ((2, 4, 1, 2, 2), 5), ((1, 4, 2, 4, 4), 8 // ranks)]
    for shape, text in cases:
        want = run(model, shape, text)
        handle = longmesh.diffusers.context_parallel(model, cpu_mesh(ranks))
        got = run(model, shape, text)
        for grad in got[1:]:
            torch.distributed.all_reduce(grad)
        for a, b in zip(got, want, strict=True):
            # The model computes its norms and gates in float32, whatever its own dtype.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        handle.remove()
        assert all(torch.equal(a, b) for a, b in zip(run(model, shape, text), want, strict=True))
    return len(cases)


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, WanTransformer3DModel), (3, WanTransformer3DModel), (2, ChronoEditTransformer3DModel)],
)
def test_self_and_cross_attention_are_exact(pool, ranks, kind):
    assert pool.run(check, ranks, kind, ranks=ranks, timeout=120.0) == [3] * ranks


def run_ltx(model: nn.Module, frames: int, text: int) -> list[torch.Tensor]:
    """The output, and the gradients of the latents, the text and the parameters; the text's last word is padding."""
    torch.manual_seed(1)
    latents = torch.randn(1, frames * 3 * 5, 4, dtype=torch.float64, requires_grad=True)
    words = torch.randn(1, text, 16, dtype=torch.float64, requires_grad=True)
    seen = (torch.arange(text) < text - 1)[None].double()
    sizes = {"num_frames": frames, "height": 3, "width": 5}
    times = (
        torch.arange(frames * 3 * 5)[None] if frames > 1 else torch.tensor([7])
    )  # one for each token, or for all
    out = model(latents, words, times, seen, return_dict=False, **sizes)[0]
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    return [out.detach(), *torch.autograd.grad(loss, [latents, words, *model.parameters()])]


def check_ltx(ranks: int) -> int:
    """Its plan cuts the text, too, which only cross-attention reads. Collective."""
    torch.manual_seed(0)
    model = LTXVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=2, caption_channels=16,
    ).double()  # fmt: skip
    for frames, text in ((2, 7), (1, 15 // ranks)):
        want = run_ltx(model, frames, text)
        handle = longmesh.diffusers.context_parallel(model, cpu_mesh(ranks))
        got = run_ltx(model, frames, text)
        handle.remove()
        for grad in got[1:]:
            torch.distributed.all_reduce(grad)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_text_that_only_cross_attention_reads_stays_whole(pool, ranks):
    assert pool.run(check_ltx, ranks, ranks=ranks, timeout=120.0) == [ranks] * ranks


def run_packed(model: nn.Module, text: int) -> list[torch.Tensor]:
    """MiniMax-H3 packs text, audio and video into one sequence, and refines the text before that."""
    video, audio = 5, 3
    torch.manual_seed(1)
    length = video + audio + text
    order = torch.randperm(length)
    given = [torch.randn(1, n, dim, dtype=torch.float64) for n, dim in ((video, 4), (audio, 4), (text, 16))]
    outs = model(
        *given, torch.rand(2), torch.arange(length) % 2, torch.arange(length) % 3, torch.rand(length, 3),
        *order.split([video, audio, text]), return_dict=False,
    )  # fmt: skip
    loss = sum((out * torch.randn(out.shape, dtype=out.dtype)).sum() for out in outs)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [*(out.detach() for out in outs), *torch.autograd.grad(loss, wanted)]


def check_packed(ranks: int) -> int:
    torch.manual_seed(0)
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=2, attention_head_dim=16, hidden_size=16, num_layers=2, num_refiner_layers=1, ffn_dim=16,
        in_channels=1, audio_in_channels=4, text_dim=16, freq_dim=16, time_embed_hidden_dim=16, time_embed_dim=16,
        rope_freq_dim=2,
    ).double()  # fmt: skip
    texts = (8, 4, 1)  # of 8 on 2 ranks, and of 4 on 3, each rank has as many tokens as the text
    for text in texts:
        want = run_packed(model, text)
        handle = longmesh.diffusers.context_parallel(model, cpu_mesh(ranks))
        got = run_packed(model, text)
        for grad in got[2:]:
            torch.distributed.all_reduce(grad)
        # What is before the cut runs on every rank alike, and its gradients reach all of them.
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # some of the model is float32
        handle.remove()
    return len(texts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_before_the_cut_is_over_its_own_tokens(pool, ranks):
    assert pool.run(check_packed, ranks, ranks=ranks, timeout=120.0) == [3] * ranks


def tiny_flux(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {
        "patch_size": 1,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 1,
        "attention_head_dim": 8,
    }
    sizes |= {"num_attention_heads": 2, "joint_attention_dim": 16}
    if kind == "flux":
        return FluxTransformer2DModel(**sizes, pooled_projection_dim=8, axes_dims_rope=(2, 2, 4)).double()
    return Flux2Transformer2DModel(
        **sizes, axes_dims_rope=(2, 2, 2, 2), timestep_guidance_channels=16
    ).double()


def run_joint(kind: str, model: nn.Module, latents: int, text: int) -> list[torch.Tensor]:
    """The output, and the gradients of the latents, the text and the parameters."""
    torch.manual_seed(1)
    x = torch.randn(1, latents, 4, dtype=torch.float64, requires_grad=True)
    words = torch.randn(1, text, 16, dtype=torch.float64, requires_grad=True)
    axes = 3 if kind == "flux" else 4
    given = {
        "img_ids": torch.arange(latents * axes).view(latents, axes).double() % 7,
        "txt_ids": torch.zeros(text, axes, dtype=torch.float64),
        "timestep": torch.tensor([0.5], dtype=torch.float64),
    }
    if kind == "flux2":
        given |= {name: given[name][None] for name in ("img_ids", "txt_ids")}
    if kind == "flux":
        given["pooled_projections"] = torch.randn(1, 8, dtype=torch.float64)
    else:
        given["guidance"] = torch.tensor([2.0], dtype=torch.float64)
    out = model(hidden_states=x, encoder_hidden_states=words, return_dict=False, **given)[0]
    loss = (out * torch.randn(out.shape, dtype=out.dtype)).sum()
    wanted = [x, words, *(p for p in model.parameters() if p.requires_grad)]
    return [out.detach(), *(g for g in torch.autograd.grad(loss, wanted, allow_unused=True) if g is not None)]


def check_joint(ranks: int, kind: str) -> int:
    model = tiny_flux(kind)
    cases = [(13, 7), (6, 6), (5, 1), (1, 4)]  # a text, or latents, of fewer tokens than ranks
    for latents, text in cases:
        want = run_joint(kind, model, latents, text)
        handle = longmesh.diffusers.context_parallel(model, cpu_mesh(ranks))
        got = run_joint(kind, model, latents, text)
        for grad in got[1:]:
            torch.distributed.all_reduce(grad)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # some of the model is float32
        with pytest.raises(
            LongmeshError, match=r"img_ids of .* has 4 dims; its plan of context parallelism cuts it"
        ):
            model(
                torch.zeros(1, 3, 4),
                torch.zeros(1, 2, 16),
                img_ids=torch.zeros(1, 1, 3, 4),
                return_dict=False,
            )
        handle.remove()
    return len(cases)


@pytest.mark.parametrize("kind", ["flux", "flux2"])
def test_joint_attention_of_text_and_latents_is_exact(pool, kind):
    for ranks in (2, 3):
        assert pool.run(check_joint, ranks, kind, ranks=ranks, timeout=120.0) == [4] * ranks


def refuse() -> list[str]:
    qwen = QwenImageTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=8,
        axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    unet = UNet2DModel(
        sample_size=8, block_out_channels=(8,), down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
        norm_num_groups=4,
    )  # fmt: skip
    helios = HeliosTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=1, rope_dim=(4, 4, 4),
    )  # fmt: skip
    said = []
    for model in (qwen, unet, helios, nn.Linear(2, 2)):
        try:
            longmesh.diffusers.context_parallel(model, cpu_mesh(2))
        except LongmeshError as error:
            said.append(str(error))
    return said


def test_what_is_not_supported_is_refused_by_name(pool):
    for joint, planless, often, no_model in pool.run(refuse, ranks=2, timeout=60.0):
        assert "QwenImageTransformer2DModel cuts its text and its latents, and gives more than both" in joint
        assert "UNet2DModel does not say where its sequence can be cut" in planless
        assert "HeliosTransformer3DModel gathers its latents again inside each of its layers" in often
        assert "Linear is neither a transformer of diffusers nor a pipeline that has one" in no_model


def refuse_in_a_forward() -> list[str]:
    """What a forward meets: a mask of self-attention, and a second sequence of another length."""
    model, said = tiny_wan(), []
    latents, words = (
        torch.randn(1, 4, 1, 4, 4, dtype=torch.float64),
        torch.randn(1, 3, 16, dtype=torch.float64),
    )

    def give_a_mask(_module, args):  # hidden states, those of the text, the mask, ...
        return (*args[:2], torch.zeros(4, 4, dtype=torch.float64), *args[3:])

    def lengthen(_module, _args, output):
        return tuple(torch.cat([t, t], 1) for t in output)

    attention = model.blocks[0].attn1
    for add in (
        lambda: attention.register_forward_pre_hook(give_a_mask),
        lambda: model.rope.register_forward_hook(lengthen),
    ):
        added = add()
        handle = longmesh.diffusers.context_parallel(model, cpu_mesh(2))
        try:
            model(latents, torch.tensor([7]), words)
        except LongmeshError as error:
            said.append(str(error))
        handle.remove()
        added.remove()
    return said


def test_a_forward_that_is_not_supported_says_so(pool):
    for mask, two_lengths in pool.run(refuse_in_a_forward, ranks=2, timeout=60.0):
        assert "WanTransformer3DModel gives its self-attention a mask; leave the mask out" in mask
        assert "WanTransformer3DModel cuts sequences of" in two_lengths
        assert "tokens in one forward; models whose latents are one sequence are supported" in two_lengths


class Products:
    """A processor of one's own, whose attention torch does not see as such."""

    def __call__(self, attn, hidden_states, *_, **__):
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        return (q @ k.mT).softmax(-1) @ v


def refuse_silent_errors() -> list[str]:
    """What would be silently wrong, or told by a shape: other attention, rows of a ControlNet, a second call."""
    wan, flux, said = tiny_wan(), tiny_flux("flux"), []
    latents, words = (
        torch.randn(1, 4, 1, 4, 4, dtype=torch.float64),
        torch.randn(1, 3, 16, dtype=torch.float64),
    )
    wan.blocks[1].attn1.set_processor(Products())
    for model in (wan, flux):
        longmesh.diffusers.context_parallel(model, cpu_mesh(2))
    for call in (
        lambda: wan(latents, torch.tensor([7]), words),
        lambda: flux(words[..., :4], controlnet_block_samples=[words]),
        lambda: longmesh.diffusers.context_parallel(wan, cpu_mesh(2)),
    ):
        try:
            call()
        except LongmeshError as error:
            said.append(str(error))
    return said


def test_attention_that_is_not_seen_is_refused(pool):
    for processor, rows, twice in pool.run(refuse_silent_errors, ranks=2, timeout=60.0):
        assert (
            "the processor Products of WanTransformer3DModel did not call F.scaled_dot_product_att"
            in processor
        )
        assert (
            "FluxTransformer2DModel was given controlnet_block_samples, which have a row for each token"
            in rows
        )
        assert "this WanTransformer3DModel runs over cut sequences already; call remove()" in twice


def test_a_missing_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(LongmeshError, match=r"pip install longmesh\[diffusers\]"):
        longmesh.diffusers.context_parallel(nn.Linear(2, 2), None)
