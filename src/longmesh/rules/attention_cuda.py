"""Scaled dot product attention, the fused CUDA ops and their backwards: by batch row and by head.

    flash, memory-efficient, cuDNN:  query (B, H, L, E), key and value (B, K, S, E), bias to (B, H, L, S)

Never run here, where there is no CUDA: a test compares the lines with the ops' own shapes on the meta device. Dropout
draws from each rank's generator, so a call with dropout has no lines.
"""

from __future__ import annotations

from collections.abc import Callable

from longmesh.rules.attention import attend, attend_backward
from longmesh.rules.pointwise import shard_of
from longmesh.rules.rule import AVG, AxisRule, Meta, OpCall, P, R, Rule, S, line
from longmesh.spec import Placement

_BATCH, _HEAD = 0, 1
# Tensors of (batch, heads, ...); what else an op has (seeds, lengths of packed sequences) is the same everywhere.
_SHARDED = ("query", "key", "value", "grad_out", "grad_out_", "out", "logsumexp")


def forward_lines(call: OpCall) -> list[AxisRule]:
    """The output and its log-sum-exp are sharded; seeds and debugging aids, the outputs after those, are not."""
    return _lines(call, lambda dim: [S(dim) if i < 2 else R for i in range(len(call.outputs))])


def backward_lines(call: OpCall) -> list[AxisRule]:
    """Gradients of query, key and value, and of a bias where it is asked for; linear in that of the output."""

    def outputs(dim: int) -> list[Placement]:
        grads: list[Placement] = [S(dim)] * 3
        if len(call.outputs) == 4:
            own = shard_of(call["attn_bias"], dim, 4)
            grads.append(P if own == R else own)
        return grads

    lines = _lines(call, outputs)
    if lines:
        others, count = [R] * (len(call.tensors) - 1), len(call.outputs)
        lines += [line([p, *others], [p] * count) for p in (P, AVG)]
    return lines


def _lines(call: OpCall, outputs: Callable[[int], list[Placement]]) -> list[AxisRule]:
    if call["dropout_p"]:
        return []
    query: Meta = call["query"]
    key: Meta = call["key"]
    names = {m.index: name for name in call.argument_names if isinstance(m := call[name], Meta)}
    lines: list[AxisRule] = []
    for dim in (_BATCH, _HEAD):
        inputs: list[Placement] = []
        for meta in call.tensors:
            name = names[meta.index]
            inputs.append(
                S(dim) if name in _SHARDED else shard_of(meta, dim, 4) if name == "attn_bias" else R
            )
        shared = query.shape[_HEAD] == key.shape[_HEAD]
        even = () if dim == _BATCH or shared else ((query.index, _HEAD), (key.index, _HEAD))
        lines.append(line(inputs, outputs(dim), even=even))
    return lines


_FORWARD = Rule(forward_lines, program=attend)
_BACKWARD = Rule(backward_lines, program=attend_backward)
NAMES = ("flash", "efficient", "cudnn")

RULES: dict[str, Rule] = {
    **{f"_scaled_dot_product_{name}_attention.default": _FORWARD for name in NAMES},
    **{f"_scaled_dot_product_{name}_attention_backward.default": _BACKWARD for name in NAMES},
}
