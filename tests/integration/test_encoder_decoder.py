"""packlora.accelerate on encoder-decoder models: layers of both halves give PEFT's losses and gradients, with dropout too."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from seeds import SEED, some
from test_accelerate import assert_same, fill
from torch import nn

import packlora
from packlora.ops.dropout import dropout_factor, masked

T5: dict[str, Any] = {
    "vocab_size": 64, "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 64, "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36, "dropout": 0.0, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "gated T5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    ),
    "BART": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**BART)),
}
GROUPS = {"T5": 6, "gated T5": 10, "BART": 5}
"""q, k, v of every layer; k, v of the encoder's states in every decoder layer; gate, up."""


def made(name: str, dora: bool, dropout: float) -> Any:
    torch.manual_seed(SEED)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules="all-linear", use_dora=dora, lora_dropout=dropout, bias="lora_only",
        task_type="SEQ_2_SEQ_LM",
    )  # fmt: skip
    return fill(get_peft_model(model, config).double()).train()


def outcome(model: Any, draw: random.Random) -> dict[str, torch.Tensor]:
    """Logits, loss and gradients of sentences of which one is padded on both sides."""
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    source = torch.randint(3, 64, (2, draw.randint(4, 14)), generator=generator)
    labels = torch.randint(3, 64, (2, draw.randint(2, 9)), generator=generator)
    mask = torch.ones_like(source)
    mask[0, 3:], labels[0, -1] = 0, -100
    model.zero_grad()
    out = model(input_ids=source, attention_mask=mask, labels=labels)
    out.loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **grads}


class SharedDropout(nn.Module):
    """In the place of PEFT's: layers of a group that get the same tensor drop the same elements, drawn when the first one gets
    it. Elements by the specification of packlora's dropout."""

    def __init__(
        self, p: float, group: Hashable, drawn: dict[Hashable, tuple[torch.Tensor, torch.Tensor, set[int]]]
    ) -> None:
        super().__init__()
        self.p, self.group, self.drawn = p, group, drawn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.drawn.get(self.group)
        if kept is None or kept[0] is not x or id(self) in kept[2]:
            T, K = x.numel() // x.shape[-1], x.shape[-1]
            keys_T2 = torch.randint(-(2**31), 2**31, (T, 2), dtype=torch.int32)
            factor_TK = masked(torch.ones(T, K, dtype=x.dtype), keys_T2, 0, self.p) * dropout_factor(self.p)
            kept = self.drawn[self.group] = (x, factor_TK.view(x.shape), set())
        kept[2].add(id(self))
        return x * kept[1]


SETTINGS = some(list(itertools.product(MODELS, (0.0, 0.3), (False, True), (False, True))), 5)


@pytest.mark.parametrize(("name", "dropout", "dora", "checkpointed"), SETTINGS)
def test_losses_and_all_gradients_of_both_halves_are_peft_s(
    name: str, dropout: float, dora: bool, checkpointed: bool
) -> None:
    model = made(name, dora, dropout)
    peft = copy.deepcopy(model)
    report = packlora.accelerate(model, recompute=checkpointed)
    assert report.accelerated == len(report.modules) and len(report.groups) == GROUPS[name]
    if dropout:
        drawn: dict[Hashable, tuple[torch.Tensor, torch.Tensor, set[int]]] = {}
        groups = {path: paths for paths in report.groups for path in paths}
        for path, layer in peft.named_modules():
            if hasattr(layer, "lora_A"):
                layer.lora_dropout["default"] = SharedDropout(dropout, groups.get(path, path), drawn)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for number in range(2):
        found = []
        for one in (model, peft):
            torch.manual_seed(SEED + number)
            found.append(outcome(one, random.Random(SEED + number)))
        assert_same(*found, 1e-10)
