"""Adapters whose files name modules as older versions of transformers did, and of folders of which two classes are built."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import rows_into
from expert_models import whole_llama_4
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from seeds import SOAK, some
from test_whole_models import IDS, TEXT, WHOLE, by_peft, loaded, logits, plain, run_of
from vision_models import vision_folder
from whole_models import TEXT as TINY_TEXT
from whole_models import VISION

import packlora
from packlora.answers.talk import load_speakers
from packlora.errors import InputError
from packlora.export.export import export_adapter
from packlora.export.merge import merge_adapter

NOW = "model.language_model."
OLDER = {
    "llava": ["language_model.model.", "language_model.", "model.language_model.model."],
    "gemma3": ["language_model.model."],
    "qwen2_5_vl": ["model.", "language_model."],
}
"""What stands in the place of NOW in files by other versions."""
CONFIGS: dict[str, dict[str, Any]] = {
    "names": {"target_modules": ["q_proj", "lm_head"]},
    "paths": {
        "target_modules": [f"{NOW}layers.0.self_attn.q_proj", f"{NOW}layers.1.mlp.down_proj"],
        "rank_pattern": {f"{NOW}layers.1.mlp.down_proj": 2},
        "modules_to_save": [f"{NOW}norm"],
    },
    "expression": {"target_modules": r"model\.language_model\.layers\..*(q|down)_proj"},
    "rows": {"target_modules": ["o_proj"], "trainable_token_indices": {f"{NOW}embed_tokens": [3, 5]}},
}


def as_it_was(folder: Path, out: Path, older: str) -> Path:
    """A copy of a folder as an older version wrote it."""

    def old(name: str) -> str:
        return name.replace(NOW, older).replace("model.lm_head.", "model.language_model.lm_head.")

    shutil.copytree(folder, out)
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({old(key): tensor for key, tensor in tensors.items()}, out / "adapter_model.safetensors")
    text = (folder / "adapter_config.json").read_text()
    text = text.replace(NOW, older).replace(NOW.replace(".", r"\\."), older.replace(".", r"\\."))
    (out / "adapter_config.json").write_text(text)
    return out


@pytest.mark.parametrize(
    ("family", "older"), some([(one, older) for one, every in OLDER.items() for older in every], 2)
)
def test_an_adapter_by_older_names_is_read_as_what_it_was(
    family: str, older: str, tokenizer: Any, tmp_path: Path
) -> None:
    """Every kind once a family, and every place of every family."""
    base = vision_folder(family, tokenizer, tmp_path / "base")
    turn = OLDER[family].index(older)
    kinds = CONFIGS if SOAK else list(CONFIGS)[turn :: len(OLDER[family])]
    for kind in kinds:
        own = CONFIGS[kind]
        model = by_peft(base, tmp_path / kind, **own)
        want = logits(model)
        before = as_it_was(tmp_path / kind, tmp_path / f"{kind}-old", older)
        if family == "qwen2_5_vl":
            rename_head_back(before)
        merge_adapter(before, tmp_path / f"{kind}-merged", base, check="never")
        torch.testing.assert_close(logits(plain(WHOLE, str(tmp_path / f"{kind}-merged"))), want, rtol=1e-4, atol=1e-4)
        export_adapter(before, tmp_path / f"{kind}-out", "peft", base, check="never")
        written, own = (load_file(tmp_path / one / "adapter_model.safetensors") for one in (f"{kind}-out", kind))
        assert written.keys() == {key for key in own if "base_layer" not in key}
        torch.testing.assert_close(loaded(WHOLE, base, tmp_path / f"{kind}-out"), want, rtol=1e-4, atol=1e-4)


def rename_head_back(folder: Path) -> None:
    """The output layer of the oldest Qwen2-VL had its present name."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({key.replace("language_model.lm_head", "lm_head"): one for key, one in tensors.items()}, file)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_an_adapter_by_older_names_goes_on_and_answers(family: str, tokenizer: Any, tmp_path: Path) -> None:
    base = vision_folder(family, tokenizer, tmp_path / "base")
    want = logits(by_peft(base, tmp_path / "peft", target_modules=["q_proj", "down_proj"]))
    before = as_it_was(tmp_path / "peft", tmp_path / "before", OLDER[family][0])
    run = run_of(base, rows_into(tmp_path)("rows"), tmp_path / "run", {"job": {"init_from": str(before)}})
    run["jobs"][0]["train"]["learning_rate"] = 1e-12
    packlora.train(run)
    torch.testing.assert_close(loaded(WHOLE, base, tmp_path / "run" / "job"), want, rtol=1e-4, atol=1e-4)
    speakers = load_speakers([before], base, "float64", "cpu")
    with torch.no_grad(), speakers.attached.only(speakers.adapters["before"].number):
        torch.testing.assert_close(speakers.model(IDS).logits, want, rtol=1e-6, atol=1e-6)


def test_a_name_that_no_version_had_is_refused_with_the_name(tokenizer: Any, tmp_path: Path) -> None:
    base = vision_folder("llava", tokenizer, tmp_path / "base")
    by_peft(base, tmp_path / "peft", target_modules=["q_proj"])
    other = as_it_was(tmp_path / "peft", tmp_path / "other", "wrapped.")
    with pytest.raises(InputError, match=r"has 'base_model\.model\.wrapped\.layers\S+"):
        merge_adapter(other, tmp_path / "out", base)


