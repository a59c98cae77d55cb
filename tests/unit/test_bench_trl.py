"""bench/studies/trl_losses.py and examples/trl_sft.py: what is compared, and, where TRL is installed, the example itself."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import packlora
from benchmarks.studies import trl_losses
from benchmarks.tables import sections
from packlora.errors import InputError


def logs(losses: list[float], tokens: list[int], seconds: list[float]) -> list[dict[str, Any]]:
    """A Trainer's log of every step, and its summary at the end."""
    entries: list[dict[str, Any]] = []
    for step, (loss, count, time) in enumerate(zip(losses, tokens, seconds, strict=True), start=1):
        entries.append(
            {"step": step, "loss": loss, "num_tokens": sum(tokens[:step]), "tokens_per_second": count / time}
        )
    return [*entries, {"step": len(losses), "train_loss": 0.0}]


class Script:
    """In the place of the example: a model of one LoRA layer, losses as given."""

    def __init__(self, losses: list[float], frozen: bool = True) -> None:
        self.losses, self.frozen = losses, frozen
        self.words: list[list[str]] = []

    def main(self, words: list[str]) -> Any:
        self.words.append(words)
        torch.manual_seed(0)
        model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(6, 5)), LoraConfig(r=2, target_modules=["0"]))
        model.base_model.model[0].base_layer.weight.requires_grad_(not self.frozen)
        steps = len(self.losses)
        return SimpleNamespace(
            model=model, state=SimpleNamespace(log_history=logs(self.losses, [10] * steps, [0.5] * steps))
        )


def ran(losses: list[float], adapter: torch.Tensor) -> dict[str, Any]:
    record = trl_losses.recorded(logs(losses, [10] * len(losses), [0.5] * len(losses)), len(losses))
    return {**record, "adapter": {"A": adapter}, "modules": 1, "grouped": 0}


@pytest.mark.parametrize("missing", ["trl", "datasets"])
def test_without_trl_the_error_says_what_to_install(missing: str, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match="pip install trl"):
        trl_losses.main(["--out", str(tmp_path / "x.json"), "--device=cpu", "--tiny"])
    assert not (tmp_path / "x.json").exists()


def test_no_steps_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="steps: 0"):
        trl_losses.main(["--out", str(tmp_path / "x.json"), "--device=cpu", "--steps=0"])


def test_every_text_is_bytes_and_comes_back() -> None:
    tokenizer = trl_losses.byte_tokenizer()
    for _ in range(20):
        text = "".join(
            chr(random.choice([random.randrange(32, 127), random.randrange(160, 0x2FFF)])) for _ in range(40)
        )
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert {tokenizer.pad_token_id, tokenizer.eos_token_id} == {0, 1}


def test_toy_starts_from_the_same_numbers_in_both_dtypes(tmp_path: Path) -> None:
    folder = trl_losses.model_folder(trl_losses.TINY, tmp_path)
    wide, narrow = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name)) for name in trl_losses.DTYPES
    )
    assert narrow.dtype == torch.bfloat16
    for one, other in zip(wide.parameters(), narrow.parameters(), strict=True):
        assert torch.equal(one, other.float())
    assert len(AutoTokenizer.from_pretrained(folder)) == wide.config.vocab_size
    again = AutoModelForCausalLM.from_pretrained(trl_losses.model_folder(trl_losses.TINY, tmp_path / "again"))
    assert all(torch.equal(one, other) for one, other in zip(narrow.parameters(), again.parameters(), strict=True))


