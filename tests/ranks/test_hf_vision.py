"""Vision-language models: positions in three dimensions, masks by token types, images, embeddings instead of ids."""

import pytest
import torch

from longmesh import hf
from longmesh.testing import cpu_mesh

LENGTH = 37
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TOWER = {"depth": 1, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def make_model(kind: str, implementation: str):
    import transformers as t

    window = {"head_dim": 8, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
    sections = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    small = {"image_size": 16, "patch_size": 8}
    make = {
        "gemma3": lambda: t.Gemma3ForConditionalGeneration(
            t.Gemma3Config(
                text_config={**TEXT, **window},
                vision_config={**VISION, **small, "model_type": "siglip_vision_model"},
                image_token_index=60,
                mm_tokens_per_image=4,
            )
        ),
        "paligemma": lambda: t.PaliGemmaForConditionalGeneration(
            t.PaliGemmaConfig(
                text_config={**TEXT, "head_dim": 8, "model_type": "gemma"},
                vision_config={**VISION, **small, "model_type": "siglip_vision_model", "projection_dim": 32},
                image_token_index=60,
                projection_dim=32,
            )
        ),
        "qwen2_vl": lambda: t.Qwen2VLForConditionalGeneration(
            t.Qwen2VLConfig(
                text_config={**TEXT, "rope_parameters": sections},
                vision_config={**TOWER, "embed_dim": 16, "hidden_size": 32},
                image_token_id=60,
                video_token_id=59,
                vision_start_token_id=58,
            )
        ),
        "qwen3_vl": lambda: t.Qwen3VLForConditionalGeneration(
            t.Qwen3VLConfig(
                text_config={**TEXT, "head_dim": 8, "rope_parameters": sections},
                vision_config={
                    **TOWER,
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "out_hidden_size": 32,
                    "deepstack_visual_indexes": [0],
                    "num_position_embeddings": 16,
                },
                image_token_id=60,
                video_token_id=59,
                vision_start_token_id=58,
            )
        ),
    }[kind]
    torch.manual_seed(0)
    model = make()
    model.set_attn_implementation(implementation)
    return model


def make_batch(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 57, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    types = torch.zeros(2, LENGTH, dtype=torch.long)
    if kind == "gemma3":
        types[0, 5:11] = types[0, 20:24] = types[1, 2:9] = 1
    if kind == "paligemma":
        types[0, 12:] = types[1, 20:] = 1  # the rest is the prompt
        labels[types == 0] = -100
    batch = {"input_ids": ids, "labels": labels}
    if kind.startswith("qwen"):
        time = torch.arange(LENGTH)
        image = (time >= 5) & (time < 14)
        at = torch.where(image, 5, torch.where(time < 5, time, time - 6))
        height = torch.where(image, 5 + (time - 5) // 3, at)
        width = torch.where(image, 5 + (time - 5) % 3, at)
        batch["position_ids"] = torch.stack([at, height, width])[:, None].expand(3, 2, -1).contiguous()
    else:
        batch["token_type_ids"] = types
    return batch


def with_images(kind: str, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Two images in the first row, one in the second, each of a few tokens; Qwen makes positions of them by itself."""
    batch = {name: value for name, value in batch.items() if name != "position_ids"}
    each = 6 if kind.startswith("qwen") else 4
    places = [(0, 7), (0, 17), (1, 16)]  # the cuts go through them
    types = torch.zeros(2, LENGTH, dtype=torch.long)
    for row, start in places:
        batch["input_ids"][row, start : start + each] = 60
        batch["labels"][row, start : start + each] = -100
        types[row, start : start + each] = 1
    generator = torch.Generator().manual_seed(2)
    if each == 6:
        batch["pixel_values"] = torch.randn(3 * 24, 96, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 6]] * 3)
        batch["mm_token_type_ids"] = types
    else:
        batch["pixel_values"] = torch.randn(3, 3, 16, 16, generator=generator)
        if kind == "gemma3":
            batch["token_type_ids"] = types
    if kind != "paligemma":  # which makes the tokens of padding a part of its prompt
        batch["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        batch["attention_mask"][1, -3:] = 0
        batch["labels"][1, -3:] = -100
    return batch


def embedded(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Embeddings instead of ids, whose gradients go to the table."""
    rest = {name: value for name, value in batch.items() if name != "input_ids"}
    return {**rest, "inputs_embeds": model.get_input_embeddings()(batch["input_ids"])}


def compare(ranks: int, kind: str, how: str) -> list[float]:
    hf.register()
    batch = make_batch(kind)
    if how == "images":
        batch = with_images(kind, batch)
    plain, model = make_model(kind, "eager"), make_model(kind, "longmesh")
    expected = plain(**(embedded(plain, batch) if how == "embeds" else batch), use_cache=False).loss
    expected.backward()
    with hf.context_parallel(cpu_mesh(ranks), embedded(model, batch) if how == "embeds" else batch) as part:
        loss = model(**part, use_cache=False).loss
        loss.backward()
    total = loss.detach().clone()
    torch.distributed.all_reduce(total)
    worst = 0.0
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.distributed.all_reduce(ours.grad)
            scale = theirs.grad.abs().max().clamp(min=1e-6)
            worst = max(worst, float((ours.grad - theirs.grad).abs().max() / scale))
    return [abs(float(total - expected.detach())), worst]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("how", ["ids", "embeds", "images"])
@pytest.mark.parametrize("kind", ["gemma3", "paligemma", "qwen2_vl", "qwen3_vl"])
def test_loss_and_gradients_are_those_of_one_process(pool, kind, how, ranks):
    for loss, gradients in pool.run(compare, ranks, kind, how, ranks=ranks, timeout=300.0):
        assert loss < 1e-5
        assert gradients < 1e-3