def test_biases_that_are_not_read_are_refused_in_words_for_an_adapter_folder(tokenizer: Any, tmp_path: Path) -> None:
    base = vision_folder("llava", tokenizer, tmp_path / "base")
    by_peft(base, tmp_path / "peft", target_modules=["q_proj"], bias="all")
    said = r"job 'peft': the adapter was trained with bias: all, so it has \S+bias, which is not of a linear layer; .*PEFT's"
    with pytest.raises(InputError, match=said):
        merge_adapter(tmp_path / "peft", tmp_path / "out", base)
    run = run_of(base, rows_into(tmp_path)("rows"), tmp_path / "run", {"job": {"init_from": str(tmp_path / "peft")}})
    with pytest.raises(InputError, match="job 'job': the adapter was trained with bias: all, so it has"):
        packlora.train(run)


# --- Llama 4, which is trained as a whole model ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_4(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama4")
    whole_llama_4(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


SCOUT: dict[str, dict[str, Any]] = {
    "linear": {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 2}},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "experts": {"target_parameters": ["experts.gate_up_proj", "router.weight"], "target_modules": ["k_proj"]},
    "copy": {"target_modules": ["v_proj"], "modules_to_save": ["model.norm", "lm_head"]},
    "by the text model": {"target_modules": r"model\.layers\.\d\.self_attn\.q_proj"},
}


def test_an_adapter_of_llama_4_loads_into_both_classes(llama_4: str, tmp_path: Path) -> None:
    packlora.train(run_of(llama_4, rows_into(tmp_path)("rows"), tmp_path / "run", SCOUT))
    for kind in SCOUT:
        job = tmp_path / "run" / kind.replace(" ", "-")
        want = loaded(WHOLE, llama_4, job)
        torch.testing.assert_close(loaded(TEXT, llama_4, job), want, rtol=1e-9, atol=1e-9)
        assert (want - logits(plain(WHOLE, llama_4))).abs().max() > 1e-3
        merge_adapter(job, tmp_path / f"{job.name}-merged", check="never")  # which is what this test does
        export_adapter(job, tmp_path / f"{job.name}-out", "peft", check="never")
        for auto in (WHOLE, TEXT):
            got = logits(plain(auto, str(tmp_path / f"{job.name}-merged")))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(loaded(auto, llama_4, tmp_path / f"{job.name}-out"), want, rtol=1e-9, atol=1e-9)


def test_an_adapter_by_peft_of_llama_4_s_text_model_is_read_and_goes_on(llama_4: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    own = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(plain(TEXT, llama_4), own)
    model.save_pretrained(tmp_path / "peft")
    want = logits(model)
    merge_adapter(tmp_path / "peft", tmp_path / "merged", llama_4)
    torch.testing.assert_close(logits(plain(WHOLE, str(tmp_path / "merged"))), want, rtol=1e-4, atol=1e-4)
    run = run_of(llama_4, rows_into(tmp_path)("rows"), tmp_path / "run", {"job": {"init_from": str(tmp_path / "peft")}})
    run["jobs"][0]["train"]["learning_rate"] = 1e-12
    packlora.train(run)
    torch.testing.assert_close(loaded(WHOLE, llama_4, tmp_path / "run" / "job"), want, rtol=1e-4, atol=1e-4)


# --- experts that published files hold the other way round ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("published", "sizes"),
    some([(own, sizes) for own in (True, False) for sizes in ({}, {"moe_intermediate_size": 16})], 3),
    ids=some([f"{own} {shape}" for own in (True, False) for shape in ("oblong", "square")], 3),
)
def test_experts_of_qwen3_vl_moe_are_merged_into_either_layout(
    published: bool, sizes: dict[str, int], tokenizer: Any, tmp_path: Path
) -> None:
    base = qwen_with_experts(tokenizer, tmp_path / "base", published, **sizes)
    stored = load_file(Path(base) / "model.safetensors")
    shape = stored["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape
    assert (shape[1] == 32) == published or sizes  # K, or N
    torch.manual_seed(3)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    own = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)
    model = get_peft_model(plain(WHOLE, base), own, autocast_adapter_dtype=False)
    model.save_pretrained(tmp_path / "job")
    want = logits(model)
    assert (want - logits(plain(WHOLE, base))).abs().max() > 0.1
    merge_adapter(tmp_path / "job", tmp_path / "merged", base)
    torch.testing.assert_close(logits(plain(WHOLE, str(tmp_path / "merged"))), want, rtol=1e-4, atol=1e-4)
    assert load_file(tmp_path / "merged" / "model.safetensors").keys() == stored.keys()


def qwen_with_experts(tokenizer: Any, folder: Path, published: bool, **changes: int) -> str:
    """A tiny Qwen3-VL-MoE. published: with the experts' weights as its publishers have them, [E, K, N]."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    text = TINY_TEXT | {
        "rope_parameters": rope,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    }
    vision = VISION | {"depth": 2, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text | changes, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.2 if parameter.ndim > 1 else 0.1))
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    if published:
        turned = {key: one.mT.contiguous() if ".experts." in key else one for key, one in load_file(file).items()}
        save_file(turned, file, {"format": "pt"})
    tokenizer.save_pretrained(folder)
    return str(folder)