def test_speed_is_the_median_of_the_steps_after_the_first() -> None:
    seconds = [9.0, 9.0, 9.0, 9.0, 9.0, 0.1, 0.4, 0.2]
    tokens = [7, 5, 8, 9, 5, 6, 8, 4]
    record = trl_losses.recorded(logs([3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5], tokens, seconds), 8)
    assert record["ms_per_step"] == pytest.approx(200)
    assert record["tokens_per_second"] == pytest.approx(20)
    assert record["losses"] == [3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    assert trl_losses.recorded(logs([3.0], [5], [0.5]), 1)["ms_per_step"] == pytest.approx(500)
    with pytest.raises(AssertionError, match="1 logs of 2 steps"):
        trl_losses.recorded(logs([3.0], [5], [0.5]), 2)


def test_row_compares_losses_and_adapters() -> None:
    A = torch.randn(3, 4, dtype=torch.float64)
    runs = {"peft": ran([3.0, 2.0], A), "packlora": ran([3.0, 2.5], 1.1 * A)}
    row = trl_losses.compared(trl_losses.TINY, "bfloat16", runs, [3.0, 2.1])
    assert (row["mean_abs"], row["max_abs"]) == (0.25, 0.5)
    assert row["adapter"] == pytest.approx(0.1)
    assert row["to_fp32"] == pytest.approx({"peft": 0.05, "packlora": 0.2})
    figures = trl_losses.summary([row])
    assert figures["tiny_bfloat16_max_abs"] == 0.5
    assert figures["tiny_bfloat16_packlora_to_fp32"] == pytest.approx(0.2)
    assert not any("ms" in key or "tokens" in key for key in figures)
    assert "to_fp32" not in trl_losses.compared(trl_losses.TINY, "float32", runs, None)
    assert "5.0e-01" in trl_losses.shown([row])
    with pytest.raises(AssertionError, match="parameters differ"):
        trl_losses.distance({"A": A}, {"B": A})


def test_the_plain_run_is_plain_and_the_other_is_accelerated() -> None:
    script = Script([2.0, 1.0])
    for way in trl_losses.WAYS:
        record = trl_losses.run(script, trl_losses.TINY, Path("folder"), "float32", way, 2, True)
        assert record["losses"] == [2.0, 1.0]
        assert len(record["adapter"]) == 2
        assert ("modules" in record) == (way == "packlora")
    plain, fast = script.words
    assert set(plain) - set(fast) - {"--no-accelerate"} == {word for word in plain if word.startswith("--output")}
    assert "--no-accelerate" in plain and "--no-accelerate" not in fast and "--cpu" in fast
    left = Script([2.0], frozen=False)  # a trained weight, so the layer is left to PEFT
    with pytest.raises(AssertionError, match="not all modules were accelerated"):
        trl_losses.run(left, trl_losses.TINY, Path("folder"), "float32", "packlora", 1, True)


def test_readme_shows_the_rows_of_the_files(monkeypatch: Any) -> None:
    A = torch.randn(3, 4, dtype=torch.float64)
    row = trl_losses.compared(trl_losses.TINY, "float32", {"peft": ran([3.0], A), "packlora": ran([3.25], A)}, None)
    file = {"rows": [row], "summary": {}, "device": "a device", "commit": "0"}
    monkeypatch.setattr(sections, "measured", lambda name: file if name == "trl-cpu" else None)
    text = "\n".join(sections.trl())
    assert "| tiny, random weights | a device | float32 | 3.0000 | 2.5e-01 | 2.5e-01 |" in text
    assert "trl-cpu.json" in text and "trl-h200.json" not in text


# --- with TRL ------------------------------------------------------------------------------------------------------------


def test_one_line_changes_no_loss_and_a_wrong_line_is_seen(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    out = tmp_path / "trl.json"
    words = ["--out", str(out), "--device=cpu", "--tiny", "--steps=4"]
    trl_losses.main(words)
    file = json.loads(out.read_text())
    assert file["summary"]["part_tiny"]
    single, half = file["rows"]
    assert single["max_abs"] < 1e-5 < single["losses_peft"][0] - single["losses_peft"][-1]
    assert half["max_abs"] < 5e-3
    assert single["modules"] == 14

    def wrong(model: Any) -> str:
        for module in model.modules():
            if hasattr(module, "lora_B"):
                module.scaling["default"] *= 1.01
        return "wrong"

    monkeypatch.setattr(packlora, "accelerate", wrong)
    trl_losses.main(words)
    assert json.loads(out.read_text())["rows"][0]["max_abs"] > 10 * single["max_abs"]
