"""Pickle with a short way for plain tensors.

torch's own pickling of a tensor takes 400 µs, most of a small run's time. A dense, contiguous CPU tensor
is its bytes, dtype and shape; everything else (views with strides, Parameters, subclasses) goes torch's way.

Pitfall: two tensors that share memory arrive as two copies.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch


class CopyPickler(pickle.Pickler):
    """Pickles in memory, without shared-memory descriptors."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=pickle.HIGHEST_PROTOCOL)

    def to_bytes(self, value: Any) -> bytes:
        self.dump(value)
        return self._buffer.getvalue()

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and _is_plain(obj):
            data = obj.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
            return _rebuild, (data, obj.dtype, tuple(obj.shape), obj.requires_grad)
        return NotImplemented


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.__dict__
    )


def _rebuild(data: bytes, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)
