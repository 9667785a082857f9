"""Distributions from random bits: each a number of bits per element and a vectorised conversion.

A conversion uses an element's own bits, or those of the aligned pair it belongs to (Box-Muller). Rejection
sampling would need a varying number of bits, which can't be addressed by index. float16 and bfloat16 are
computed in float32, except that uniform numbers have only as many bits as the type holds, so that none
rounds up to 1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from longmesh.errors import LongmeshError
from longmesh.tensor.philox import Convert

# Bits of the significand of each type, the hidden one included.
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True, slots=True)
class Distribution:
    """`bits` random bits an element (32 or 64) and how they become its value.

    `origin`: the function here that made it, and its arguments. A traced program keeps those as text.
    """

    bits: int
    convert: Convert
    origin: tuple[str, tuple[Any, ...]]

    def to_text(self) -> str:
        maker, arguments = self.origin
        return json.dumps([maker, [str(a) if isinstance(a, torch.dtype) else a for a in arguments]])

    @staticmethod
    def from_text(text: str) -> Distribution:
        maker, arguments = json.loads(text)
        types = {str(dtype): dtype for dtype in _DIGITS}
        return _MAKERS[maker](*(types[a] if isinstance(a, str) else a for a in arguments))


def _real(dtype: torch.dtype, caller: str) -> torch.dtype:
    if dtype in _DIGITS:
        return dtype
    if dtype.is_floating_point:  # float8: as coarse as bfloat16, then rounded
        return torch.bfloat16
    raise LongmeshError(
        f"{caller} gives real numbers, and the tensor is {dtype}; allowed are floating-point tensors: "
        "call .float() first, or use random_() for integers"
    )


def _unit(bits: torch.Tensor, digits: int) -> torch.Tensor:
    """[0, 1), a multiple of 2**-digits, in float32 for 32 bits and float64 for 64."""
    width = 32 if bits.dtype is torch.int32 else 64
    kind = torch.float32 if width == 32 else torch.float64
    whole = bits.bitwise_right_shift_(width - digits).bitwise_and_((1 << digits) - 1)
    return whole.to(kind).mul_(2.0**-digits)


def _open_unit(bits: torch.Tensor) -> torch.Tensor:
    """(0, 1], fine near 0, so that its logarithm has long tails."""
    if bits.dtype is torch.int32:
        return bits.bitwise_and(0x7FFFFFFF).to(torch.float32).mul_(2.0**-31).add_(2.0**-32)
    return bits.bitwise_right_shift(11).bitwise_and_((1 << 53) - 1).to(torch.float64).add_(1).mul_(2.0**-53)


def _width(dtype: torch.dtype) -> int:
    return 64 if dtype is torch.float64 else 32


def uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Distribution:
    """[low, high)."""
    kind = _real(dtype, "uniform_")
    if not low <= high:
        raise LongmeshError(f"uniform_ from {low} to {high}: the range must not be empty; swap them")

    def convert(bits: torch.Tensor) -> torch.Tensor:
        values = _unit(bits, _DIGITS[kind])
        return values if (low, high) == (0.0, 1.0) else values.mul_(high - low).add_(low)

    return Distribution(_width(kind), convert, ("uniform", (kind, low, high)))


def normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Distribution:
    """Box-Muller: two neighbours are radius and angle of one point."""
    kind = _real(dtype, "normal_")
    if not std >= 0:
        raise LongmeshError(f"normal_ with std={std}: a standard deviation is not negative")

    def convert(bits: torch.Tensor) -> torch.Tensor:
        pairs = bits.view(-1, 2)
        radius = _open_unit(pairs[:, 0].contiguous()).log_().mul_(-2.0).sqrt_()
        angle = _unit(pairs[:, 1].contiguous(), 24 if bits.dtype is torch.int32 else 53).mul_(2 * math.pi)
        values = torch.empty(pairs.shape, dtype=radius.dtype, device=bits.device)
        torch.mul(radius, angle.cos(), out=values[:, 0])
        torch.mul(radius, angle.sin_(), out=values[:, 1])
        values = values.view(-1)
        return values if (mean, std) == (0.0, 1.0) else values.mul_(std).add_(mean)

    return Distribution(_width(kind), convert, ("normal", (kind, mean, std)))


def bernoulli(p: float) -> Distribution:
    """True with probability `p`, to 2**-32."""
    if not 0 <= p <= 1:
        raise LongmeshError(f"bernoulli_ with p={p}: a probability is between 0 and 1")
    threshold = round(p * 2**32) - 2**31

    def convert(bits: torch.Tensor) -> torch.Tensor:
        if threshold >= 2**31:
            return torch.ones_like(bits, dtype=torch.bool)
        return bits < threshold

    return Distribution(32, convert, ("bernoulli", (p,)))


def exponential(dtype: torch.dtype, rate: float = 1.0) -> Distribution:
    kind = _real(dtype, "exponential_")
    if not rate > 0:
        raise LongmeshError(f"exponential_ with lambd={rate}: the rate must be positive")
    # log(u) / -rate is +0 at u = 1 only for the tiniest u; torch gives no zeros either.
    tiny = torch.finfo(torch.float64 if kind is torch.float64 else torch.float32).tiny
    return Distribution(
        _width(kind),
        lambda bits: _open_unit(bits).log_().neg_().clamp_(min=tiny).div_(rate),
        ("exponential", (kind, rate)),
    )


def geometric(p: float) -> Distribution:
    """Trials up to the first success: 1, 2, ..."""
    if not 0 < p < 1:
        raise LongmeshError(f"geometric_ with p={p}: a probability between 0 and 1, both excluded")
    return Distribution(
        64,
        lambda bits: _open_unit(bits).log_().div_(math.log1p(-p)).ceil_().clamp_(min=1),
        ("geometric", (p,)),
    )


def cauchy(dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0) -> Distribution:
    kind = _real(dtype, "cauchy_")
    if not sigma > 0:
        raise LongmeshError(f"cauchy_ with sigma={sigma}: the scale must be positive")
    return Distribution(
        _width(kind),
        lambda bits: _open_unit(bits).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median),
        ("cauchy", (kind, median, sigma)),
    )


def log_normal(dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> Distribution:
    inner = normal(dtype, mean, std)
    origin = ("log_normal", (_real(dtype, "log_normal_"), mean, std))
    return Distribution(inner.bits, lambda bits: inner.convert(bits).exp_(), origin)


def integers(low: int, high: int) -> Distribution:
    """Whole numbers in [low, high), from 64 bits: by a 64-bit multiply up to a range of 2**31, where the bias is
    under 2**-33, else modulo, where it is under range / 2**63."""
    count = high - low
    if count <= 0:
        raise LongmeshError(f"random integers from {low} to {high}: the range must not be empty")

    def convert(bits: torch.Tensor) -> torch.Tensor:
        if count == 2**64:
            return bits
        if (
            count > 2**63
        ):  # one subtraction is the modulo; comparing unsigned words is comparing with the top bit flipped
            over = bits.bitwise_xor(-(2**63)) >= count - 2**63
            return torch.where(over, bits - (count - 2**64), bits).add_(low)
        if count == 2**63:
            return bits.bitwise_and_(2**63 - 1).add_(low)
        if count > 2**31:
            return bits.bitwise_and_(2**63 - 1).remainder_(count).add_(low)
        below = bits.bitwise_and(0xFFFFFFFF).mul_(count).bitwise_right_shift_(32)
        return (
            bits.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF).mul_(count).add_(below)
            .bitwise_right_shift_(32).add_(low)
        )  # fmt: skip

    return Distribution(64, convert, ("integers", (low, high)))


def largest_integer(dtype: torch.dtype) -> int:
    """Up to which `dtype` holds every whole number from 0 on."""
    if dtype is torch.bool:
        return 1
    return 2 ** _DIGITS.get(dtype, 4) if dtype.is_floating_point else torch.iinfo(dtype).max


def integers_of(dtype: torch.dtype) -> Distribution:
    """What random_() without bounds gives: every whole number that `dtype` holds exactly, from 0 on."""
    return integers(0, largest_integer(dtype) + 1)


def integers_from(low: int, dtype: torch.dtype) -> Distribution:
    """What random_(low, None) gives: the same from `low` on."""
    return integers(low, largest_integer(dtype) + 1)


def make_distribution(maker: str, numbers: tuple[Any, ...]) -> Distribution:
    """The distribution that a function here makes, by the function's name."""
    return _MAKERS[maker](*numbers)


_MAKERS: dict[str, Callable[..., Distribution]] = {
    maker.__name__: maker
    for maker in (
        uniform, normal, bernoulli, exponential, geometric, cauchy, log_normal, integers, integers_of, integers_from
    )
}  # fmt: skip
