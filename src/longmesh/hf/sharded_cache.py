"""ShardedCache: a transformers cache that is sharded over the ranks of a mesh.

    hf.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="longmesh")
    cache = hf.ShardedCache(model.config, mesh)
    cache.prefill(model, ids[:, :-1])                  # each rank computes its part of the prompt
    out = model.generate(ids, past_key_values=cache)   # the same tokens on every rank
    branch = cache.fork()                              # shares pages

Every rank runs the same calls. Pitfall: ranks sample from their own generators; give them one seed (torch.manual_seed),
else the first step is an error on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.cache import PagePool
from longmesh.errors import LongmeshError
from longmesh.hf.cached_attention import CachedLength, CachedState
from longmesh.hf.cached_batch import CachedBatch
from longmesh.hf.cached_keys import link_layer
from longmesh.hf.prefill import prefill

try:
    from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
except ImportError as error:
    raise ImportError("longmesh.hf.ShardedCache needs transformers: pip install 'longmesh[hf]'") from error

_KINDS = ("full_attention", "sliding_attention")
# What models keep besides keys and values, where their configurations don't name their layers' kinds.
_KEPT = {
    **dict.fromkeys(("recurrent_gemma", "rwkv", "xlstm"), "recurrent layers"),
    "mllama_text_model": "layers that attend to images",
    "reformer": "hashed keys",
    "xlnet": "memories of its own",
}


class ShardedLayer(CacheLayerMixin):
    """One layer's keys and values of a `ShardedCache`; lengths are global, `update` returns this rank's part."""

    is_croppable = True
    is_compileable = False

    def __init__(self, batch: CachedBatch, index: int, window: int | None) -> None:
        super().__init__()
        self._batch, self._index = batch, index
        self.is_sliding = window is not None
        self.record_past = False

    @property
    def batch_size(self) -> int:
        """The rows that are cached; -1 before the first."""
        return len(self._batch.sequences) or -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Pages are taken when tokens come."""
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Put new tokens into their pages: (rows, key heads, new tokens, head dim). Local."""
        batch = self._batch
        self.is_initialized = True
        if batch.step is None or self._index in batch.updated:
            batch.begin(key_states.shape[0], key_states.shape[2])
        assert batch.step is not None
        batch.step.write(self._index, batch.pack(key_states), batch.pack(value_states))
        batch.updated.add(self._index)
        return link_layer(batch, self._index, CachedState())

    def get_seq_length(self) -> int:
        """Of the padded rows."""
        return self._batch.length_of(self._index)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """All tokens, from the first on."""
        return CachedLength.of(self.get_seq_length() + query_length, self._batch), 0

    def get_max_length(self) -> int:
        """None."""
        return -1

    def activate_past_recording(self) -> None:
        """Nothing is ever dropped. Speculation calls it before its first forward pass."""
        self._batch.expect_no_repeats()
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last tokens: ``crop(-n)``."""
        if tokens_to_remove > 0:
            raise LongmeshError(
                f"crop({tokens_to_remove}): give the number of tokens to take back as a negative number, crop(-n)"
            )
        self._batch.crop_layer(self._index, -tokens_to_remove)

    def reset(self) -> None:
        """Layers share their rows."""
        self._refuse("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Layers share their rows."""
        self._refuse("reorder_cache")

    def _refuse(self, name: str) -> None:
        raise LongmeshError(
            f"{name} of one layer of a ShardedCache: its layers share their rows; use cache.{name}()"
        )


class ShardedCache(Cache):
    """Keys and values of a model in pages over the ranks of a mesh with one axis, for ``past_key_values=``.

    Every rank makes it and makes the same calls. `page`: tokens per page; each rank holds every n-th page of a row. If
    all layers have a window, pages that fell out of it are given back.

    >>> from transformers import AutoModelForCausalLM, LlamaConfig
    >>> from longmesh import hf
    >>> hf.register()
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> config = LlamaConfig(vocab_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes)
    >>> _ = torch.manual_seed(0)
    >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="longmesh")
    >>> cache = hf.ShardedCache(model.config, mesh, page=4)
    >>> ids = torch.arange(1, 12)[None]
    >>> cache.prefill(model, ids[:, :-1])
    >>> out = model.generate(ids, past_key_values=cache, max_new_tokens=3, do_sample=False)
    >>> whole = model.generate(ids, max_new_tokens=3, do_sample=False)
    >>> torch.equal(out, whole), cache.get_seq_length()
    (True, 13)
    """

    def __init__(self, config: Any, mesh: DeviceMesh | None, *, page: int = 256) -> None:
        windows = _windows_of(config)
        seen = [window for window in windows if window is not None]
        furthest = max(seen) if seen and len(seen) == len(windows) else None
        self.pool = PagePool(mesh, num_pages=0, page=page, layers=len(windows), window=furthest)
        self._windows = windows
        self._take(CachedBatch(self.pool, len(windows)))

    def _take(self, batch: CachedBatch) -> None:
        self._batch = batch
        super().__init__(layers=[ShardedLayer(batch, i, window) for i, window in enumerate(self._windows)])

    @property
    def batch_size(self) -> int:
        """The rows that are cached; -1 before the first."""
        return len(self._batch.sequences) or -1

    @property
    def num_bytes(self) -> int:
        """The memory of this rank's pages."""
        return self.pool.num_bytes

    def prefill(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, *, chunk: int = 8192
    ) -> None:
        """Cache a prompt, or more of one: (rows, tokens). Each rank computes the tokens whose keys it holds.

        `chunk`: tokens of all rows that are computed at a time. `attention_mask`: 0 for padding, of these tokens or of
        all so far. Collective: every rank, with the same arguments.

        Leave the last token to `generate`, which computes one at least: it takes the ids of a prompt that is cached
        whole for new tokens, with any cache of transformers.
        """
        prefill(self._batch, self, model, input_ids, attention_mask, chunk)

    def fork(self) -> ShardedCache:
        """Another cache with the same rows. They share pages until one of them is written. Local."""
        branch = ShardedCache.__new__(ShardedCache)
        branch.pool, branch._windows = self.pool, self._windows
        branch._take(self._batch.fork())
        return branch

    def reset(self) -> None:
        """Forget all rows, and keep the memory. Local."""
        self._batch.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows ``beam_idx`` become the rows, for beam search. Local."""
        self._batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times. Local."""
        self._batch.select([row for row in range(len(self._batch.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows only. Local."""
        rows = torch.arange(len(self._batch.sequences))
        self._batch.select(rows[indices.cpu()].tolist())


def _windows_of(config: Any) -> list[int | None]:
    """Each layer's window, None for all keys; refuses models that cache something else."""
    text = config.get_text_config(decoder=True)
    name = getattr(text, "model_type", type(text).__name__)
    if getattr(text, "is_encoder_decoder", False):
        raise LongmeshError(f"hf.ShardedCache: {name} has an encoder, whose keys are not cached over ranks")
    kinds, kwargs = get_layer_types_and_kwargs(text)
    others = sorted({kind for kind in kinds if kind not in _KINDS})
    if others or name in _KEPT:
        what = f"layers of the kind {', '.join(others)}" if others else _KEPT[name]
        raise LongmeshError(
            f"hf.ShardedCache: {name} has {what}, which are not cached over ranks; use "
            "transformers' DynamicCache"
        )
    return [options.get("sliding_window") for options in kwargs]
