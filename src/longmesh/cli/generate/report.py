"""Tokens as they come, and the figures at the end."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import Any

_WIDTH = 72
_MIB = 1 << 20


@dataclass
class Figures:
    """What a run measured on one process; `ranks`: (peak memory, cache) of each rank, in bytes."""

    prompt_tokens: int
    tokens: list[int]
    prefill_s: float
    decode_s: float
    ranks: list[tuple[int, int]]

    def lines(self) -> list[str]:
        count = len(self.tokens)
        before = self.prompt_tokens - 1  # the last token of the prompt is the first of decoding
        found = [
            f"prompt  {_tokens(self.prompt_tokens)}, {self.prefill_s:.2f} s, {_rate(before, self.prefill_s)}",
            f"new     {_tokens(count)}, {self.decode_s:.2f} s, {_rate(count, self.decode_s)}",
        ]
        for rank, (peak, cache) in enumerate(self.ranks):
            found.append(
                f"rank {rank}  {peak / _MIB:.0f} MiB at its peak, {cache / _MIB:.1f} MiB of it cache"
            )
        return found

    def compared(self, other: Figures) -> str:
        """This run against another, of one process."""
        pairs = zip(self.tokens, other.tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.tokens), len(other.tokens)))
        is_same = self.tokens == other.tokens
        said = (
            f"the same {_tokens(same)}"
            if is_same
            else f"other tokens from number {same + 1} of {len(other.tokens)} on"
        )
        times = f"prompt {_ratio(self.prefill_s, other.prefill_s)}, new tokens {_ratio(self.decode_s, other.decode_s)}"
        cache = _ratio(max(cache for _, cache in self.ranks), other.ranks[0][1])
        advice = "" if is_same else "; rounding decides between close tokens: try --dtype float64"
        return f"against one process: {said}; time of {times}, cache of a rank {cache}{advice}"


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds:.1f} tokens/s" if count and seconds else "none to compute"


def _ratio(ours: float, theirs: float) -> str:
    return f"x {ours / theirs:.2f}" if theirs else "-"


def peak_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def make_streamer(tokenizer: Any, terminal: str | None) -> Any:
    """Shows text word by word on a terminal; without one, in lines, which is what a launcher passes on."""
    from transformers import TextStreamer

    class Shown(TextStreamer):
        """What is left of a line waits for the rest."""

        line = ""
        out: Any = open(terminal, "w") if terminal else sys.stdout  # noqa: SIM115 - to the end of the process

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if terminal:
                print(text, end="\n" if stream_end else "", flush=True, file=self.out)
                return
            self.line += text
            if stream_end or "\n" in text or len(self.line) > _WIDTH:
                print(self.line.rstrip("\n"), flush=True, file=self.out)
                self.line = ""

    return Shown(tokenizer, skip_prompt=True)
