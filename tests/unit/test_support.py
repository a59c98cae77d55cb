"""docs/support.md says what happens: each row that tiny models can show is tried, by accelerate() and as a job of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY, tiny_model
from expert_models import tiny_experts
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model

import packlora
from packlora.adapters.spec import resolve
from packlora.config.adapter_file import read_config
from packlora.errors import InputError

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
LLAMA = {"target_modules": ["q_proj", "down_proj"]}
GPT2 = {"target_modules": ["c_attn"], "fan_in_fan_out": True}


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=TINY["vocab_size"])
    return transformers.AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True)
class Row:
    """A row by its method and module, with what an adapter of that kind is in PEFT's terms."""

    method: str
    module: str
    settings: dict[str, Any] = field(default_factory=lambda: dict(LLAMA))
    family: str = "llama"

    @property
    def config(self) -> PeftConfig:
        if self.family == "ia3":
            return IA3Config(**self.settings, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
        return LoraConfig(**self.settings, task_type="CAUSAL_LM")

    def model(self) -> Any:
        if self.family == "qwen3_moe":
            return tiny_experts(self.family, torch.float32)
        return gpt2() if self.family == "gpt2" else tiny_model("llama" if self.family == "ia3" else self.family)


ROWS = [
    Row("LoRA, rsLoRA", "`nn.Linear`"),
    Row("LoRA, rsLoRA", "`nn.Linear`", LLAMA | {"use_rslora": True}),
    Row("DoRA, dropout as in PEFT", "`nn.Linear`", LLAMA | {"use_dora": True, "lora_dropout": 0.1}),
    Row("trained biases: `bias: all`, `lora_only`", "`nn.Linear`", LLAMA | {"bias": "lora_only"}, "qwen2"),
    Row("LoRA, rsLoRA", "`Conv1D` of transformers", GPT2, "gpt2"),
    Row("DoRA", "`Conv1D` of transformers", GPT2 | {"use_dora": True}, "gpt2"),
    Row("LoRA, rsLoRA", "embedding", {"target_modules": ["embed_tokens"]}),
    Row("DoRA", "embedding without `max_norm`", {"target_modules": ["embed_tokens"], "use_dora": True}),
    Row(
        "LoRA, rsLoRA, DoRA",
        "experts (`target_parameters`), routers",
        {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        "qwen3_moe",
    ),
    Row(
        "LoRA, rsLoRA, DoRA",
        "experts (`target_parameters`), routers",
        {"target_modules": [], "target_parameters": ["mlp.gate.weight"]},
        "qwen3_moe",
    ),
    Row("any", "output layer", {"target_modules": ["lm_head"]}),
    Row("`lora_bias`, `ensure_weight_tying`", "any", LLAMA | {"lora_bias": True}),
    Row("`modules_to_save`", "linear layer, embedding, norm", LLAMA | {"modules_to_save": ["lm_head"]}),
    Row("`trainable_token_indices`", "embedding, output layer", LLAMA | {"trainable_token_indices": [3, 5]}),
    Row("aLoRA, QALoRA and other variants of LoRA", "any", LLAMA | {"alora_invocation_tokens": [3, 4]}),
    Row("starts that change the base (PiSSA, OLoRA, CorDA)", "`nn.Linear`", LLAMA | {"init_lora_weights": "pissa"}),
    Row("starts that change the base (PiSSA, OLoRA, CorDA)", "`nn.Linear`", LLAMA | {"init_lora_weights": "olora"}),
    Row("IA3, OFT and other methods that are not LoRA", "any", dict(LLAMA), "ia3"),
]


WAYS = {"kept-norm": "kept norm", "grouped": "grouped operator", "rows": "torch"}
"""How the page calls plans that are not the operator's."""


def cells(row: Row) -> tuple[str, str]:
    """What the page says of `packlora train` and of `packlora.accelerate`, in the first row of that method and module."""
    lines = [[cell.strip() for cell in line.split(" | ")] for line in PAGE.read_text().splitlines()]
    train, accelerate = next(
        line[3:5] for line in lines if [line[0].removeprefix("| "), *line[1:2]] == [row.method, row.module]
    )
    return train, accelerate


def id_of(row: Row) -> str:
    other = {key: value for key, value in row.settings.items() if key not in ("target_modules", "fan_in_fan_out")}
    return f"{row.module.strip('`')} {row.family} {' '.join(map(str, other))}"


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_accelerate_computes_a_layer_in_the_way_that_the_page_says(row: Row) -> None:
    model = get_peft_model(row.model(), row.config).train()
    report = packlora.accelerate(model)
    model(input_ids=torch.arange(3, 9)[None]).logits.square().mean().backward()
    served = {path for path, calls in report.served().items() if calls.served and not calls.left}
    # of modules_to_save and trained rows, the modules themselves and not the LoRA beside them
    saved = row.settings.keys() & {"modules_to_save", "trainable_token_indices"}
    said = {
        WAYS.get(str(module.plan), "operator") if module.accelerated and module.path in served else "PEFT"
        for module in report.modules if not saved or not module.kind.startswith("lora.")
    }  # fmt: skip
    assert said <= set(cells(row)[1].split(",")[0].split(" or ")) and said


@pytest.mark.parametrize("row", ROWS, ids=id_of)
def test_a_run_trains_or_refuses_a_layer_as_the_page_says(row: Row, tmp_path: Path) -> None:
    said = cells(row)[0]
    if said == "refused in `init_from`":
        row.config.save_pretrained(tmp_path)
        with pytest.raises(InputError):
            read_config(str(tmp_path), "a job")
    elif said == "refused":
        with pytest.raises(InputError):
            resolve(row.config, row.model(), "a job")
    else:
        assert said.split(",")[0] in ("operator", "torch", "grouped operator")
        row.config.save_pretrained(tmp_path)
        assert resolve(read_config(str(tmp_path), "a job"), row.model(), "a job").modules
