"""Training without any engine, everything in memory: what swapio with everything in memory is held against.

bf16 weights, fp32 masters and moments, PyTorch's fused AdamW on a chunk at a time, so that nothing of a weight's size comes on top but its
gradient, in 16 bits. As a worker it trains the bench's model in this process.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from bench._models import GPT
from bench._steps import DTYPES, add_flags, age_s, rss, run_steps, say, shape_of

__all__ = ["PlainLoop"]

CHUNK_NUMEL = 1 << 20


class PlainLoop:
    """Called like the model; then `backward(loss)` and `step()`, as an engine.

    Args:
        model: in its final dtype; 16-bit parameters get fp32 masters.
        clipping: of the norm of all gradients; 0: off.
        accumulation: micro-batches per step.
    """

    def __init__(
        self, model: nn.Module, *, lr: float, weight_decay: float, clipping: float = 0.0, accumulation: int = 1
    ) -> None:  # fmt: skip
        self.model = model
        self.lr, self.weight_decay, self.clipping, self.accumulation = lr, weight_decay, clipping, accumulation
        self.norm = 0.0
        self._micro_steps = self._step = 0
        self._params = list(model.parameters())
        self._masters = [p.detach().view(-1) if p.dtype is torch.float32 else p.detach().float().view(-1) for p in self._params]
        self._moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self._masters]
        self._space = torch.empty(CHUNK_NUMEL)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        (loss / self.accumulation if self.accumulation > 1 else loss).backward()

    @torch.no_grad()
    def step(self) -> None:
        """AdamW at the last micro-batch of a step."""
        self._micro_steps += 1
        if self._micro_steps % self.accumulation:
            return
        self._step += 1
        factor = self._clip_factor()
        count = torch.tensor(float(self._step))
        for param, master, moments in zip(self._params, self._masters, self._moments, strict=True):
            if param.grad is None:
                continue
            grad, weights = param.grad.view(-1), param.detach().view(-1)
            for start in range(0, master.numel(), CHUNK_NUMEL):
                part = slice(start, min(start + CHUNK_NUMEL, master.numel()))
                gradient = self._space[: part.stop - part.start].copy_(grad[part])
                if factor < 1:
                    gradient.mul_(factor)
                torch._fused_adamw_(
                    [master[part]], [gradient], [moments[0][part]], [moments[1][part]], [], [count], lr=self.lr, beta1=0.9,
                    beta2=0.999, weight_decay=self.weight_decay, eps=1e-8, amsgrad=False, maximize=False,
                )  # fmt: skip
                if param.dtype is not torch.float32:
                    weights[part].copy_(master[part])
            param.grad = None

    def _clip_factor(self) -> float:
        if not self.clipping:
            return 1.0
        parts = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in self._params if p.grad is not None]
        self.norm = float(torch.linalg.vector_norm(torch.stack(parts)))
        return min(self.clipping / (self.norm + 1e-6), 1.0)


def main(argv: list[str]) -> None:
    import_s = age_s()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_flags(parser)
    args = parser.parse_args(argv)
    args.offload_param = args.offload_optimizer = "none"
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {"import_s": import_s, "rss_after_import": rss()}
    torch.manual_seed(1234)
    start = time.perf_counter()
    model = GPT(shape_of(args), checkpoints=args.checkpoints).to(DTYPES[args.dtype])
    loop = PlainLoop(model, lr=1e-4, weight_decay=0.01, clipping=args.clipping, accumulation=args.gas)
    result |= {"initialize_s": round(time.perf_counter() - start, 2), "rss_after_init": rss()}
    result |= run_steps(loop, args)
    say(args, "plain", torch.__version__, result | {"grad_norm": loop.norm})


if __name__ == "__main__":
    main(sys.argv[1:])
