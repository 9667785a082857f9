"""One family of transformers over a sharded cache against its own cache in one process: tokens and logits.

Two rows of 13 tokens, 7 new ones: by generate() alone, after a prefill, and padded on the left, with and without one.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor

from longmesh import hf
from longmesh.errors import LongmeshError
from longmesh.testing import cpu_mesh
from support.tiny_models import VOCABULARY, make_model

WAYS = ("plain", "prefilled", "left", "left prefilled")
_OPTIONS = {
    "max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True,
    "output_logits": True, "pad_token_id": 0,
}  # fmt: skip


def make(family: str, implementation: str, dtype: torch.dtype) -> Any:
    """The family's model with larger weights, so that tokens differ."""
    model = make_model(family, implementation, encoder_layers=2).to(dtype).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, dtype=dtype) * 0.3)
    return model


def batch(way: str) -> tuple[Tensor, Tensor | None]:
    """Ids and their mask."""
    ids = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    if not way.startswith("left"):
        return ids, None
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return ids * mask, mask


def generate(model: Any, way: str, **cache: Any) -> tuple[Tensor, Tensor]:
    ids, mask = batch(way)
    given = {} if mask is None else {"attention_mask": mask}
    found = model.generate(ids, **given, **cache, **_OPTIONS)
    return found.sequences, torch.stack(found.logits).double()


def sweep_family(ranks: int, family: str) -> dict[str, str]:
    """For each way "exact", "refused: why", "wrong: by how much", "failed: how" or "no reference: why". Collective."""
    hf.register()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            dtype, wanted = _references(family)
        except Exception as error:
            return {"all": f"no reference: {type(error).__name__}: {error}"[:200]}
        return {way: _outcome(ranks, family, way, dtype, want) for way, want in wanted.items()}


def _references(family: str) -> tuple[torch.dtype, dict[str, Any]]:
    """In float64, or in float32 for models that have none; by SDPA where eager attention of padding is no number."""
    for dtype in (torch.float64, torch.float32):
        try:
            plain = make(family, "eager", dtype)
            found = {way: generate(plain, way) for way in WAYS}
        except Exception:
            if dtype == torch.float32:
                raise
            continue
        if not all(torch.isfinite(logits).all() for _, logits in found.values()):
            with contextlib.suppress(ValueError):  # some have no SDPA
                plain = make(family, "sdpa", dtype)
                found = {way: generate(plain, way) for way in WAYS}
        return dtype, found
    raise AssertionError("one of both has returned")


def _outcome(ranks: int, family: str, way: str, dtype: torch.dtype, want: tuple[Tensor, Tensor]) -> str:
    try:
        model = make(family, "longmesh", dtype)
    except KeyError as error:
        return f"refused: transformers has no attention of that name for it: {error}"
    try:
        cache = hf.ShardedCache(model.config, cpu_mesh(ranks), page=2)
        ids, mask = batch(way)
        torch.manual_seed(0)
        if way.endswith("prefilled"):
            cache.prefill(model, ids[:, :-1], None if mask is None else mask[:, :-1], chunk=15)
        tokens, logits = generate(model, way, past_key_values=cache)
    except LongmeshError as error:
        return f"refused: {error}"[:300]
    except Exception as error:
        if "are not used by the model: ['past_key_values']" in str(error):  # models that have no cache
            return f"refused: by transformers: {error}"[:300]
        return f"failed: {type(error).__name__}: {error}"[:300]
    if not torch.isfinite(want[1]).all():
        return "no reference: its logits are not finite"
    differ = (tokens != want[0])[:, -7:].any(0).tolist()
    first = (
        differ.index(True) if True in differ else 6
    )  # after a tie that was broken otherwise, all may differ
    off = (logits - want[1])[: first + 1].abs().max().item() / want[1].abs().max().item()
    # generate() makes logits float32, whatever the model's dtype.
    return "exact" if off < (1e-6 if dtype == torch.float64 else 1e-4) else f"wrong: by {off:.1e}"
