"""`packlora merge` of bases in several files: memory holds one of them, and the merged model is that of a base in one file."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from test_training import PEFT_KINDS, perturbed_peft
from transformers import AutoModelForCausalLM

from packlora.base.weight_files import WeightFiles
from packlora.errors import InputError
from packlora.export import merge
from packlora.export.merge import merge_adapter

Base = Callable[[str], str]


def in_files(base: str, folder: Path) -> str:
    """The same model in files of 60 KB."""
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(folder, max_shard_size="60KB")
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return str(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    return found


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
@pytest.mark.parametrize("kind", PEFT_KINDS)
def test_a_base_in_several_files_is_merged_to_the_bit_like_one_in_a_single_file(
    kind: str, family: str, tiny_base: Base, tmp_path: Path
) -> None:
    if family == "gemma2" and "bias" in kind:
        pytest.skip("the model has no biases")
    base = tiny_base(family)
    perturbed_peft(base, kind, tmp_path / "adapter")
    parts = in_files(base, tmp_path / "parts")
    for where, out in ((base, "one"), (parts, "several")):
        merge_adapter(tmp_path / "adapter", tmp_path / out, where, "bfloat16")
    one, several = weights(tmp_path / "one"), weights(tmp_path / "several")
    assert one.keys() == several.keys() and all(torch.equal(one[name], several[name]) for name in one)
    assert {value.dtype for value in one.values()} == {torch.bfloat16}
    names = {file.name for file in (tmp_path / "several").glob("*.safetensors")}
    assert names == {file.name for file in Path(parts).glob("*.safetensors")} and len(names) > 2
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    sizes = [value.nbytes for file in sorted(names) for value in stored(tmp_path / "several" / file).values()]
    assert index["metadata"]["total_size"] == sum(sizes)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_what_rounding_to_16_bits_loses_of_the_adapter_is_told(kind: str, tiny_base: Base, tmp_path: Path) -> None:
    base = tiny_base("llama")
    perturbed_peft(base, kind, tmp_path / "adapter")
    notes = {
        dtype: merge_adapter(tmp_path / "adapter", tmp_path / dtype, base, dtype) for dtype in ("float32", "bfloat16")
    }
    assert notes["float32"] is None
    before, exact, rounded = (weights(folder) for folder in (Path(base), tmp_path / "float32", tmp_path / "bfloat16"))
    adapted = [name for name in exact if not torch.equal(before[name], exact[name])]
    lost, added = (
        sum((other[name].double() - exact[name].double()).square().sum() for name in adapted)
        for other in (rounded, before)
    )
    share = float((lost / added) ** 0.5)
    assert notes["bfloat16"] == (
        f"merged weights are rounded to bfloat16, which changes them by {share:.2%} of what the adapter adds "
        "(root mean square); --dtype float32 does not round"
    )


def stored(file: Path) -> dict[str, torch.Tensor]:
    with safe_open(file, "pt") as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118


def test_memory_holds_the_weights_of_one_file(tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_base("qwen2")
    perturbed_peft(base, "dora", tmp_path / "adapter")
    parts = in_files(base, tmp_path / "parts")
    alive, held = 0, {"most": 0, "all": 0}
    read = WeightFiles.read

    def gone(size: int) -> None:
        nonlocal alive
        alive -= size

    def counted(files: WeightFiles, *args: Any) -> torch.Tensor:
        nonlocal alive
        out = read(files, *args)
        weakref.finalize(out, gone, out.nbytes)
        alive += out.nbytes
        held["most"], held["all"] = max(held["most"], alive), held["all"] + out.nbytes
        return out

    def whole(*args: Any, **settings: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(WeightFiles, "read", counted)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", whole)
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", parts, check="never")
    sizes = [sum(value.nbytes for value in stored(file).values()) for file in Path(parts).glob("*.safetensors")]
    assert held["most"] <= max(sizes) < sum(sizes) / 2
    assert held["all"] == sum(sizes), "each weight is read once"


def test_experts_that_transformers_puts_together_are_copied_as_they_lie_in_the_files(
    tiny_base: Base, tmp_path: Path
) -> None:
    config = transformers.MixtralConfig(
        vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base", max_shard_size="60KB")
    transformers.AutoTokenizer.from_pretrained(tiny_base("llama")).save_pretrained(tmp_path / "base")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 40)[None]
    want = model(ids).logits.detach()
    merge_adapter(tmp_path / "adapter", tmp_path / "merged", str(tmp_path / "base"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, want, rtol=2e-5, atol=2e-5)


def test_a_layer_that_the_files_do_not_hold_as_it_is_is_refused_by_name(
    tiny_base: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tiny_base("llama")
    perturbed_peft(base, "lora", tmp_path / "adapter")
    name = "model.layers.1.self_attn.q_proj.weight"
    keys_there = merge.keys_there
    monkeypatch.setattr(
        merge, "keys_there", lambda *args, **how: {k: v for k, v in keys_there(*args, **how).items() if k != name}
    )
    with pytest.raises(InputError, match=f"{name}, which the adapter changes, is computed from other weights"):
        merge_adapter(tmp_path / "adapter", tmp_path / "merged", base)
    assert not (tmp_path / "merged").exists()
