"""Stages of a base model: together they are the model, to the bit, and each reads and holds its own weights alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conftest import FAMILIES, TINY, tiny_model
from ranks import Ranks
from seeds import SOAK
from tensor_runs import MORE_FAMILIES

from packlora.base.model import load_base
from packlora.base.packing import packed_logits
from packlora.base.weight_files import WeightFiles
from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.layout import Layout
from packlora.parallel.start import started
from packlora.pipeline.checks import check_stages, ends_of, layer_chain
from packlora.pipeline.links import Links
from packlora.pipeline.stages import Stage, load_stage

MORE = {
    **MORE_FAMILIES,
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "bloom": ("BloomConfig", {"n_layer": 2}),
    "gpt2": ("GPT2Config", {"tie_word_embeddings": False}),
    "experts": (
        "Qwen2MoeConfig",
        {"num_experts": 60, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "llama4": ("Llama4TextConfig", {"num_local_experts": 4, "intermediate_size_mlp": 32, "head_dim": 16}),
}
"""bloom: its layers give tuples, and positions are no rotation, which packing refuses. experts: their rounding depends on all
tokens. llama4: its decoder has another name than its class says, and it sends ids to the device of the embedding's weight."""


def run_of(folder: str, **changes: Any) -> Run:
    jobs = [{"name": "a", "data": {"path": "unused"}}]
    return Run(
        base_model=folder, device="cpu", output_dir="unused", max_tokens_per_microbatch=512, jobs=jobs, **changes
    )


