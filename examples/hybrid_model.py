"""A hybrid model, gated delta layers and attention, trained on sequences that are cut over the ranks.

    longmesh run --ranks 4 examples/hybrid_model.py

Each rank holds one stretch of the tokens. A gated delta layer passes one state per head to the next rank, and attention
is balanced by computing some blocks away from home (layout "ordered"). The same model is trained in one process as
well, and the losses are compared.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from longmesh.attention import ContextParallel, masks
from longmesh.recurrent import RecurrentParallel

DOCUMENTS = [61, 7, 130, 53]  # 251 tokens, a prime, which no number of ranks divides
VOCABULARY, DIM, HEADS, STEPS = 32, 32, 2, 5


class GatedDelta(nn.Module):
    """A short convolution, then a state per head that is corrected by each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, 3 * DIM + 2 * HEADS, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * DIM, 4) / 4)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, rp: RecurrentParallel, cp: ContextParallel) -> Tensor:
        mixed, gate = self.mix(self.norm(x)).split([3 * DIM, 2 * HEADS], dim=-1)
        mixed = rp.causal_conv1d(mixed.mT, self.conv, activation="silu").mT
        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in mixed.chunk(3, dim=-1))
        decay, beta = gate.chunk(2, dim=-1)
        out = rp.gated_delta_rule(q, F.normalize(k, dim=-1), v, F.logsigmoid(decay), beta.sigmoid())
        return x + self.out(out.flatten(-2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(DIM, 3 * DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, rp: RecurrentParallel, cp: ContextParallel) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.mix(self.norm(x)).chunk(3, dim=-1)
        )
        return x + self.out(cp(q, k, v).transpose(1, 2).flatten(-2))


class Hybrid(nn.Module):
    """Three gated delta layers for each layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([GatedDelta(), GatedDelta(), GatedDelta(), Attention()])
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, rp: RecurrentParallel, cp: ContextParallel) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, rp, cp)
        return self.head(x)


def train(mesh) -> list[float]:
    """Losses of a few steps; on a mesh, over its ranks."""
    seq_len = sum(DOCUMENTS)
    rp = RecurrentParallel(mesh, seq_len=seq_len, documents=DOCUMENTS)
    cp = ContextParallel(
        mesh,
        seq_len=seq_len,
        mask=masks.documents(DOCUMENTS),
        layout="ordered",
        num_heads=HEADS,
        head_dim=DIM // HEADS,
    )
    torch.manual_seed(0)
    model = Hybrid()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(VOCABULARY, (1, seq_len + 1))
    inputs, labels = rp.shard(tokens[:, :-1], dim=1), rp.shard(tokens[:, 1:], dim=1)
    losses: list[float] = []
    for _ in range(STEPS):
        logits = model(inputs, rp, cp)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / seq_len
        loss.backward()
        total = loss.detach().clone()
        if mesh is not None:  # shares add up: of the loss, and of the gradients
            dist.all_reduce(total)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    if mesh is not None and dist.get_rank() == 0:
        print(rp.explain())
    return losses


def main() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    together, alone = train(mesh), train(None)
    difference = max(abs(a - b) for a, b in zip(together, alone, strict=True))
    assert difference < 1e-4, (together, alone)
    if dist.get_rank() == 0:
        print(f"losses {', '.join(f'{loss:.4f}' for loss in together)}")
        print(f"largest difference from one process {difference:.1e}")


if __name__ == "__main__":
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    main()
