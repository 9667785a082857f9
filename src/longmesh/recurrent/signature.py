"""What each layer is given: the shape of every tensor, by letters, checked before anything is computed or sent.

    gated_delta_rule    q (B, T, H, K)    v (B, T, H, V)    ...        a letter is one size wherever it stands

T is this rank's tokens. Without the check a tensor of fewer tokens would be padded, and one of another number of
heads broadcast, silently.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from longmesh.errors import LongmeshError

_QKV = {"q": "BTHK", "k": "BTHK", "v": "BTHV"}
_STATE = {"initial_state": "BHKV"}
SHAPES: dict[str, dict[str, str]] = {
    "gated_delta_rule": {**_QKV, "g": "BTH", "beta": "BTH", **_STATE},
    "gated_delta_rule by feature": {**_QKV, "g": "BTHK", "beta": "BTH", **_STATE},
    "linear_attention": {**_QKV, "decay": "BTH", **_STATE},
    "linear_attention by feature": {**_QKV, "decay": "BTHK", **_STATE},
    "ssd": {
        "x": "BTHP",
        "dt": "BTH",
        "A": "H",
        "B": "BTGN",
        "C": "BTGN",
        "D": "H",
        "initial_state": "BHNP",
    },
    "selective_scan": {
        "x": "BDT",
        "dt": "BDT",
        "A": "DN",
        "B": "BNT",
        "C": "BNT",
        "D": "D",
        "initial_state": "BDN",
    },
    "diagonal_scan": {"x": "BTD", "decay": "BTD", "factor": "BTD", "initial_state": "BD"},
    "causal_conv1d": {"x": "BDT", "weight": "DW", "bias": "D", "initial_state": "BDS"},
    "wkv": {"k": "BTD", "v": "BTD", "decay": "D", "first": "D"},
    "mlstm": {**_QKV, "i": "BTH", "f": "BTH"},
    "running_max": {"x": "BTD", "decay": "BTD"},
    "token_shift": {"x": "BTD"},
}


def find_sizes(layer: str, given: Mapping[str, Tensor], num_tokens: int, seq_len: int) -> dict[str, int]:
    """The size that each letter stands for; an error if a tensor does not fit."""
    sizes = {"T": num_tokens}
    for name, tensor in given.items():
        letters, shape = SHAPES[layer][name], tuple(tensor.shape)
        what = f"{layer.removesuffix(' by feature')}: {name} of shape {shape}"
        if not tensor.is_floating_point():
            raise LongmeshError(f"{what} is {tensor.dtype}; give floating point numbers")
        wanted = f"({', '.join(f'{x}={sizes[x]}' if x in sizes else x for x in letters)})"
        if tensor.ndim != len(letters):
            raise LongmeshError(f"{what} has {tensor.ndim} dims; give {len(letters)}: {wanted}")
        for dim, letter in enumerate(letters):
            if sizes.setdefault(letter, shape[dim]) == shape[dim]:
                continue
            if letter == "T":
                raise LongmeshError(
                    f"{what}: dim {dim} has {shape[dim]} tokens and this rank {num_tokens} of the sequence's "
                    f"{seq_len}; cut it with shard(tensor, dim={dim})"
                )
            raise LongmeshError(f"{what} does not fit the tensors before it; give {wanted}{_advice(letter)}")
    _check_multiples(layer, sizes)
    return sizes


def _advice(letter: str) -> str:
    return ", such as by repeat_interleave(heads, dim=2) of fewer heads" if letter == "H" else ""


def _check_multiples(layer: str, sizes: Mapping[str, int]) -> None:
    if "G" in sizes and sizes["H"] % max(1, sizes["G"]):
        raise LongmeshError(
            f"{layer}: B and C have {sizes['G']} groups and x {sizes['H']} heads; give groups that divide the heads"
        )
    if "S" in sizes and sizes["S"] != sizes["W"] - 1:
        raise LongmeshError(
            f"{layer}: initial_state holds {sizes['S']} tokens and the weight has a width of {sizes['W']}; give the "
            f"{sizes['W'] - 1} tokens before the first"
        )
