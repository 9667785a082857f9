"""The model that was named, or a tiny random one over bytes, and the tokens of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longmesh.errors import LongmeshError

_TINY = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1 << 24,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class Bytes:
    """The tokenizer of the tiny model: a token is a byte. What random weights say is shown as numbers."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(f"{int(i)} " for i in ids)


def load_model(told: dict[str, Any], implementation: str) -> tuple[Any, Any]:
    """The model and its tokenizer, the same on every rank."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    dtype = None if told["dtype"] is None else getattr(torch, told["dtype"])
    torch.manual_seed(told["seed"])
    if told["model"] is None:
        config = LlamaConfig(**_TINY, dtype=dtype or torch.float32)
        return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval(), Bytes()
    try:
        tokenizer = AutoTokenizer.from_pretrained(told["model"]) if told["prompt"] is not None else Bytes()
        model = AutoModelForCausalLM.from_pretrained(
            told["model"], attn_implementation=implementation, dtype=dtype or "auto"
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise LongmeshError(
            f"--model {told['model']}: {reason}; give a folder or a name that transformers can load, or leave it out"
        ) from error
    return model.eval(), tokenizer


def read_prompt(told: dict[str, Any], model: Any, tokenizer: Any) -> Tensor:
    """(1, tokens), the same on every rank."""
    if told["prompt"] is None:
        vocabulary = model.config.get_text_config().vocab_size
        draw = torch.Generator().manual_seed(told["seed"])
        return torch.randint(0, vocabulary, (1, told["random_tokens"]), generator=draw)
    ids = tokenizer.encode(Path(told["prompt"]).read_text(encoding="utf-8"))
    if not ids:
        raise LongmeshError(f"--prompt {told['prompt']}: it has no tokens; give a longer text")
    return torch.tensor([ids])
