"""Which class of a folder is trained, which one others build of it, and what the modules of one are called in the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from whole_models import EXPERTS, QWEN, TEXT, VISION, whole_config

from packlora.base.classes import auto_class, own_class, twin_for, without_weights
from packlora.base.load import own_skeleton, read_skeleton
from packlora.ops.twin import twin_of

PLAIN = {key: value for key, value in TEXT.items() if key != "head_dim"}
TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 4, "vision_output_dim": 32,
}  # fmt: skip


def qwen4_exp() -> Any:
    indexer = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 8, "compress_ratio": 4}
    text = TEXT | QWEN | EXPERTS | {f"indexer_{name}": value for name, value in indexer.items()}
    return transformers.Qwen4ExpConfig(text_config=text, vision_config=VISION)


def llama4() -> Any:
    text = TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 2}
    tower = TOWER | {"projector_input_dim": 16, "projector_output_dim": 16, "vision_output_dim": 16}
    return transformers.Llama4Config(text_config=text, vision_config=tower)


def mllama() -> Any:
    text = PLAIN | {"cross_attention_layers": [1], "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tower = TOWER | {"num_global_layers": 1, "attention_heads": 2}
    return transformers.MllamaConfig(text_config=text, vision_config=tower)


def emu3() -> Any:
    images = {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1, 1]}
    return transformers.Emu3Config(text_config=PLAIN, vq_config=images, vocabulary_map={"<image>": 5})


def dots3_note() -> Any:
    text = PLAIN | {
        "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_nope_head_dim": 8, "num_experts_per_tok": 2, "index_n_heads": 2,
        "index_head_dim": 8, "shared_experts_intermediate_size": 16,
    }  # fmt: skip
    tower = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "patch_size": 4,
        "adapter_out_dim": 32,
    }
    sight = {"moe_intermediate_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "adapter_in_dim": 16}
    sound = {"num_hidden_layers": 1, "feature_size": 16, "downsample_hidden_size": 8, "adapter_input_size": 16}
    return transformers.Dots3NoteConfig(
        text_config=text, vision_config=tower | sight, audio_config=tower | sound, tie_word_embeddings=False
    )


PAIRS: dict[str, tuple[Callable[[], Any], bool]] = {
    "qwen3_5": (lambda: whole_config("qwen3_5"), True),
    "qwen3_5_moe": (lambda: whole_config("qwen3_5_moe"), True),
    "qwen4_exp": (qwen4_exp, True),
    "llama4": (llama4, False),
    "mllama": (mllama, False),
    "emu3": (emu3, False),
    "dots3_note": (dots3_note, False),
}
"""Types of models of which transformers makes a text model and a whole one, with whether the text model is trained."""


def test_every_type_of_which_transformers_makes_two_models_is_looked_at_here() -> None:
    whole = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES | MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    assert {kind for kind in whole if kind in text and whole[kind] != text[kind]} == PAIRS.keys()


@pytest.mark.parametrize("kind", PAIRS)
def test_what_is_trained_finds_its_weights_in_files_of_the_whole_model(kind: str) -> None:
    """The whole model is the one that its folder names; the text model is trained where it reads such files."""
    make, trains_text = PAIRS[kind]
    config = make()
    text, whole = (
        names[kind] for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    )
    config.architectures = [whole]
    assert auto_class(config) is (AutoModelForCausalLM if trains_text else AutoModelForImageTextToText)
    twin = twin_for(getattr(transformers, text if trains_text else whole), config)
    assert trains_text == (own_class(config) is not None) and (twin is not None) == (trains_text or kind == "llama4")
    if twin is not None and not trains_text:
        assert type(twin.model).__name__ == text and not twin.is_own and not twin.is_trained
        assert twin.there("language_model.model.embed_tokens") == "model.embed_tokens"
        assert twin.there("vision_model.patch_embedding.linear") is None
        back = twin_for(getattr(transformers, text), config)
        assert back is not None and back.is_own and back.is_trained and type(back.model).__name__ == whole
    elif twin is not None:
        assert type(twin.model).__name__ == whole and twin.is_own and not twin.is_trained
        trained = without_weights(getattr(transformers, text), config)
        for path, module in trained.named_modules():
            if not list(module.parameters(recurse=False)):
                continue
            other = twin.there(path)
            assert other is not None and type(twin.model.get_submodule(other)) is type(module)
            assert twin.here(other) == path
        back = twin_for(own_class(config), config)
        assert back is not None
        assert back.there("model.language_model.embed_tokens") == "model.embed_tokens"
        assert not [path for path, _ in twin.model.named_modules() if ".visual." in path and twin.here(path)]
    config.architectures = [text]
    assert (
        auto_class(config) is AutoModelForCausalLM
        and own_class(config) is twin_for(getattr(transformers, text), config) is None
    )


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_modules_of_one_name_have_the_same_weights_of_the_files(family: str, whole_base: Callable[..., str]) -> None:
    base = whole_base(family)
    text, whole = (
        auto.from_pretrained(base).state_dict() for auto in (AutoModelForCausalLM, AutoModelForImageTextToText)
    )
    twin = twin_of(read_skeleton(base, None))
    assert twin is not None
    for name, tensor in text.items():
        other = twin.there(name)
        assert other is not None and torch.equal(tensor, whole[other])
    own, config = own_skeleton(base, None)
    assert type(own).__name__ == config.architectures[0] and type(twin_of(own).model) is type(read_skeleton(base, None))


@pytest.mark.parametrize(
    ("family", "architectures"),
    [
        ("llama", ["LlamaForCausalLM"]), ("llama", None), ("llama", ["LlamaForTokenClassification"]), ("llama", ["Elsewhere"]),
        ("qwen3_5", ["Qwen3_5ForCausalLM"]),
    ],
)  # fmt: skip
def test_a_folder_that_names_what_is_trained_or_nothing_that_writes_texts_has_one_class(
    family: str, architectures: list[str] | None, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_base(family))
    config.architectures = architectures
    config.save_pretrained(tmp_path)
    assert own_class(transformers.AutoConfig.from_pretrained(tmp_path)) is None
    model, _ = own_skeleton(str(tmp_path), None)
    assert twin_of(model) is None and type(model) is type(read_skeleton(str(tmp_path), None))
