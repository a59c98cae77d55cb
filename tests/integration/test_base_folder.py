"""A base model's folder: what is wrong with its weights, files or numbers is said before training, and sound ones are taken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY, tiny_model
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeExperts

from packlora.base.demo_model import DEMO_MODEL
from packlora.base.load import load_skeleton, load_tokenizer
from packlora.base.model import Base, load_base
from packlora.config import Run
from packlora.errors import InputError
from packlora.runtime.prepare import prepare
from packlora.runtime.prepared_job import ModelShape


def run_of(folder: Path | str, **changes: Any) -> Run:
    jobs = [{"name": "x", "data": {"path": "x"}}]
    tree = {"base_model": str(folder), "output_dir": "x", "device": "cpu", "jobs": jobs}
    return Run.model_validate(tree | changes)


def load(folder: Path | str, **changes: Any) -> Base:
    return load_base(run_of(folder, **changes), None)


@pytest.fixture
def copied(tiny_base: Callable[[str], str], tmp_path: Path) -> Path:
    """A sound base folder that a test may damage."""
    return Path(shutil.copytree(tiny_base("llama"), tmp_path / "base"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("prepares", [True, False], ids=["a folder", "the packaged model"])
def test_a_revision_beside_a_folder_is_refused(prepares: bool, copied: Path) -> None:
    base = str(copied) if prepares else DEMO_MODEL
    with pytest.raises(
        InputError, match=f"revision: 'v2' is of a model on a hub, and base_model '{base}' is .*; leave it out"
    ):
        load_skeleton(run_of(base, revision="v2"))


def random_model(name: str, **extra: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**TINY, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_weights_that_the_folder_lacks_are_an_error_that_lists_them(copied: Path) -> None:
    change_config(copied, num_hidden_layers=4)
    with pytest.raises(InputError, match="lack 18 weights") as caught:
        load(copied)
    assert "model.layers.2.input_layernorm.weight" in str(caught.value)
    assert str(copied) in str(caught.value)


def test_weights_that_the_model_has_no_place_for_are_an_error_that_lists_them(copied: Path) -> None:
    change_config(copied, num_hidden_layers=1)
    with pytest.raises(InputError, match=r"hold 9 weights that the model has no place for.*model\.layers\.1\.mlp"):
        load(copied)


def test_weights_of_another_shape_are_an_error_that_names_both_shapes(copied: Path) -> None:
    change_config(copied, intermediate_size=80)
    with pytest.raises(InputError, match=r"6 weights of another shape.*down_proj.weight is \[64, 96\], not \[64, 80\]"):
        load(copied)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_weights_that_were_saved_from_inside_a_wrapper_are_said_to_be(prefix: str, copied: Path) -> None:
    tensors = load_file(copied / "model.safetensors")
    save_file({prefix + name: own for name, own in tensors.items()}, copied / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        InputError, match=rf"names in the files begin with '{prefix}'.*save_pretrained the model inside"
    ):
        load(copied)


def test_a_download_that_is_not_whole_is_refused_by_plan_as_well(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "base", max_shard_size="50KB")
    tokenizer.save_pretrained(tmp_path / "base")
    gone = sorted((tmp_path / "base").glob("model-*.safetensors"))[1]
    gone.unlink()
    (tmp_path / "rows.jsonl").write_text('{"text": "the quick brown fox"}\n')
    job = {"name": "a", "data": {"path": str(tmp_path / "rows.jsonl")}}
    tree = {"base_model": str(tmp_path / "base"), "output_dir": str(tmp_path / "out"), "jobs": [job], "device": "cpu"}
    with pytest.raises(InputError, match=f"lacks {gone.name}, which its index names"):
        prepare(Run.model_validate(tree))


def test_a_vocabulary_that_was_grown_is_called_so(copied: Path) -> None:
    change_config(copied, vocab_size=310)
    with pytest.raises(
        InputError,
        match=r"embeddings for 320 tokens, and config\.json says vocab_size 310: the vocabulary was grown; set it to 320",
    ):
        load(copied)


def test_every_weight_is_in_place_where_output_and_embedding_are_one(tmp_path: Path) -> None:
    random_model("LlamaConfig", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load(tmp_path).fused_loss


def test_nan_in_the_weights_is_called_so_with_the_name_of_a_tensor(copied: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan

    change_weights(copied, spoil)
    with pytest.raises(InputError, match=r"hold NaN or infinity: model\.layers\.1\.mlp\.up_proj\.weight;"):
        load(copied)


def test_sound_weights_whose_logits_overflow_are_told_from_spoilt_ones(copied: Path) -> None:
    change_weights(copied, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].mul_(3e4))
    with pytest.raises(InputError, match="not finite in float16, though its weights are; try another dtype"):
        load(copied, dtype="float16")


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_experts_whose_rounding_depends_on_all_tokens_are_not_taken_for_samples_that_see_each_other(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of an expert's product are all samples' tokens that are routed to it. Products that round by their number
    are pretended: whether a processor's do so is its own."""
    forward = Qwen2MoeExperts.forward

    def rounding(experts: Any, hidden_TD: torch.Tensor, *routes: Any) -> Any:
        return forward(experts, hidden_TD, *routes) * (1 + 1e-6 * (hidden_TD.detach().sum() % 1))

    monkeypatch.setattr(Qwen2MoeExperts, "forward", rounding)
    extra = {"num_experts": 60, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
    random_model("Qwen2MoeConfig", **extra).save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        base = load(tmp_path, dtype=dtype, gradient_checkpointing=checkpointing)
        if dtype == "float32":
            assert any("rounding of the model's experts" in note for note in base.warnings)


def test_a_folder_with_pickled_weights_alone_is_told_what_to_do(copied: Path) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    with pytest.raises(
        InputError, match=r"only as pytorch_model\.bin, a pickle.*save_pretrained it as model\.safetensors"
    ):
        load(copied)
    (copied / "pytorch_model.bin").unlink()
    with pytest.raises(InputError, match=r"the folder holds no weights \(model\.safetensors\)"):
        load(copied)


def test_a_folder_without_a_tokenizer_is_called_so(copied: Path) -> None:
    load_tokenizer(run_of(copied))
    for path in copied.glob("tokenizer*"):
        path.unlink()
    (copied / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"the folder holds no tokenizer \(tokenizer\.json\)"):
        load_tokenizer(run_of(copied))


def test_an_adapter_folder_is_not_taken_for_a_base_model(copied: Path) -> None:
    (copied / "adapter_config.json").write_text("{}")
    for _ in ("beside a model", "alone"):
        with pytest.raises(InputError, match="the folder holds an adapter"):
            load(copied)
        (copied / "config.json").unlink(missing_ok=True)


def test_numbers_of_a_configuration_may_be_lists_by_layer(tmp_path: Path) -> None:
    """Gemma3n writes the width of each layer's MLP; time and memory are planned with their mean."""
    extra = {"num_hidden_layers": 3, "intermediate_size": [96, 192, 96], "head_dim": 16, "sliding_window": 8}
    more = {
        "laurel_rank": 8,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    }
    skeleton = random_model("Gemma3nTextConfig", **extra, **more, activation_sparsity_pattern=[0.0] * 3)
    shape = ModelShape.of(skeleton)
    assert (shape.inner, shape.attention, shape.key_value) == (128, 64, 32)


def test_masks_and_frequencies_that_older_files_hold_are_not_in_the_way(copied: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.masked_bias"] = torch.tensor(-1e9)
        tensors["model.layers.0.self_attn.bias"] = torch.ones(1, 1, 8, 8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_weights(copied, add)
    load(copied)


def test_layers_that_a_base_model_drops_at_random_are_kept(tmp_path: Path) -> None:
    """Checkpointing needs decoders in training mode, where OPT would leave layers out."""
    extra = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0, "layerdrop": 0.5}
    random_model("OPTConfig", **extra).save_pretrained(tmp_path)
    base = load(tmp_path, gradient_checkpointing=True)
    assert any("dropout is off" in note for note in base.warnings)


def test_what_a_library_prints_while_it_loads_is_not_on_standard_output(
    copied: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As GPTQModel's banner: standard output is the answers of `packlora generate`."""
    kept = transformers.LlamaForCausalLM.from_pretrained.__func__  # type: ignore[attr-defined]

    def chatty(cls: type, *args: Any, **settings: Any) -> Any:
        print("a banner")
        return kept(cls, *args, **settings)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", classmethod(chatty))
    load(copied)
    said = capsys.readouterr()
    assert "a banner" in said.err and "a banner" not in said.out
