"""Tiny models of `transformers` from their config classes, with random weights, as a user makes them, and what to do with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB, SEQ, DIM, LAYERS, BATCH = 128, 16, 64, 4, 2
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 2 * DIM, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

Inputs = dict[str, torch.Tensor]


def _gpt2(dropout: float) -> nn.Module:
    drops: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=DIM, n_layer=LAYERS, n_head=4, bos_token_id=1, eos_token_id=2, **drops)
    )


def _llama(dropout: float) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_SIZES, attention_dropout=dropout))


def _mixtral(dropout: float) -> nn.Module:
    return MixtralForCausalLM(MixtralConfig(**_SIZES, attention_dropout=dropout, num_local_experts=4, num_experts_per_tok=2))


def _t5(dropout: float) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": DIM, "d_kv": 16, "d_ff": 2 * DIM, "num_layers": LAYERS, "num_heads": 4}
    tokens: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens, dropout_rate=dropout))


def _vit(dropout: float) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": DIM, "intermediate_size": 2 * DIM, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    drops: dict[str, Any] = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    images: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 16}
    return ViTForImageClassification(ViTConfig(**sizes, **drops, **images))


def _lora(dropout: float) -> Any:
    from peft import LoraConfig, get_peft_model

    wanted = LoraConfig(r=8, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(_llama(dropout), wanted)


def _ids(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, SEQ), generator=generator)


def _text(generator: torch.Generator) -> Inputs:
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids.clone()}


def _pairs(generator: torch.Generator) -> Inputs:
    return {"input_ids": _ids(generator), "labels": _ids(generator)}


def _images(generator: torch.Generator) -> Inputs:
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator),
        "labels": torch.randint(0, 16, (BATCH,), generator=generator),
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Architecture:
    make: Callable[[float], Any]
    inputs: Callable[[torch.Generator], Inputs]
    generates: bool = True


ARCHITECTURES = {
    "gpt2": Architecture(_gpt2, _text),
    "llama": Architecture(_llama, _text),
    "t5": Architecture(_t5, _pairs),
    "mixtral": Architecture(_mixtral, _text),
    "vit": Architecture(_vit, _images, generates=False),
    "lora": Architecture(_lora, _text),
}


def make(name: str, *, reentrant: bool | None, dropout: float = 0.1, seed: int = 0) -> Any:
    """A model in training mode, with its own checkpointing unless `reentrant` is None."""
    torch.manual_seed(seed)
    model = ARCHITECTURES[name].make(dropout)
    if reentrant is not None:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
        if name == "lora":
            model.enable_input_require_grads()
        assert model.is_activation_checkpointing
    return model.train()


def inputs(name: str, step: int, dtype: torch.dtype = torch.float32) -> Inputs:
    made = ARCHITECTURES[name].inputs(torch.Generator().manual_seed(step))
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.items()}


def loss(model: Any, name: str, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A training step's loss; dropout draws the same numbers in each run of the step."""
    torch.manual_seed(step)
    result: torch.Tensor = model(**inputs(name, step, dtype)).loss
    return result


@torch.no_grad()
def look(model: Any, name: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Evaluation in the midst of training: logits, and what `generate` says."""
    model.eval()
    some = inputs(name, 99, dtype)
    seen = [model(**some).logits.clone()]
    if ARCHITECTURES[name].generates:
        prompt = {"input_ids": some["input_ids"][:, :4]}
        seen.append(model.generate(**prompt, attention_mask=torch.ones(BATCH, 4), max_new_tokens=4, do_sample=False))
    model.train()
    return seen
