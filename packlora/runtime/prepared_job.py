"""Knowledge of a job and of the model before anything is loaded that has weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import is_experts
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.weights import shapes_at
from packlora.base.shape import decoder_layers
from packlora.config import JobConfig
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded
from packlora.data.prompts import Prompt
from packlora.engine.objectives.configured import objective_of

AUTO_BUDGET = {"cpu": 2048, "cuda": 8192, "mps": 2048}
"""Tokens of a microbatch for max_tokens_per_microbatch: auto, by device, where no sample is longer and nothing better is
known (profiler.py)."""

LEFT_OUT = "is left out, the others go on"


@dataclass(slots=True)
class PreparedJob:
    """A checked job: its samples in order, its adapter's layers."""

    config: JobConfig
    data: JobData
    encoded: Encoded
    eval_encoded: Encoded
    spec: AdapterSpec
    trainable: int
    """Parameters of its adapter."""
    active: int
    """Parameters of its adapter that one token meets; of experts those that it goes to."""
    prompts: list[Prompt] = field(default_factory=list)
    most: int = 0
    """Tokens that a sample of a stream may have."""
    on_experts: int = 0
    """Parameters of its adapter that are on experts."""
    router_coefficient: float = 0.0
    """Coefficient of its load-balancing loss; 0: it has none."""
    products: Mapping[str, int] = field(default_factory=dict)
    """See products_kept."""
    chat_template: str | None = None
    """Text of its own chat template; None: it has that of the base model."""

    @property
    def active_on_experts(self) -> int:
        """Parameters on experts that one token meets."""
        return self.active - (self.trainable - self.on_experts)

    @property
    def beside_texts(self) -> str | None:
        """Word for what its data has beside texts; None where it has texts alone."""
        samples = self.encoded.samples + self.eval_encoded.samples
        return next((sample.extras.kind for sample in samples if sample.extras is not None), None)

    @property
    def longest(self) -> int:
        """Tokens of the longest part of a sample, also of those held out."""
        return max([self.most, *(n for s in self.encoded.samples + self.eval_encoded.samples for n in s.part_lengths)])

    @property
    def longest_estimated(self) -> int:
        """Tokens of the longest sample that its objective makes of the others; 0 where it makes none."""
        return objective_of(self.config.train).longest_of(self.encoded.samples + self.eval_encoded.samples)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a base model that its time and memory depend on.

    parameters: of the model; linear_parameters: of its linear layers without the output layer. attention, key_value: widths of
    queries and of keys. inner: width inside the MLP, 0 where experts are in its place. head_norms: queries and keys have norms
    of their own (Qwen 3). largest, outputs: of those linear layers, the most numbers of one and the outputs of all.
    routed_parameters: of the experts that one token goes to, of all layers; routed_width: numbers that go into them and come
    out of them, by layer. expert_parameters: of all experts; experts: how many there are in a layer, those of all layers that
    differ. layer_numbers: by layer of the decoder, its parameters, and those of its linear layers and of the experts that one
    token goes to; empty where they are not known.
    """

    model_type: str
    parameters: int
    linear_parameters: int
    layers: int
    hidden: int
    attention: int
    key_value: int
    inner: int
    vocabulary: int
    head_norms: bool = False
    largest: int = 0
    outputs: int = 0
    routed_parameters: int = 0
    routed_width: int = 0
    expert_parameters: int = 0
    experts: tuple[int, ...] = ()
    layer_numbers: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def of(model: PreTrainedModel) -> ModelShape:
        config = model.config.get_text_config()
        hidden = number_of(config, "hidden_size", 1)
        heads = number_of(config, "num_attention_heads", 1)
        head_dim = number_of(config, "head_dim", hidden // heads)
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
        layers = number_of(config, "num_hidden_layers", 1)
        weights = [p for module in model.modules() if is_experts(module) for p in module.parameters() if p.ndim == 3]
        top_k = number_of(config, "num_experts_per_tok", 1)
        inner = number_of(config, "intermediate_size", number_of(config, "ffn_dim", 4 * hidden))
        if weights:  # few models with experts have a dense MLP as well, or experts that are shared
            dense = [module for path, module in model.named_modules() if path.endswith(".down_proj")]
            inner = max((own.in_features for own in dense if isinstance(own, torch.nn.Linear)), default=0)
        return ModelShape(
            model.config.model_type,
            sum(parameter.numel() for parameter in model.parameters()),
            sum(module.weight.numel() for module in linear),
            layers,
            hidden,
            heads * head_dim,
            number_of(config, "num_key_value_heads", heads) * head_dim,
            inner,
            model.get_input_embeddings().weight.shape[0],
            any(name.endswith("q_norm") for name, _ in model.named_modules()),
            max((module.weight.numel() for module in linear), default=0),
            sum(module.out_features for module in linear),
            sum(weight.numel() // len(weight) for weight in weights) * top_k,
            sum(sum(weight.shape[1:]) for weight in weights) * top_k // layers,
            sum(weight.numel() for weight in weights),
            tuple(sorted({len(weight) for weight in weights})),
            _layer_numbers(model, layers, top_k),
        )


def _layer_numbers(model: PreTrainedModel, layers: int, top_k: int) -> tuple[tuple[int, int], ...]:
    """See ModelShape."""
    out = []
    for layer in decoder_layers(model).values():
        linear = sum(one.weight.numel() for one in layer.modules() if isinstance(one, torch.nn.Linear))
        weights = [p for module in layer.modules() if is_experts(module) for p in module.parameters() if p.ndim == 3]
        routed = sum(weight.numel() // len(weight) for weight in weights) * top_k
        out.append((sum(parameter.numel() for parameter in layer.parameters()), linear + routed))
    return tuple(out) if len(out) == layers else ()


def number_of(config: Any, name: str, otherwise: int) -> int:
    """Read a number from a configuration; the mean where layers differ: as a list (Gemma 3n), or in configurations of their own
    (Gemma 4)."""
    values = [getattr(layer, name, None) for layer in getattr(config, "per_layer_config", None) or [config]]
    numbers = [n for value in values for n in (value if isinstance(value, list | tuple) else [value]) if n]
    return round(sum(numbers) / len(numbers)) if numbers else otherwise


def products_kept(spec: AdapterSpec, model: PreTrainedModel) -> dict[str, int]:
    """Count, by path of a module with DoRA but for the output layer, the numbers of a token's product, of which the gradient of
    the magnitude is made; of experts the products of all that a token goes to."""
    out, head = dict[str, int](), model.get_output_embeddings()
    top_k = number_of(model.config.get_text_config(), "num_experts_per_tok", 1)
    for path, module in spec.modules.items():
        if not (module.use_dora and module.rank) or module.kind not in ("linear", "experts"):
            continue
        if module.kind == "experts" or model.get_submodule(path) is not head:
            width = shapes_at(model, path, module)["magnitude"][-1]
            out[path] = width * (top_k if module.kind == "experts" else 1)
    return out


def trainable_parameters(spec: AdapterSpec, model: torch.nn.Module, top_k: int | None = None) -> int:
    """Number of parameters of an adapter on the model, which may be without weights. top_k: of so many experts of a layer."""
    total = 0
    for path, module in spec.modules.items():
        own = sum(math.prod(shape) for shape in shapes_at(model, path, module).values())
        if module.kind == "experts" and top_k is not None:
            experts: Any = model.get_submodule(path.rpartition(".")[0])
            own = own * top_k // experts.num_experts
        total += own
    return total
