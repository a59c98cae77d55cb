"""Which first layers of a model show all that its layers do with the places of tokens: the others need no long proof."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TINY

from packlora.base.layer_kinds import first_layers, layers_of_each_kind
from packlora.base.model import load_base
from packlora.config import Run
from packlora.errors import InputError

SIX = TINY | {"num_hidden_layers": 6}
SLIDING, FULL = "sliding_attention", "full_attention"
LLAMA4 = {
    "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1,
    "attn_temperature_tuning": False,
    "no_rope_layer_interval": 1,
    "attention_chunk_size": 64, "moe_layers": [], "no_rope_layers": [0, 0, 0, 1, 0, 0],
    "layer_types": [*[FULL] * 3, "chunked_attention", FULL, FULL],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "alike": ("LlamaConfig", {}, 1),
    "every-third-is-another": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 64, "layer_types": [SLIDING, SLIDING, FULL] * 2},
        3,
    ),
    "windows-from-a-layer-on": (  # the fifth, which is named, counts apart
        "Qwen2Config", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 4}, 6,
    ),
    "experts-from-a-layer-on": (
        "DeepseekV3Config",
        {
            "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
            "q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
            "moe_intermediate_size": 32,
        },
        3,
    ),
    "one-with-chunks": ("Llama4TextConfig", LLAMA4, 4),
    "masks-of-its-own": (
        "GPTNeoConfig",
        {"num_layers": 6, "num_heads": 4, "attention_types": [[["global"] * 4 + ["local"] * 2, 1]], "window_size": 64},
        5,
    ),
}  # fmt: skip


def model_of(name: str, extra: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIX, **extra})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_layers_have_one_of_each_kind(kind: str) -> None:
    name, extra, count = MODELS[kind]
    assert layers_of_each_kind(model_of(name, extra)) == count


def other_number(layer: Any) -> None:
    layer.self_attn.look_back = 64


def other_function(layer: Any) -> None:
    layer.self_attn.scores = lambda q, k: q @ k


def other_buffer(layer: Any) -> None:
    layer.self_attn.register_buffer("slopes", torch.ones(4))


def other_class(layer: Any) -> None:
    layer.mlp.act_fn = torch.nn.GELU()


@pytest.mark.parametrize("change", [other_number, other_function, other_buffer, other_class])
def test_whatever_tells_a_layer_from_the_others_makes_it_a_kind(change: Callable[[Any], None]) -> None:
    model = model_of("LlamaConfig", {})
    change(model.model.layers[3])
    assert layers_of_each_kind(model) == 4


@pytest.mark.parametrize("held", [["a", "a", "a", "b", "a", "a"], (3,), 3], ids=["by-layer", "of-layers", "number"])
def test_so_does_what_the_model_holds_of_a_layer_outside_of_it(held: Any) -> None:
    model = model_of("LlamaConfig", {})
    model.model.layer_without_positions = held
    assert layers_of_each_kind(model) == (5 if held == 3 else 4)  # before the number, at it, behind it


def test_nothing_is_said_of_code_that_came_with_a_model() -> None:
    class Another(transformers.LlamaForCausalLM):
        pass

    assert layers_of_each_kind(Another(transformers.LlamaConfig(**SIX))) is None


def test_a_model_runs_by_its_first_layers_and_has_all_of_them_afterwards() -> None:
    model, ids = model_of("LlamaConfig", {}), torch.arange(9)[None]
    every, last = model.model.layers, model.model.layers[-1]
    ran: list[Any] = []
    for layer in every:
        layer.register_forward_hook(lambda module, *_: ran.append(module))
    with torch.no_grad(), first_layers(model, 2):
        model(input_ids=ids)
    assert ran == [*every][:2]
    with pytest.raises(IndexError), torch.no_grad(), first_layers(model, 2):
        model(input_ids=ids + 320)
    assert model.model.layers is every and every[-1] is last and len(every) == 6


@pytest.mark.parametrize(("longest", "refused"), [(64, False), (65, True)])
def test_a_kind_that_one_late_layer_has_decides_for_long_samples(longest: int, refused: bool, tmp_path: Path) -> None:
    """The fourth of six layers sees chunks of 64 tokens."""
    model_of("Llama4TextConfig", LLAMA4).save_pretrained(tmp_path)
    jobs = [{"name": "x", "data": {"path": "x"}}]
    run = Run.model_validate(
        {"base_model": str(tmp_path), "output_dir": "x", "device": "cpu", "dtype": "float32", "jobs": jobs}
    )
    if refused:
        with pytest.raises(InputError, match=r"more than 64 tokens: beyond that model.layers.3"):
            load_base(run, None, {"x": longest})
    else:
        assert not load_base(run, None, {"x": longest}).warnings


def test_a_long_sample_goes_through_the_first_layers_and_short_ones_through_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the proof costs: by tokens that the last layer is given."""
    model_of("LlamaConfig", {}).save_pretrained(tmp_path)
    seen: dict[int, list[int]] = {}
    own = transformers.models.llama.modeling_llama.LlamaMLP.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.setdefault(id(self), []).append(x.shape[1])
        return own(self, x)

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaMLP, "forward", forward)
    run = {"base_model": str(tmp_path), "output_dir": "x", "device": "cpu", "dtype": "float32"}
    base = load_base(Run.model_validate(run | {"jobs": [{"name": "x", "data": {"path": "x"}}]}), None, {"x": 900})
    first, *_, last = (seen[id(layer.mlp)] for layer in base.model.model.layers)
    assert sum(last) <= 8 * 48
    assert sum(length >= 900 for length in first) == 2
