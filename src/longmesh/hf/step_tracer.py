"""A tracer of a transformers configuration: traces of few tokens, and from them that of any number."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from longmesh.errors import LongmeshError
from longmesh.hf.adaptation import Adaptation
from longmesh.hf.trace_model import inspect_small, trace_hollow
from longmesh.step.trace import ModelTrace, interpolate
from longmesh.testing.device import fake_rank

CHUNK = 64
MOST_TOKENS, MOST_TILED = 16384, 2048  # that are traced: figures are linear in them
_SHARDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size",
            "shared_expert_intermediate_size", "vocab_size")  # fmt: skip


class StepTracer:
    """Traces of a configuration as `plan_traced` asks for them; each is made once. `most_tokens`: of a rank."""

    def __init__(
        self, config: Any, dtype: torch.dtype = torch.bfloat16, most_tokens: int = MOST_TOKENS
    ) -> None:
        self.config = config
        self._dtype = dtype
        self._sizes = _two_sizes(most_tokens)
        self._traced: dict[tuple[int, int, str], tuple[ModelTrace, ModelTrace]] = {}
        self._interpolated: dict[tuple[int, int, int, str], ModelTrace] = {}
        self._adaptation: Adaptation | None = None

    def __call__(self, tokens: int, cp: int, tp: int, loss: str) -> ModelTrace:
        key = tokens, self._ranks(cp), tp, loss
        if key not in self._interpolated:
            found = interpolate(*self._pair(*key[1:3], "whole"), tokens)
            if loss != "whole":  # layers are alike, whatever the loss
                found = replace(found, outside=interpolate(*self._pair(*key[1:]), tokens).outside)
            self._interpolated[key] = found
        return self._interpolated[key]

    def _ranks(self, cp: int) -> int:
        """Ranks of the traced world: recurrent layers communicate by how many there are, others only attend."""
        first = self._pair(1, 1, "whole")[0]
        return cp if first.layout == "ordered" else 1

    def _pair(self, ranks: int, tp: int, loss: str) -> tuple[ModelTrace, ModelTrace]:
        key = ranks, tp, loss
        if key not in self._traced:
            with fake_rank(min(1, ranks - 1), ranks):
                if self._adaptation is None:
                    self._adaptation = inspect_small(self.config, ranks)
                config = shard_config(self.config, tp)
                sizes = self._sizes if loss == "whole" else _two_sizes(min(self._sizes[1], MOST_TILED))
                first, second = trace_hollow(config, self._dtype, sizes, ranks, self._adaptation, loss)
            self._traced[key] = first, second
        return self._traced[key]


def _two_sizes(most: int) -> tuple[int, int]:
    """Numbers of tokens that no size of a model is likely to be, in whole chunks of recurrent layers."""
    chunks = max(4, min(most, MOST_TOKENS) // CHUNK)
    return (chunks // 2 + 1) * CHUNK, (chunks + 3) * CHUNK


def shard_config(config: Any, tp: int) -> Any:
    """The sizes that one rank of `tp` has: heads, features of MLPs and words of the vocabulary are divided."""
    if tp == 1:
        return config
    found = copy.deepcopy(config)
    text = found.get_text_config()
    if getattr(text, "head_dim", None) is None and hasattr(text, "num_attention_heads"):
        text.head_dim = text.hidden_size // text.num_attention_heads
    for name in _SHARDED:
        size = getattr(text, name, None)
        if isinstance(size, int):
            if size % tp and name != "vocab_size":
                raise LongmeshError(f"tp={tp} does not divide {name}={size} of {text.model_type}")
            setattr(text, name, -(-size // tp))
    return found
