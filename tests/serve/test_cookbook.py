"""Recipes of the public cookbook, unchanged, against a service of a tiny model under a name that the cookbook knows.

make soak, where tinker_cookbook is installed
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny_model
from serving import NAME, served
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from packlora.serve.host import Host, run_of

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PACKLORA_SOAK"), reason="a soak: PACKLORA_SOAK=1"),
    pytest.mark.skipif(importlib.util.find_spec("tinker_cookbook") is None, reason="tinker_cookbook is not installed"),
]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # noqa: E501
SAID = [("user", "Say hello."), ("assistant", "Hello there.")]
RANDOM_REWARDS = "import random, tinker_cookbook.recipes.rl_loop as r; r.get_reward = lambda *a: random.random()"
"""A random model's answers are all wrong, so that nothing would be trained."""
SMALL = ["lora_rank=8", "batch_size=4", "max_steps=3", "max_length=256"]
RECIPES: dict[str, tuple[str, list[str]]] = {
    "sl_loop": ("sl_loop", [*SMALL, "save_every=2"]),
    "rl_loop": (
        "rl_loop",
        ["lora_rank=8", "batch_size=4", "group_size=4", "max_steps=2", "max_tokens=16", "loss_fn=importance_sampling"],
    ),
    "chat_sl": ("chat_sl.train", ["dataset=no_robots", *SMALL, "eval_every=2", "save_every=2", "rolling_save_every=1"]),
    "dpo": ("preference.dpo.train", ["dataset=hhh", "batch_size=4", "max_steps=3", "max_length=256"]),
    "math_rl": (
        "math_rl.train",
        ["env=arithmetic", "group_size=2", "groups_per_batch=2", "max_steps=2", "loss_fn=importance_sampling", "max_tokens=8"],
    ),
    "distillation": (
        "distillation.on_policy_distillation",
        [f"teacher_model={NAME}", "dataset=tulu3", "groups_per_batch=2", "group_size=2", "max_tokens=8", "max_steps=1"],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of the recipes: a tokenizer and data sets under their names on the hub."""
    folder = tmp_path_factory.mktemp("cookbook")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder / NAME)
    tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")

    said = {"messages": [{"role": role, "content": text} for role, text in SAID]}
    asked = {"question": "What is 1 + 2?", "answer": "It is 3.\n#### 3"}
    pair = {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}
    for name, line, splits in (
        ("HuggingFaceH4/no_robots", said, ("train", "test")), ("Anthropic/hh-rlhf", pair, ("train", "test")),
        ("allenai/tulu-3-sft-mixture", said, ("train",)), ("openai/gsm8k", asked, ("train", "test")),
    ):  # fmt: skip
        (folder / name).mkdir(parents=True)
        for split in splits:
            (folder / name / f"{split}.jsonl").write_text((json.dumps(line) + "\n") * 48)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    run = run_of(str(place / "base"), ["device=cpu"], None, place / "state")
    with served(Host(NAME, run, 2048, None), place / "state") as (found, _):
        yield found


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_to_its_end(name: str, place: Path, address: str) -> None:
    recipe, words = RECIPES[name]
    run = f"import runpy; runpy.run_module('tinker_cookbook.recipes.{recipe}', run_name='__main__')"
    if name == "rl_loop":
        run = f"{RANDOM_REWARDS}; import chz; r.main(chz.entrypoint(r.Config))"
    log = place / "logs" / name
    done = subprocess.run(
        [sys.executable, "-c", run, f"base_url={address}", f"log_path={log}", f"model_name={NAME}", *words],
        cwd=place, capture_output=True, text=True, timeout=600,
        env={
            **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "home"),
            "TINKER_API_KEY": "tml-local", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled",
        },
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    assert lines
    losses = [value for line in lines for key, value in line.items() if "nll" in key or key.endswith("loss")]
    assert all(isinstance(value, int | float) and value == value for value in losses)
