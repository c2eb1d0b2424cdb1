"""The model that the benches train: GPT-2's shape as anybody writes it, full logits and `F.cross_entropy`.

DeepSpeed trains the same model in an environment of its own, so this file imports PyTorch alone.

[Note: Products of 16-bit weights]
On a processor without bf16 matrix instructions PyTorch's bf16 product is some ten times slower than the one in fp32, worst in backward:
what is measured would be that product, on both sides. There, `Linear` computes in fp32, as such an instruction would (bf16 in, fp32 sums,
bf16 out), and converts the weight a few rows at a time into a workspace that stays in the cache: a whole weight in fp32 would be the
largest tensor of the model. Decided by the processor's flags, which both sides see alike, and told in the results as `bf16_product`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "PRESETS", "Linear", "Shape", "bf16_product"]

BLOCK_NBYTES = 2 << 20
"""Of a weight's rows in fp32: 1 to 4 MiB are alike, 0.5 costs a third more."""

EMULATED = "fp32 emulated"


@functools.cache
def bf16_product() -> str:
    """How products of bf16 tensors are made on this CPU: `"native"` or `"fp32 emulated"`."""
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):  # of x86 and of ARM
                flags.update(value.split())
    except OSError:
        return "native"
    return "native" if flags & {"avx512_bf16", "amx_bf16", "bf16", "svebf16"} else EMULATED


def _emulates(x: Tensor) -> bool:
    return x.dtype is torch.bfloat16 and x.device.type == "cpu" and bf16_product() == EMULATED


@functools.cache
def _workspace(numel: int) -> Tensor:
    return torch.empty(numel, dtype=torch.float32)


class _Fp32Linear(torch.autograd.Function):
    """`x @ weight.T + bias` of bf16 tensors; saves `x` and the weight as they are, and never has more than some rows of it in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        flat = x.reshape(-1, x.shape[-1]).float()
        out = torch.empty(flat.shape[0], weight.shape[0], dtype=x.dtype)
        for start, stop, rows in _fp32_rows(weight):
            part = torch.mm(flat, rows.copy_(weight[start:stop]).t())
            out[:, start:stop] = part if bias is None else part.add_(bias[start:stop])
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad = grads[0].reshape(-1, weight.shape[0])
        flat = x.reshape(-1, x.shape[-1]).float() if needs_weight else None
        grad_x = torch.zeros(grad.shape[0], weight.shape[1], dtype=torch.float32) if needs_x else None
        grad_weight = torch.empty(weight.shape, dtype=weight.dtype) if flat is not None else None
        grad_bias = torch.empty(weight.shape[0], dtype=weight.dtype) if needs_bias else None
        for start, stop, rows in _fp32_rows(weight):
            part = grad[:, start:stop].float()
            if grad_x is not None:
                grad_x.addmm_(part, rows.copy_(weight[start:stop]))
            if grad_weight is not None and flat is not None:
                grad_weight[start:stop] = torch.mm(part.t(), flat, out=rows)
            if grad_bias is not None:
                grad_bias[start:stop] = part.sum(0)
        return grad_x.to(x.dtype).view(x.shape) if grad_x is not None else None, grad_weight, grad_bias


def _fp32_rows(weight: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Start, stop and a workspace of each block of rows: one per width, for one thread at a time."""
    total, width = weight.shape
    height = max(BLOCK_NBYTES // (4 * width), 1)
    space = _workspace(height * width)
    for start in range(0, total, height):
        stop = min(start + height, total)
        yield start, stop, space[: (stop - start) * width].view(-1, width)


class Linear(nn.Linear):
    """`nn.Linear`; see [Note: Products of 16-bit weights]."""

    def forward(self, input: Tensor) -> Tensor:
        if not _emulates(input):
            return super().forward(input)
        out: Tensor = _Fp32Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return out


class _Fp32Attention(torch.autograd.Function):
    """Causal attention of bf16 tensors in fp32; saves its inputs alone and computes again in backward, as flash attention does."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v = inputs = [t.detach().float().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return tuple(g.to(grads[0].dtype) for g in torch.autograd.grad(out, inputs, grads[0].float()))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; see [Note: Products of 16-bit weights]."""
    if not _emulates(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out: Tensor = _Fp32Attention.apply(q, k, v)  # type: ignore[no-untyped-call]
    return out


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a GPT with an untied head."""

    layers: int
    dim: int
    heads: int
    vocab: int
    seq: int

    @property
    def num_params(self) -> int:
        return (2 * self.vocab + self.seq + 2) * self.dim + self.layers * (12 * self.dim**2 + 13 * self.dim)


PRESETS = {
    "134M": Shape(12, 768, 12, 32000, 128),
    "1.64B": Shape(48, 1600, 25, 50304, 128),
    "7B": Shape(32, 4096, 32, 32000, 128),
}


class Block(nn.Module):
    """Attention and MLP, each with a LayerNorm before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        dim, self.heads = shape.dim, shape.heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = Linear(dim, 3 * dim), Linear(dim, dim)
        self.up, self.down = Linear(dim, 4 * dim), Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        heads = self.qkv(self.ln1(x)).view(batch, seq, 3, self.heads, dim // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = attend(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, seq, dim))
        out: Tensor = x + self.down(F.gelu(self.up(self.ln2(x))))
        return out


class GPT(nn.Module):
    """Token numbers and targets, both `[batch, seq]`, to the mean loss in fp32.

    Args:
        checkpoints: compute each block again in backward instead of keeping what it saved.
    """

    def __init__(self, shape: Shape, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.wte, self.wpe = nn.Embedding(shape.vocab, shape.dim), nn.Embedding(shape.seq, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.lnf = nn.LayerNorm(shape.dim)
        self.head = Linear(shape.dim, shape.vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        logits = self.head(self.lnf(x))
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))
