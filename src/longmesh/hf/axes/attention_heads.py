"""What the tensor axis needs to know of an attention module: its heads, and what each of its projections gives.

Read from the module and its configuration, and checked against the sizes of its weights: what does not fit raises
an error that names the module.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from longmesh.errors import LongmeshError
from longmesh.parallel.head_shares import HeadShares, share_heads

KEY_PROJECTIONS = frozenset(("k_proj", "v_proj"))


def find_heads(name: str, module: nn.Module, ranks: int) -> HeadShares:
    """How the heads of an attention module are shared out over `ranks`."""
    heads = _number(module, "num_heads", "num_attention_heads")
    groups = getattr(module, "num_key_value_groups", None)
    keys = heads // groups if isinstance(groups, int) and groups > 0 else heads
    if groups is None and any(hasattr(module, part) for part in KEY_PROJECTIONS):
        keys = _number(module, "num_key_value_heads", "num_key_value_heads")
        if keys != heads:
            raise LongmeshError(
                f"hf.parallelize: {type(module).__name__} '{name}' has {heads} heads and {keys} key heads and no "
                "num_key_value_groups, so how it repeats keys is not known; leave 'tp' out of the mesh"
            )
    return share_heads(heads, keys, ranks)


def check_features(name: str, features: int, count: int) -> None:
    """Raise unless a projection's features are those of `count` heads."""
    if features % count:
        raise LongmeshError(
            f"hf.parallelize: '{name}' has {features} features, which are not those of {count} heads; leave 'tp' out "
            "of the mesh"
        )


def _number(module: nn.Module, attribute: str, option: str) -> int:
    own = getattr(module, attribute, None)
    config: Any = getattr(module, "config", None)
    found = own if isinstance(own, int) else getattr(config, option, None)
    if not isinstance(found, int):
        raise LongmeshError(
            f"hf.parallelize: {type(module).__name__} does not say how many heads it has ({attribute}, or "
            f"config.{option}); leave 'tp' out of the mesh"
        )
    return found
