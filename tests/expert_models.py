"""Tiny random models with experts, and a way to run them wholly in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from conftest import TINY

_ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", _ROUTED | {"shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", _ROUTED | {"head_dim": 16}),
    "qwen3_next": ("Qwen3NextConfig", _ROUTED | {
        "head_dim": 16, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    }),
    "deepseek_v2": ("DeepseekV2Config", _DEEPSEEK),
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "head_dim": 16, "num_experts_per_tok": 2}),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4}),
    "llama4": ("Llama4TextConfig", {"num_local_experts": 4, "intermediate_size_mlp": 32, "head_dim": 16}),
}  # fmt: skip


def tiny_experts(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """A random model whose weights are large enough that every part of it matters to the logits."""
    name, extra = MODELS[family]
    config = getattr(transformers, name)(**{**TINY, **extra, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).to(dtype)
    return _spread(model, dtype)


def _spread(model: Any, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            spread = 0.2 if tensor.ndim > 1 else 0.1
            tensor.add_((torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * spread).to(dtype))
    return model


def whole_llama_4(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """As it is published, with a vision tower. Skips the test where transformers itself cannot run it, as 5.24.0 cannot."""
    vision = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    text = {**TINY, **MODELS["llama4"][1], **changes}
    config = transformers.Llama4Config(
        text_config=text, vision_config=vision, image_token_index=300, boi_token_index=301, eoi_token_index=302
    )
    torch.manual_seed(0)
    model = transformers.Llama4ForConditionalGeneration(config)
    for parameter in model.parameters():  # it has complex buffers
        parameter.data = parameter.data.to(dtype)
    try:
        model(input_ids=torch.tensor([[5, 7]]), use_cache=False)
    except AttributeError as error:
        pytest.skip(f"transformers {transformers.__version__} runs no whole Llama 4: {error}")
    return _spread(model, dtype)


@contextmanager
def in_float64() -> Iterator[None]:
    """What a model does in float32 whatever its own type is, norms and routers, is done in float64."""

    def wide(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            changed = {key: torch.float64 if value is torch.float32 else value for key, value in kwargs.items()}
            return function(*(torch.float64 if value is torch.float32 else value for value in args), **changed)

        return call

    with ExitStack() as stack:
        for owner, name in (
            (torch.Tensor, "to"), (torch.Tensor, "type"), (torch.Tensor, "softmax"), (torch.nn.functional, "softmax")
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, wide(getattr(owner, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield
