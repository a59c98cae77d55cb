"""Models whose attention layers keep a causal mask of a fixed size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from packlora.config import Run
from packlora.errors import InputError
from packlora.runtime.run import train

KEPT = 256
"""Tokens of the mask."""


@pytest.mark.parametrize("budget", [KEPT + 1, "auto"])
def test_microbatches_longer_than_a_mask_that_the_model_keeps_are_refused_and_others_train(
    budget: int | str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        hidden_size=32, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=9,
        vocab_size=320, max_position_embeddings=KEPT, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    rows = [{"prompt": "the quick brown", "completion": "fox jumps over the lazy dog"}] * 8
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "device": "cpu",
        "max_tokens_per_microbatch": budget,
        "jobs": [{
            "name": "x", "data": {"path": str(tmp_path / "rows.jsonl")}, "adapter": {"r": 2},
            "train": {"global_batch_size": 8, "max_steps": 1},
        }],
    }  # fmt: skip
    with pytest.raises(InputError, match=f"keeps masks for {KEPT} tokens .* set it to {KEPT} or less"):
        train(Run.model_validate(tree))
    tree["max_tokens_per_microbatch"] = KEPT
    assert train(Run.model_validate(tree)).status == "done"
