"""Real English text that is on every machine with Python, as bytes, in an order that depends on the seed only."""

from __future__ import annotations

import torch

from ..errors import UsageError

__all__ = ["Corpus"]


class Corpus:
    """The text of `help("topics")`: about 460,000 bytes of prose on the Python language. A token is a byte."""

    vocab_size = 256

    def __init__(self) -> None:
        try:
            from pydoc_data.topics import topics
        except ImportError as error:  # some distributions split the standard library
            raise UsageError("this Python lacks the module pydoc_data, whose text the demo trains on; use a complete Python") from error
        text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(self, step: int, *, seed: int, batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets [batch, seq], int64: random windows of the text, the same for the same `seed` and `step`."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.tokens) - seq - 1, (batch,), generator=generator)
        windows = self.tokens[starts[:, None] + torch.arange(seq + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
