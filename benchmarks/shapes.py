"""Shapes of published models, and frozen models of these shapes with random bfloat16 weights."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def _shape(
    kind: str, width: int, inner: int, layers: int, heads: int, kv: int, words: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": words, "tie_word_embeddings": False,
        "max_position_embeddings": 8192, **more,
    }  # fmt: skip


_ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_QWEN3: dict[str, Any] = {"head_dim": 128, **_ROPE}
_SMALL: dict[str, Any] = {**_QWEN3, "tie_word_embeddings": True}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": _shape("llama", 4096, 14336, 32, 32, 8, 128256),
    "Llama-3.1-70B": _shape("llama", 8192, 28672, 80, 64, 8, 128256),
    "Qwen2.5-7B": _shape("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-32B": _shape("qwen2", 5120, 27648, 64, 40, 8, 152064, **_ROPE),
    "Qwen3-0.6B": _shape("qwen3", 1024, 3072, 28, 16, 8, 151936, **_SMALL),
    "Qwen3-1.7B": _shape("qwen3", 2048, 6144, 28, 16, 8, 151936, **_SMALL),
    "Qwen3-4B": _shape("qwen3", 2560, 9728, 36, 32, 8, 151936, **_SMALL),
    "Qwen3-8B": _shape("qwen3", 4096, 12288, 36, 32, 8, 151936, **_QWEN3),
    "Qwen3-14B": _shape("qwen3", 5120, 17408, 40, 40, 8, 151936, **_QWEN3),
    "Qwen3-32B": _shape("qwen3", 5120, 25600, 64, 64, 8, 151936, **_QWEN3),
    "Qwen3-30B-A3B": _shape(
        "qwen3_moe", 2048, 6144, 48, 32, 4, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, experts_implementation="grouped_mm",
    ),
    "llama60m": _shape("llama", 512, 1376, 8, 8, 8, 32000),
    "llama250m": _shape("llama", 768, 2560, 24, 16, 16, 32000),
    "llama1_3b": _shape("llama", 2048, 5461, 24, 32, 32, 32000),
}  # fmt: skip
"""The last three are RunLoRA's."""
SHORT = {"8B": "Llama-3.1-8B", "70B": "Llama-3.1-70B", "32B": "Qwen2.5-32B", "0.6B": "Qwen3-0.6B", "1.7B": "Qwen3-1.7B"}
"""Shapes by the words of cases."""
TINY: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
TINY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def config_of(shape: str, tiny: bool = False, layers: int | None = None, **changes: Any) -> PreTrainedConfig:
    """The configuration of one of SHAPES.

    Args:
        tiny: toy sizes, for a CPU.
        layers: None for all.
        changes: other keys of the configuration.
    """
    values = dict(SHAPES[shape])
    if tiny:
        values |= TINY | (TINY_EXPERTS if "num_experts" in values else {})
    if layers is not None:
        values["num_hidden_layers"] = layers
    config: PreTrainedConfig = AutoConfig.for_model(
        values.pop("model_type"), **values | changes, use_cache=False, attn_implementation="sdpa"
    )
    return config


def spread(name: str, layers: int) -> float:
    """Standard deviation of a random weight of a model with so many layers.

    Hidden states of a deep model with weights of one size are mostly rounding, and its proof of packing fails; so embeddings
    are large, and what a layer adds is small.
    """
    if "embed_tokens" in name:
        return 1.0
    return 0.02 * (2 * layers) ** -0.5 if "o_proj" in name or "down_proj" in name else 0.02


def build(config: PreTrainedConfig, device: torch.device, make: Any = AutoModelForCausalLM.from_config) -> Any:
    """A frozen model with random bfloat16 weights, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = make(config)
    finally:
        torch.set_default_dtype(before)
    return model.requires_grad_(False).train()


def build_layers(config: PreTrainedConfig, device: torch.device, layer_of: Callable[[torch.Tensor], nn.Module]) -> Any:
    """A frozen model with random bfloat16 weights, made on the device tensor by tensor, so that the floats of one linear layer
    are there at a time.

    Args:
        layer_of: gives the module in the place of a linear layer, but for the output layer, of its weight [N, K].
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def drawn(own: torch.Tensor) -> torch.Tensor:
        made = torch.empty(own.shape, dtype=own.dtype, device=device)
        return made.fill_(1) if own.ndim == 1 else made.normal_(0, config.initializer_range)

    head = model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            model.set_submodule(path, layer_of(drawn(module.weight)))
            continue
        for name, own in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(drawn(own), requires_grad=False))
    model.tie_weights()
    rotary = model.base_model.rotary_emb  # its buffers are made from the configuration
    model.base_model.rotary_emb = type(rotary)(config).to(device)
    return model.requires_grad_(False)


def shared_copy(model: nn.Module) -> Any:
    """A copy with modules of its own over the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def stored_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


class OneLayer(nn.Module):
    """One decoder layer of a Llama or Qwen2 model, with causal attention inside each sample."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        kind = config.model_type
        modeling: Any = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        self.layer = getattr(modeling, f"{kind.capitalize()}DecoderLayer")(config, 0)
        weight = next(self.layer.parameters())
        positions = torch.arange(config.max_position_embeddings, device=weight.device)[None]
        rotary = getattr(modeling, f"{kind.capitalize()}RotaryEmbedding")(config)
        self.cos, self.sin = (table.detach() for table in rotary(weight, positions))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        y: torch.Tensor = self.layer(
            x, attention_mask=None, position_embeddings=(self.cos[:, :length], self.sin[:, :length])
        )
        return y


def use_liger(device: torch.device) -> str:
    """Let liger-kernel replace its parts of transformers on a GPU, for good; returns what was done."""
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        return "Without liger-kernel"
    liger = importlib.import_module("liger_kernel.transformers")
    for kind in ("llama", "qwen2", "qwen3"):
        getattr(liger, f"apply_liger_kernel_to_{kind}")()
    return f"With liger-kernel {version('liger-kernel')} (RMSNorm, RoPE, SwiGLU, fused linear cross entropy)"
