"""RecurrentParallel: recurrent layers over a sequence that is cut over the ranks of a mesh, exact.

    rp = RecurrentParallel(mesh, seq_len=S, documents=[3000, 5192])      # plans; sends nothing
    x = rp.shard(tokens, dim=1)                                          # this rank's tokens: one stretch
    y = rp.causal_conv1d(x, weight, bias, "silu")                        # the last tokens of the rank before
    out = rp.gated_delta_rule(q, k, v, g, beta)                          # one state per head crosses a border

What crosses a border does not grow with the length: a state, and T where a rank lies inside one document. States are
fp32 (fp64 for fp64 inputs) whatever the inputs are.

Pitfall: tokens are in order, rank after rank. Attention's balanced layouts deal them out; give attention the layout
"ordered" for models that have both kinds of layers: tokens stay in order, and attention is balanced all the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from longmesh.comm import comm_of
from longmesh.comm.machine import cluster_on
from longmesh.errors import LongmeshError
from longmesh.plan import Cluster
from longmesh.recurrent.chain import Chain
from longmesh.recurrent.choose import KernelChoice
from longmesh.recurrent.convolution import shift
from longmesh.recurrent.explain import LayerStats, explain, layer_stats
from longmesh.recurrent.gather import gather_tokens
from longmesh.recurrent.kernel.delta import GatedDeltaRule
from longmesh.recurrent.kernel.diagonal import DiagonalScan
from longmesh.recurrent.kernel.form import ChunkKernel
from longmesh.recurrent.kernel.linear import LinearAttention, Ssd
from longmesh.recurrent.kernel.packages import Packages
from longmesh.recurrent.kernel.selective import SelectiveScan
from longmesh.recurrent.plan import RecurrentPlan, documents_of_positions, plan_recurrent
from longmesh.recurrent.runner import Result, Runner
from longmesh.recurrent.scaled import RunningMax, mlstm, running_max, wkv


class RecurrentParallel:
    """Recurrent layers over a sequence that is cut over the ranks of a mesh with one axis: plain tensors in and out.

    Every rank makes it with the same arguments. Making it communicates nothing.

    Documents are given by their lengths (one list, or one per batch row), or found in `positions` of the whole
    sequence, one row or several, that start again. Without a mesh the sequence is whole in this process.

    `kernel`: "auto" takes kernels of fla, mamba_ssm and causal_conv1d where they are installed and the tensors are on a
    GPU, after comparing each with the built-in one at its first use (`check_kernels`); "torch" takes the built-in ones;
    a package's name takes those of that package. `packages` says where they are imported from.

    `cluster`: the machine that exchanges are chosen for, the same on every rank; the mesh's own if not given.

    Every method is collective over the mesh, and so is its backward. With `final=True` it also returns the state after
    the last token, on every rank.

    >>> rp = RecurrentParallel(mesh, seq_len=5)
    >>> x = torch.arange(5.0).view(1, 1, 5)  # (batch, channels, tokens), whole on every rank, to be cut
    >>> rp.unshard(rp.causal_conv1d(rp.shard(x, dim=2), torch.ones(1, 2)), dim=2)
    tensor([[[0., 1., 3., 5., 7.]]])
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        seq_len: int,
        documents: Sequence[int] | Sequence[Sequence[int]] | None = None,
        positions: Tensor | None = None,
        exchange: str = "auto",
        kernel: str = "auto",
        check_kernels: bool = True,
        packages: Packages | None = None,
        cluster: Cluster | str | None = None,
    ) -> None:
        if mesh is not None and mesh.ndim != 1:
            raise LongmeshError(
                f"RecurrentParallel: the mesh has {mesh.ndim} axes {mesh.mesh_dim_names or tuple(mesh.shape)}; pass "
                "the sub-mesh of the axis that cuts the sequence, such as mesh['cp']"
            )
        if exchange not in ("auto", "gather", "scan"):
            raise LongmeshError(f"RecurrentParallel(exchange={exchange!r}): give 'auto', 'gather' or 'scan'")
        if positions is not None:
            if documents is not None:
                raise LongmeshError(
                    "RecurrentParallel: documents and positions both say where documents begin; give one of them"
                )
            documents = documents_of_positions(positions, seq_len)
        comm = None if mesh is None else comm_of(mesh)
        self.mesh = mesh
        self.rank = 0 if comm is None else comm.shape.index(comm.coordinate)
        self.plan: RecurrentPlan = plan_recurrent(
            seq_len=seq_len, ranks=1 if mesh is None else mesh.size(), documents=documents
        )
        scheme = None if exchange == "auto" else exchange
        machine = cluster_on(comm, cluster)
        self.chain = Chain(self.plan, self.rank, None, (0,), scheme, machine)
        if comm is not None:
            group = comm.group((0,))
            members = tuple(comm.shape.index(place) for place in group.members)
            self.chain = Chain(self.plan, self.rank, group, members, scheme, machine)
        self._runner = Runner(self.chain, KernelChoice(kernel, packages or Packages(), check_kernels))

    # -- the layout ------------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank."""
        start, stop = self.plan.span(self.rank)
        return stop - start

    @functools.cached_property
    def positions(self) -> Tensor:
        """Global positions of this rank's tokens."""
        return torch.arange(*self.plan.span(self.rank))

    def shard(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor whose `dim` is the sequence. Local; every rank has the whole."""
        if tensor.shape[dim] != self.plan.seq_len:
            raise LongmeshError(
                f"shard: dim {dim} has {tensor.shape[dim]} tokens and the sequence {self.plan.seq_len}; give the "
                "whole tensor"
            )
        start, stop = self.plan.span(self.rank)
        return tensor.narrow(dim, start, stop - start)

    def unshard(self, tensor: Tensor, dim: int) -> Tensor:
        """The whole tensor from every rank's part. Collective; its gradient is this rank's part of the whole's."""
        dim = dim % tensor.ndim

        def check() -> dict[str, int]:
            if tensor.shape[dim] != self.num_tokens:
                raise LongmeshError(
                    f"unshard: dim {dim} has {tensor.shape[dim]} tokens and this rank {self.num_tokens} of the "
                    f"sequence's {self.plan.seq_len}; give what this rank has of it"
                )
            return {f"dim {d}": n for d, n in enumerate(tensor.shape) if d != dim}

        self._runner.together("unshard", check, (dim, tensor.dtype), tensor.device.type)
        return gather_tokens(self.chain, tensor, dim)

    # -- seeing ----------------------------------------------------------------------------------

    def stats(self) -> list[LayerStats]:
        """What each kind of layer that was called sends, one after the other. Pure."""
        how = {"scheme": self.chain.scheme, "cluster": self.chain.cluster}
        return [
            layer_stats(name, self.plan, *sizes, **how) for name, sizes in sorted(self._runner.sizes.items())
        ]

    def explain(self) -> str:
        """Who hears from whom, and what the layers called so far send."""
        return explain(self.plan, self.stats())

    # -- layers ----------------------------------------------------------------------------------

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        final: bool = False,
    ) -> Result:
        """S_t = (I - b k k') exp(g) S + b k v', o = scale q' S: (batch, tokens, heads, V).

        q, k (batch, tokens, heads, K), v (.., V); g, the log of the decay, and beta (batch, tokens, heads); g may have
        one number per feature of k. `scale` is 1 / sqrt(K) unless given. Keys are used as they are: normalise them.
        """
        factor: float = k.shape[-1] ** -0.5 if scale is None else scale
        layer = "gated_delta_rule" if g.ndim == 3 else "gated_delta_rule by feature"
        given = {"q": q * factor, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
        return self._run(layer, GatedDeltaRule(), given, v.dtype, final, factor)

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None = None,
        *,
        scale: float = 1.0,
        initial_state: Tensor | None = None,
        final: bool = False,
    ) -> Result:
        """S_t = exp(decay) S + k v', o = scale q' S: (batch, tokens, heads, V).

        `decay` is a logarithm: (batch, tokens, heads), or one number per feature of k.
        """
        decay = q.new_zeros(q.shape[:-1]) if decay is None else decay
        layer = "linear_attention" if decay.ndim == 3 else "linear_attention by feature"
        given = {"q": q * scale, "k": k, "v": v, "decay": decay, "initial_state": initial_state}
        return self._run(layer, LinearAttention(), given, v.dtype, final, scale)

    def ssd(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *,
        initial_state: Tensor | None = None,
        final: bool = False,
    ) -> Result:
        """Mamba 2: x (batch, tokens, heads, P), dt (batch, tokens, heads) after softplus, A and D (heads,), B and C
        (batch, tokens, groups, N). A state is (batch, heads, N, P)."""
        given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "initial_state": initial_state}
        return self._run("ssd", Ssd(), given, x.dtype, final)

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        *,
        initial_state: Tensor | None = None,
        final: bool = False,
    ) -> Result:
        """Mamba 1: x and dt (batch, channels, tokens), dt after softplus, A (channels, n), B and C (batch, n, tokens),
        D (channels,). A state is (batch, channels, n)."""
        given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "initial_state": initial_state}
        return self._run("selective_scan", SelectiveScan(), given, x.dtype, final)

    def diagonal_scan(
        self,
        x: Tensor,
        decay: Tensor | None = None,
        *,
        factor: Tensor | None = None,
        initial_state: Tensor | None = None,
        final: bool = False,
    ) -> Result:
        """h_t = exp(decay) h + x of each channel by itself: (batch, tokens, channels), as an RG-LRU has it.

        If exp(decay) may be 0, pass it as `factor` instead of its logarithm: torch.log has no gradient at 0, and NaN
        would come out.
        """
        if (decay is None) == (factor is None):
            raise LongmeshError(
                "diagonal_scan: pass decay=, a logarithm, or factor=, what the state is multiplied with; one of them"
            )
        given = {"x": x, "decay": decay, "factor": factor, "initial_state": initial_state}
        return self._run("diagonal_scan", DiagonalScan(factor is not None), given, x.dtype, final)

    def wkv(self, k: Tensor, v: Tensor, decay: Tensor, first: Tensor) -> Tensor:
        """RWKV 4: the mean of v over earlier tokens, weighted by exp(k) and decaying, with the token itself weighted by
        exp(k + first): (batch, tokens, channels).

        `decay`, a logarithm, and `first` have one number per channel.
        """
        return self._scaled("wkv", wkv, {"k": k, "v": v, "decay": decay, "first": first})

    def mlstm(self, q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, *, eps: float = 1e-6) -> Tensor:
        """xLSTM's matrix memory: C_t = exp(f) C + exp(i) k v', n_t = exp(f) n + exp(i) k, and
        q' C / max(|q' n|, 1): (batch, tokens, heads, V).

        q, k (batch, tokens, heads, K), v (.., V); i and f, logarithms, (batch, tokens, heads). q is divided by sqrt(K).
        `eps` is added to the denominator when both are divided by exp(m): m_t = max(m + f, i), from 0.
        """
        return self._scaled("mlstm", mlstm, {"q": q, "k": k, "v": v, "i": i, "f": f}, eps)

    def _scaled(
        self, layer: str, run: Callable[..., Tensor], given: dict[str, Tensor], *others: float
    ) -> Tensor:
        def checked() -> Tensor:
            self._runner.enter(layer, given, others)
            return run(self, *given.values(), *others)

        return self._eagerly(checked)()

    def running_max(self, x: Tensor, decay: Tensor) -> RunningMax:
        """m_t = max(m + decay, x) of each channel: (batch, tokens, channels), without gradients."""
        self._runner.enter("running_max", {"x": x, "decay": decay})
        chunks = self._runner.chunks(64, x.dtype, x.device)
        size = x.shape[0] * x.shape[2]
        self._runner.note("running maximum", size, size, x.element_size())
        return running_max(self.chain, chunks, x.detach(), decay.detach())

    @property
    def begins(self) -> Tensor:
        """(rows, tokens): where documents begin among this rank's tokens, the sequence's first one included."""
        marks = self.plan.marks(self.rank)
        begins = (
            torch.zeros(1, self.num_tokens, dtype=torch.bool) if marks is None else torch.from_numpy(marks)
        )
        begins[:, : int(self.plan.span(self.rank)[0] == 0)] = True
        return begins

    def token_shift(self, x: Tensor) -> Tensor:
        """The token before each, zero where a document begins: (batch, tokens, channels)."""
        return self._eagerly(self._shift)(x)

    def _shift(self, x: Tensor) -> Tensor:
        self._runner.enter("token_shift", {"x": x})
        return shift(self.chain, x.mT).mT

    def causal_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        initial_state: Tensor | None = None,
        final: bool = False,
    ) -> Result:
        """A causal convolution of each channel: x (batch, channels, tokens), weight (channels, width).

        A state is the width - 1 tokens before the next one: (batch, channels, width - 1).
        """
        return self._eagerly(self._runner.convolve)(x, weight, bias, activation, initial_state, final)

    def _eagerly(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Where a compiler traces, the graph ends before the call and goes on after it."""
        return torch.compiler.disable(run) if torch.compiler.is_compiling() else run

    def _run(
        self,
        layer: str,
        kernel: ChunkKernel,
        given: Mapping[str, Tensor | None],
        dtype: torch.dtype,
        final: bool,
        scale: float = 1.0,
    ) -> Result:
        return self._eagerly(self._runner.run)(layer, kernel, given, dtype, final, scale)
