from __future__ import annotations

import math

import pytest
import torch

from swapio.cli._data import Corpus
from swapio.cli.gpt import GPT, GPTConfig

SMALL = GPTConfig(vocab_size=256, seq_len=16, num_layers=2, dim=64, num_heads=2)


def make(config: GPTConfig = SMALL) -> GPT:
    torch.manual_seed(0)
    return GPT(config)


@pytest.mark.parametrize("config", [SMALL, GPTConfig(vocab_size=7, seq_len=5, num_layers=1, dim=8, num_heads=1)])
def test_num_params_is_exact(config: GPTConfig) -> None:
    assert sum(p.numel() for p in make(config).parameters()) == config.num_params


def test_loss_starts_at_a_blind_guess() -> None:
    idx = torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(0))
    loss = make()(idx, idx.roll(1, 1))
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_logits_depend_on_the_past_only() -> None:
    model, idx = make(), torch.zeros(1, 16, dtype=torch.int64)
    changed = idx.clone()
    changed[0, 9] = 3
    with torch.no_grad():
        before, after = model(idx), model(changed)
    assert before.shape == (1, 16, 256)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("num_tokens", [0, 1, 20])  # 20 runs past seq_len
def test_generate_continues_the_prompt(num_tokens: int) -> None:
    prompt = torch.tensor([[1, 2, 3]])
    runs = [make().generate(prompt, num_tokens, generator=torch.Generator().manual_seed(5)) for _ in range(2)]
    assert runs[0].shape == (1, 3 + num_tokens)
    assert torch.equal(runs[0][:, :3], prompt)
    assert torch.equal(*runs)


def test_batches_depend_on_seed_and_step_only() -> None:
    a, b = Corpus(), Corpus()
    first, again = a.batch(3, seed=1, batch=2, seq=8), b.batch(3, seed=1, batch=2, seq=8)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert not torch.equal(first[0], a.batch(4, seed=1, batch=2, seq=8)[0])
    assert not torch.equal(first[0], a.batch(3, seed=2, batch=2, seq=8)[0])


def test_the_text_is_english() -> None:
    text = bytes(Corpus().tokens.tolist())
    assert len(text) > 300_000
    assert text.count(b" the ") > 3000
