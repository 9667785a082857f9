"""Numbers in words: bytes with a unit, and nouns that agree with their number. Imports nothing."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024 or unit == "TiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the loop returns at TiB")


def count(number: int, noun: str) -> str:
    """`1 step`, `1,000 steps`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
