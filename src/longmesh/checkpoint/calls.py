"""What the pickle of a piece may call: torch's reader allows some names that make as much memory as they are told to.

    bytearray(1 << 40)       a terabyte of zeros, from a file of a hundred bytes
    set(range(1 << 40))      until the memory is full
    torch.Tensor(1 << 40)    likewise

Such calls are refused before any of them is made. What honest files call has its bytes in the file.
"""

from __future__ import annotations

import _compat_pickle
import math
import re
from typing import Any

from longmesh.checkpoint.pickled import NotPlain, Record, decode

_ARRAYS = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_TENSORS = re.compile(r"torch\.(\w+\.)*\w*(Tensor|Storage)")
_QUANTIZED = "torch._utils._rebuild_qtensor"


def check_calls(data: bytes, num_bytes: int) -> None:
    """Raise NotPlain if the pickle `data` of a piece of `num_bytes` calls for more memory than the piece has."""

    def check(name: str, args: tuple[Any, ...]) -> None:
        if not _is_honest(_present_name(name), args, num_bytes):
            raise NotPlain(f"it calls {name} for more memory than the file has")

    decode(data, check)


def _present_name(name: str) -> str:
    """The name that torch's reader makes of one of Python 2, as it does."""
    module, _, last = name.rpartition(".")
    if (module, last) in _compat_pickle.NAME_MAPPING:
        return ".".join(_compat_pickle.NAME_MAPPING[module, last])
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{last}"


def _is_honest(name: str, args: tuple[Any, ...], num_bytes: int) -> bool:
    """Whether a call makes no more than its arguments hold."""
    if name == "builtins.bytearray":
        return not args or not isinstance(args[0], int)
    if name in _ARRAYS:  # numpy's pickles make an empty array, and give it its bytes
        return len(args) > 1 and args[1] == (0,)
    if name == _QUANTIZED:
        return len(args) > 2 and isinstance(args[2], tuple) and _product(args[2]) <= num_bytes
    if _TENSORS.fullmatch(name):
        return not args
    return not any(isinstance(arg, Record) and arg.name.endswith("range") for arg in args)


def _product(sizes: tuple[Any, ...]) -> float:
    return math.prod(sizes) if all(isinstance(n, int) and n >= 0 for n in sizes) else math.inf
