"""Models that packing would train wrongly are refused before training; those that it serves are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from conftest import FAMILIES, TINY
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from packlora.base import mixers
from packlora.base.load import load_skeleton
from packlora.base.model import load_base
from packlora.base.packing import packed_logits
from packlora.config import Run
from packlora.errors import InputError
from packlora.ops.attention.blocks import SampleBlocks

SMALL = {key: TINY[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "BloomConfig": (
        {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0},
        r"see each other in transformer\.h\.0\.self_attention \(BloomAttention\)$",
    ),
    "MambaConfig": ({"state_size": 4}, r"see each other in backbone\.layers\.0\.mixer \(MambaMixer\)$"),
    "BartConfig": (
        {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "d_model": 64, "is_decoder": True},
        "it takes no notice of position_ids, and counts a sample's places from the begin of the packed row",
    ),
    "MarianConfig": (
        {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "d_model": 64, "is_decoder": True,
         "pad_token_id": 0, "max_position_embeddings": 64},
        r"embed_positions \(Marian\w*\) has 64 rows, too few for the places of a packed row, which it counts from",
    ),
    "RobertaConfig": (
        {"is_decoder": True, "pad_token_id": 1, "intermediate_size": 96},
        "it counts the places of a sample from 2 on, where packed samples begin at 0",
    ),
    "HYV4Config": (
        {"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
         "topk_group": 1, "num_experts_per_tok": 2, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 8,
         "kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 16, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 64,
         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        r"model\.layers\.0\.self_attn \(HYV4\w*\) does not run on a packed row, which has no attention mask \(TypeError: 'None",
    ),
    "DeepseekV3Config": (
        {"num_key_value_heads": 4, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "n_group": 1,
         "topk_group": 1, "num_experts_per_tok": 2, "qk_rope_head_dim": 8, "head_dim": 16, "kv_lora_rank": 16},
        r"is not run by transformers itself: RuntimeError: The size of .*, in model\.layers\.0\.self_attn \(Deep.*config.json",
    ),
    "DeepseekV4Config": (
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 24, "head_dim": 16,
            "qk_rope_head_dim": 8, "layer_types": ["heavily_compressed_attention"] * 2,
        },
        "compressor makes one of every 128 tokens of a row, in which samples that are packed together see each other",
    ),
}  # fmt: skip


def base_of(config: Any, folder: Path) -> str:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return str(folder)


def load(folder: str, **changes: Any) -> Any:
    jobs = [{"name": "x", "data": {"path": "x"}}]
    run = Run.model_validate({"base_model": folder, "output_dir": "x", "device": "cpu", "jobs": jobs} | changes)
    return load_base(run, None)


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_packing_would_train_wrongly_is_refused(name: str, tmp_path: Path) -> None:
    extra, message = OTHERS[name]
    folder = base_of(getattr(transformers, name)(**{**SMALL, **extra}), tmp_path / "base")
    with pytest.raises(InputError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "T5ForConditionalGeneration"])
def test_a_whole_encoder_with_its_decoder_is_refused_as_what_it_is(name: str, tmp_path: Path) -> None:
    """By its config.json, before its weights are read."""
    kind = getattr(transformers, name)
    kind.config_class(architectures=[name]).save_pretrained(tmp_path)
    with pytest.raises(
        InputError, match="trains models that continue texts; this does not: it is an encoder with a decoder"
    ):
        load_skeleton(
            Run.model_validate(
                {"base_model": str(tmp_path), "output_dir": "x", "jobs": [{"name": "x", "data": {"path": "x"}}]}
            )
        )


def test_a_model_whose_convolution_is_called_for_each_sample_is_accepted_and_refused_where_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"num_key_value_heads": 2, "intermediate_size": 96, "layer_types": ["conv", "full_attention"]}
    folder = base_of(transformers.Lfm2Config(**{**SMALL, **changes}), tmp_path / "base")
    assert not load(folder).warnings
    own = modeling_lfm2.causal_conv1d_fn.whole_row
    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", own)
    monkeypatch.setattr(mixers, "MIXING", {})
    with pytest.raises(InputError, match="see each other"):
        load(folder)


def test_a_convolution_is_found_where_the_forward_is_written_that_calls_it() -> None:
    """Which need not be the file of the class."""

    class Own(modeling_lfm2.Lfm2ShortConv):
        pass

    layer = Own(transformers.Lfm2Config(**SMALL), 0)
    assert mixers.mixing_functions(layer) == {(modeling_lfm2.__name__, "causal_conv1d_fn")}


def test_linear_attention_of_every_family_is_found_and_has_no_samples_whose_lengths_the_host_does_not_know() -> None:
    """So no graph is recorded of it, in which the lengths of one microbatch would stay."""
    for file, name in (
        (modeling_qwen3_next, "Qwen3NextGatedDeltaNet"), (modeling_qwen3_5, "Qwen3_5GatedDeltaNet"),
        (modeling_qwen3_5_moe, "Qwen3_5MoeGatedDeltaNet"), (modeling_olmo_hybrid, "OlmoHybridGatedDeltaNet"),
    ):  # fmt: skip
        kind = getattr(file, name)
        model: Any = SimpleNamespace(modules=lambda kind=kind: [kind.__new__(kind)])
        assert mixers.mixing_functions(model) == {
            (file.__name__, "causal_conv1d_fn"), (file.__name__, "torch_chunk_gated_delta_rule"),
        }  # fmt: skip
        mixers.mix_by_sample(model)
        blocks = SampleBlocks(torch.zeros(2, 3, 9, dtype=torch.int32))
        with pytest.raises(RuntimeError, match="causal_conv1d_fn: where samples begin is on the device alone"):
            file.causal_conv1d_fn(torch.zeros(1, 2, 9), sample_lengths=blocks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_supported_families_are_accepted_in_every_mode(
    family: str, dtype: str, tiny_base: Callable[[str], str]
) -> None:
    for checkpointing in (False, True):
        base = load(tiny_base(family), dtype=dtype, gradient_checkpointing=checkpointing)
        assert not base.warnings
        assert not any(parameter.requires_grad for parameter in base.model.parameters())


def test_the_dropout_of_a_base_model_is_off_in_every_form_and_said(tmp_path: Path) -> None:
    """OPT calls F.dropout with its own rate, GPT-2 has dropout modules: neither may draw."""
    opt = transformers.OPTConfig(**SMALL, ffn_dim=96, max_position_embeddings=128, word_embed_proj_dim=64, dropout=0.3)
    for name, config in (
        ("opt", opt),
        ("gpt2", transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=320)),
    ):
        for checkpointing in (False, True):
            base = load(base_of(config, tmp_path / name), gradient_checkpointing=checkpointing)
            assert any("dropout is off" in note for note in base.warnings)


MOE = {"num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}
RANDOM: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("MixtralConfig", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
    "phimoe": ("PhimoeConfig", {"input_jitter_noise": 0.2}, "input_jitter_noise 0.2, router_jitter_noise 0.01"),
    "minimax_m2": ("MiniMaxM2Config", {"router_jitter_noise": 0.2, "head_dim": 16}, "router_jitter_noise 0.2"),
}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", RANDOM)
def test_a_base_s_own_randomness_in_training_is_off_and_said(family: str, checkpointing: bool, tmp_path: Path) -> None:
    name, extra, said = RANDOM[family]
    config = getattr(transformers, name)(**{**SMALL, **MOE, **extra})
    base = load(base_of(config, tmp_path / "base"), gradient_checkpointing=checkpointing)
    assert any("randomness in training is off" in note and f"({said})" in note for note in base.warnings)
    ids = torch.arange(20) + 3
    with torch.enable_grad():
        given = [packed_logits(base.model, ids, ids - 3, (20,), ids - 3) for _ in range(2)]
    assert torch.equal(*given)


def test_a_base_without_randomness_in_training_has_no_note(tmp_path: Path) -> None:
    folder = base_of(transformers.MixtralConfig(**{**SMALL, **MOE}), tmp_path / "base")
    assert not load(folder).warnings


def test_checkpoints_of_a_model_that_has_none_are_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    transformers.GPTNeoXJapaneseConfig(**SMALL).save_pretrained(tmp_path)
    keys = {"base_model": str(tmp_path), "output_dir": "x", "device": "cpu", "gradient_checkpointing": True}
    run = Run.model_validate(keys | {"jobs": [{"name": "x", "data": {"path": "x"}}]})
    with pytest.raises(
        InputError, match=r"gradient_checkpointing: true .* no layer of a gpt_neox_japanese model; leave it"
    ):
        load_skeleton(run)
