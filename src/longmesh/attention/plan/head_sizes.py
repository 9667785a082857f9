"""HeadSizes: how many heads there are, how wide they are, and what a token of each kind weighs when it travels.

Bytes of one token, in all heads:    a key and its value   kv_heads * (head_dim + v_head_dim) * dtype_bytes
                                     a query               heads * head_dim * dtype_bytes
                                     an output             heads * v_head_dim * dtype_bytes
                                     a partial result      heads * (v_head_dim + 1) * 4     (fp32, with log-sum-exp)

Where values are the first features of keys (`v_in_k`: latents of MLA), a key brings its value along.
"""

from typing import NamedTuple

WIDE_BYTES = 4  # partial results and gradients travel in fp32, unless the inputs are wider


class HeadSizes(NamedTuple):
    """The heads of an attention call, and the bytes of their elements."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype_bytes: int
    v_in_k: bool = False

    @property
    def wide_bytes(self) -> int:
        """Of an element of a partial result, or of a gradient that is summed."""
        return max(self.dtype_bytes, WIDE_BYTES)

    @property
    def kv_dim(self) -> int:
        """Elements of a key and its value in one head."""
        return self.head_dim if self.v_in_k else self.head_dim + self.v_head_dim

    @property
    def key_bytes(self) -> int:
        """A key and its value, in all key heads."""
        return self.num_kv_heads * self.kv_dim * self.dtype_bytes

    @property
    def query_bytes(self) -> int:
        """A query, in all heads."""
        return self.num_heads * self.head_dim * self.dtype_bytes

    @property
    def result_bytes(self) -> int:
        """A partial result and its log-sum-exp, in all heads."""
        return self.num_heads * (self.v_head_dim + 1) * self.wide_bytes

    @property
    def query_cost(self) -> float:
        """What a query costs that is computed away from home, in keys that come to it."""
        return (self.query_bytes + self.result_bytes) / self.key_bytes

    def __str__(self) -> str:
        dims = f"{self.head_dim}"
        if self.v_in_k:
            dims += f", whose first {self.v_head_dim} features are the values"
        elif self.v_head_dim != self.head_dim:
            dims += f", values of {self.v_head_dim}"
        return f"{self.num_heads} heads, {self.num_kv_heads} key heads of {dims}"
