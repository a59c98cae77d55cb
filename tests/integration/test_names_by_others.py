"""Names by which other programs find what an adapter changes, of models that they know by other names than transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from conftest import rows_into
from expert_models import tiny_experts
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from test_whole_models import TEXT, WHOLE, by_peft, loaded, logits, plain, run_of
from vision_models import vision_folder

import packlora
from packlora.commands.export import export_adapter
from packlora.commands.merge import merge_adapter
from packlora.errors import InputError

Base = Callable[..., str]


def test_biases_of_a_text_model_are_merged_and_exported_where_the_whole_one_has_more(
    whole_base: Base, tmp_path: Path
) -> None:
    base, own = whole_base(attention_bias=True), {"target_modules": ["q_proj"], "bias": "all"}
    packlora.train(run_of(base, rows_into(tmp_path)("rows"), tmp_path / "run", {"job": own}))
    job = tmp_path / "run" / "job"
    want = loaded(TEXT, base, job)
    torch.testing.assert_close(loaded(WHOLE, base, job), want, rtol=1e-9, atol=1e-9)
    assert (want - logits(plain(TEXT, base))).abs().max() > 0.1
    merge_adapter(job, tmp_path / "merged", check="never")
    export_adapter(job, tmp_path / "exported", "peft", check="never")
    for auto in (TEXT, WHOLE):
        torch.testing.assert_close(logits(plain(auto, str(tmp_path / "merged"))), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loaded(auto, base, tmp_path / "exported"), want, rtol=1e-9, atol=1e-9)


def test_experts_and_routers_of_a_text_model_by_peft_are_those_of_the_whole_one(
    whole_base: Base, tmp_path: Path
) -> None:
    """PEFT names them once, by the text model; its config names modules, too, which no model of Qwen's has."""
    base, targets = whole_base("qwen3_5_moe"), ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
    own = LoraConfig(r=2, target_modules=["q_proj", "W_pack"], target_parameters=targets, init_lora_weights=False)
    torch.manual_seed(3)
    model = get_peft_model(plain(TEXT, base), own, autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path / "job")
    want = logits(model)
    assert (want - logits(plain(TEXT, base))).abs().max() > 0.1
    assert not any("language_model" in key for key in load_file(tmp_path / "job" / "adapter_model.safetensors"))
    merge_adapter(tmp_path / "job", tmp_path / "merged", base, check="never")
    export_adapter(tmp_path / "job", tmp_path / "exported", "peft", base, check="never")
    for auto in (TEXT, WHOLE):
        torch.testing.assert_close(logits(plain(auto, str(tmp_path / "merged"))), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loaded(auto, base, tmp_path / "exported"), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["mixtral", "phimoe", "granitemoe"])
def test_experts_that_vllm_would_pass_over_are_refused_before_anything_is_written(family: str, tmp_path: Path) -> None:
    """vLLM 0.33 names its modules as published files do: of these, `block_sparse_moe.experts`."""
    model = tiny_experts(family, torch.float32)
    model.save_pretrained(tmp_path / "base")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    own = LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
    get_peft_model(model, own).save_pretrained(tmp_path / "job")
    base, out = str(tmp_path / "base"), tmp_path / "new" / "out"
    if family == "granitemoe":
        (note,) = export_adapter(tmp_path / "job", out, "vllm", base)
        assert note.startswith("it adapts experts of granitemoe: start vLLM with --enable-mixed-moe-lora-format")
        assert all(".block_sparse_moe.experts." in key for key in load_file(out / "adapter_model.safetensors"))
        return
    said = (
        r"adapts model\.layers\.0\.mlp\.experts\.gate_up_proj, which published files name model\.layers\.0\."
        r"block_sparse_moe\.experts\.0\.w1\.weight: vLLM .* would pass the adapter over .*; `packlora merge \S*job OUT`"
    )
    with pytest.raises(InputError, match=said):
        export_adapter(tmp_path / "job", out, "vllm", base)
    assert not out.parent.exists()


def test_an_adapter_beside_a_vision_tower_has_the_text_model_s_names_in_llama_cpp(
    tokenizer: Any, tmp_path: Path
) -> None:
    base = vision_folder("gemma3", tokenizer, tmp_path / "base")
    by_peft(base, tmp_path / "job", target_modules=r".*language_model\..*_proj", rank_pattern={"down_proj": 2})
    export_adapter(tmp_path / "job", tmp_path / "job.gguf", "gguf", base)
    reader = gguf.GGUFReader(tmp_path / "job.gguf")
    assert reader.fields["general.architecture"].contents() == "gemma3"
    alpha = reader.fields["adapter.lora.alpha"].contents()
    got = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 2)
    stored, wanted = load_file(tmp_path / "job" / "adapter_model.safetensors"), set()
    for key, A in stored.items():
        if "lora_A" in key:
            path = key.removeprefix("base_model.model.model.language_model.").removesuffix(".lora_A.weight")
            name = f"{known.get_name(f'model.{path}')}.weight"
            a, b = got[f"{name}.lora_a"], got[f"{name}.lora_b"]
            delta = 8 / A.shape[0] * stored[key.replace("lora_A", "lora_B")] @ A
            torch.testing.assert_close(alpha / b.shape[1] * b @ a, delta, rtol=1e-5, atol=1e-6)
            wanted |= {f"{name}.lora_a", f"{name}.lora_b"}
    assert len(wanted) == 2 * 2 * 7 and got.keys() == wanted
    by_peft(base, tmp_path / "tower", target_modules=r".*vision_tower\..*q_proj")
    with pytest.raises(
        InputError, match=r"model\.vision_tower\.\S+ has no name in GGUF files of gemma3 .*packlora merge"
    ):
        export_adapter(tmp_path / "tower", tmp_path / "new" / "tower.gguf", "gguf", base)
    assert not (tmp_path / "new").exists()