def loaded(rank: int, folders: list[str], counts: list[int]) -> list[tuple[str, torch.Tensor, float, list[str]]]:
    """Of each model its fingerprint, logits, the part of its weights that this stage has read, and names of what it holds."""
    out = []
    made: list[WeightFiles] = []
    init = WeightFiles.__init__

    def remembered(self: WeightFiles, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    with started() as mesh, mock.patch.object(WeightFiles, "__init__", remembered):
        links = Links(mesh, Layout(((),), pipeline=mesh.size), torch.device("cpu"))  # type: ignore[arg-type]
        for folder in folders:
            try:
                base = load_stage(run_of(folder), None, {"a": 70}, mesh, links, counts)
            except InputError as error:
                out.append((str(error), torch.zeros(0), 0.0, []))
                continue
            assert isinstance(base.storage, Stage) and not base.storage.is_whole
            with base.storage.in_step(base.model), torch.no_grad():
                logits = packed_logits(base.model, *packed())
            size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
            held = [name for name, _ in base.model.named_parameters()]
            assert base.fingerprint is not None
            out.append((base.fingerprint.weights, logits, made[-1].bytes_read / size, held))
    return out


def packed() -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], torch.Tensor]:
    lengths = (19, 30, 8)
    ids = torch.randint(3, 300, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    return ids, torch.cat([torch.arange(n) for n in lengths]), lengths, torch.arange(2, 57, 3)


def saved(folder: Path, families: list[str], layers: int = 4) -> list[str]:
    with mock.patch.dict(FAMILIES, MORE):
        for family in families:
            tiny_model(family, num_hidden_layers=layers).save_pretrained(folder / family)
    return [str(folder / family) for family in families]


def test_stages_of_a_family_are_the_model_to_the_bit(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    families = ["tied", "qwen2-window", "phi3", "experts", "llama4", *(("gemma3", "granite") if SOAK else ())]
    folders = saved(tmp_path, families)
    found = ranks(2).run(loaded, folders, [3, 1])
    for at, (family, folder) in enumerate(zip(families, folders, strict=True)):
        base = load_base(run_of(folder), None, {"a": 70})
        assert base.fingerprint is not None
        with torch.no_grad():
            want = packed_logits(base.model, *packed()).double()
        for rank, own in enumerate(found):
            fingerprint, logits, read, held = own[at]
            assert fingerprint == base.fingerprint.weights, (family, fingerprint)
            same = torch.equal(logits, want)  # grouped products round by where weights lie in memory
            assert same or (family == "experts" and torch.allclose(logits, want, 1e-4, 1e-4)), family
            layers = {name.split(".")[2] for name in held if ".layers." in name}
            assert layers == ({"0", "1", "2"} if rank == 0 else {"3"}), family
            assert read < (0.85, 0.6)[rank], (family, rank, read)
            assert any("embed" in name for name in held) == (rank == 0), (family, held)


def test_a_model_that_has_its_shape_in_mind_behind_the_layers_is_cut(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    """It gives its hidden states the shape of its ids; places have an embedding of their own, which is on all stages."""
    (folder,) = saved(tmp_path, ["gpt2"])
    base = load_base(run_of(folder), None, {"a": 70})
    with torch.no_grad():
        want = packed_logits(base.model, *packed()).double()
    for ((fingerprint, logits, _, held),) in ranks(2).run(loaded, [folder], [3, 1]):
        assert base.fingerprint is not None and fingerprint == base.fingerprint.weights
        assert torch.equal(logits, want) and any("wpe" in name for name in held)


def test_four_stages_and_a_model_that_packing_does_not_serve(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Refused alike on every stage, though what is odd is seen on the last one alone."""
    llama, bloom = saved(tmp_path, ["llama", "bloom"])
    found = ranks(4).run(loaded, [llama], [1, 1, 1, 1])
    assert len({own[0][0] for own in found}) == 1
    with pytest.raises(InputError) as alone:
        load_base(run_of(bloom), None, {"a": 70})
    for own in ranks(2).run(loaded, [bloom], [2, 2]):
        assert own[0][0] == str(alone.value).replace(" in transformer.h.0.self_attention (BloomAttention)", "")


def test_weights_that_are_no_numbers_are_named_by_all_stages(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"layers\.1\.mlp\.up_proj") as alone:
        load_base(run_of(str(tmp_path)), None, {"a": 70})
    for own in ranks(2).run(loaded, [str(tmp_path)], [1, 1]):
        assert own[0][0] == str(alone.value).replace(" in transformer.h.0.self_attention (BloomAttention)", "")


def test_a_layer_that_mixes_samples_is_found_on_whatever_stage_it_is(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    (folder,) = saved(tmp_path, ["llama"])
    for own in ranks(2).run(mixing, folder):
        assert "samples that are packed together see each other" in own


def mixing(rank: int, folder: str) -> str:
    """Of a model that mixes the tokens of a row on the first stage."""
    import packlora.pipeline.stages as stages

    prepare = stages.prepare_model

    def prepared(model: Any, checkpointing: bool) -> list[str]:
        notes = prepare(model, checkpointing)
        if rank == 0:
            model.model.layers[0].register_forward_hook(lambda module, args, y: y + y.mean(1, keepdim=True))
        return notes

    with mock.patch.object(stages, "prepare_model", prepared):
        return loaded(rank, [folder], [2, 2])[0][0]


def test_only_models_whose_layers_hand_hidden_states_on_are_cut() -> None:
    model = tiny_model("llama")
    assert layer_chain(model) == (64, torch.float32, [False, False])
    between = model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    with pytest.raises(InputError, match=r"a llama model cannot be cut into stages: its layers do .* \(layer 1\)"):
        layer_chain(model)
    between.remove()
    with pytest.raises(
        InputError, match="a llama model has 2 layers in its list of layers, and 3 in its configuration"
    ):
        check_stages(model, 3, {})
    check_stages(model, 2, {"a": ["model.layers.1.mlp.up_proj", "lm_head", "model.embed_tokens", "model.norm"]})
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**TINY, ffn_dim=64, word_embed_proj_dim=32))
    check_stages(opt, 2, {"a": ["model.decoder.layers.0.fc1", "model.decoder.project_in", "model.decoder.project_out"]})
    ends = {path: behind for path, behind in ends_of(opt).items() if "pro" in path}
    assert ends == {"model.decoder.project_in": False, "model.decoder.project_out": True}
    model.model.beside = torch.nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"job 'a': model.beside is neither in a layer of the decoder nor before or"):
        check_stages(model, 2, {"a": ["model.layers.1.mlp.up_proj", "model.beside"]})
