"""A plain GPT, as the demo and the benches train it. It knows nothing of swapio."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "GPTConfig"]


@dataclasses.dataclass(frozen=True, slots=True)
class GPTConfig:
    """`seq_len` is the longest input; `dim` must be a multiple of `num_heads`."""

    vocab_size: int = 256
    seq_len: int = 128
    num_layers: int = 12
    dim: int = 768
    num_heads: int = 12

    @property
    def num_params(self) -> int:
        """Exact, without building the model."""
        block = 12 * self.dim**2 + 13 * self.dim
        return self.num_layers * block + (2 * self.vocab_size + self.seq_len + 2) * self.dim


class Block(nn.Module):
    """Attention and MLP, both with the norm before them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim = config.dim
        self.num_heads = config.num_heads
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, seq, 3, self.num_heads, dim // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, dim))
        out: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))
        return out


class GPT(nn.Module):
    """GPT-2 with GPT-2's initial values (Radford et al., 2019), but for an untied head."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.dim)
        self.wpe = nn.Embedding(config.seq_len, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        for name, param in self.named_parameters():
            if param.ndim > 1:
                into_residual = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(param, std=0.02 / math.sqrt(2 * config.num_layers) if into_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The mean loss (float32, a scalar) if targets are given, else logits [batch, seq, vocab_size] in the weights' dtype.

        Args:
            idx, targets: token numbers [batch, seq], int64.
        """
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(
        self, idx: torch.Tensor, num_tokens: int, *, temperature: float = 0.8, top_k: int = 40, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """`idx` [batch, seq] continued by `num_tokens` sampled tokens. The generator must be on the CPU."""
        for _ in range(num_tokens):
            logits = self(idx[:, -self.config.seq_len :])[:, -1].float().cpu() / temperature
            worst_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
            probs = logits.masked_fill(logits < worst_kept, -math.inf).softmax(-1)
            idx = torch.cat([idx, torch.multinomial(probs, 1, generator=generator).to(idx.device)], dim=1)
        return idx
