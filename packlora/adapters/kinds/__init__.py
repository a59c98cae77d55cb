"""Kinds of what can be trained on a module of the base model; matching, attaching, files and merging go by it, and so does
what stands in the place of a PEFT layer's forward (live/).

    kind      base module                                               what a job has there
    linear    torch.nn.Linear, quantised, in slices, Conv1D, Falcon's   A [r, K], B [N, r], magnitude [N], bias [N]
    experts   one weight of all experts of a layer                      A [E r, K], B [N, r E], magnitude [E, N]
    router    a weight that a router multiplies with                    as linear, without a bias

All others are modules of this folder, found by their names and imported where a job has one; adapters/routed.py says what they
have. Experts and routers are known by the path of the parameter, all others by that of the module.

Shapes: N outputs, K inputs, r rank, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from packlora.adapters.expert_layout import is_experts
from packlora.adapters.slices import slice_of
from packlora.ops.lora_linear.frozen import FrozenLinear

Kind = str
OF_THE_OPERATOR = ("linear", "experts", "router")
"""Kinds that the operators of ops/ compute; all others are modules of this folder."""
PARAMETERS = ("experts", "router")
"""Kinds that are known by the path of a parameter."""
AS_LINEAR = ("transformers.models.falcon.modeling_falcon.FalconLinear",)
"""Classes derived from torch.nn.Linear that compute the same."""
PREFIX = "base_model.model."
"""Beginning of keys in the files of PEFT, before the module's path."""
LOW_RANK = {
    "A": "lora_A.weight", "B": "lora_B.weight", "magnitude": "lora_magnitude_vector", "bias": "base_layer.bias",
}  # fmt: skip
"""End of a parameter's key in the files of PEFT, after the module's path, for low-rank adapters of linear layers."""


def routed(kind: Kind) -> Any:
    """The class of the weights of a kind that is a module of this folder, see routed.py."""
    return import_module(f"{__name__}.{kind}").Weights


def every_kind() -> list[Kind]:
    """Names of the modules of this folder."""
    return [module.name for module in iter_modules(__path__)]


def is_routed(kind: Kind) -> bool:
    """Whether a kind is a module of this folder."""
    return kind not in OF_THE_OPERATOR


def suffixes(kind: Kind) -> Mapping[str, str]:
    """End of a parameter's key by its name, in the files of PEFT, after the module's path."""
    found: Mapping[str, str] = routed(kind).suffixes if is_routed(kind) else LOW_RANK
    return found


def owners(key: str) -> list[str]:
    """Paths of modules that a key of a file may be a tensor of, the longest first."""
    parts = key.removeprefix(PREFIX).split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def is_of_images(kind: Kind) -> bool:
    """Whether a module of a vision tower can be of this kind."""
    return kind == "linear" or (is_routed(kind) and routed(kind).of_images)


def is_known_linear(module: torch.nn.Module) -> bool:
    """Whether a module is torch's linear layer, a slice of one, or one with another frozen weight; others' classes are not."""
    return type(module) is torch.nn.Linear or isinstance(module, FrozenLinear) or slice_of(module) is not None


def kind_of(module: torch.nn.Module) -> Kind | None:
    """The kind of low-rank adapter that a base module takes."""
    if is_linear(module):
        return "linear"
    return next((kind for kind in every_kind() if routed(kind).takes(module)), None)


def kind_of_parameter(owner: torch.nn.Module, name: str) -> Kind:
    """The kind of low-rank adapter that a parameter of a base module takes; of a router, if it takes any."""
    if is_known_linear(owner) and name == "weight":
        return "linear"
    return "experts" if is_experts(owner) else "router"


def is_linear(module: torch.nn.Module) -> bool:
    return is_known_linear(module) or type(module) is Conv1D or _qualified(module) in AS_LINEAR


def sizes(module: Any) -> tuple[int, int]:
    """[N, K] of a linear layer, [D, V] of an embedding."""
    if type(module) is Conv1D:
        return int(module.nf), int(module.nx)
    if isinstance(module, torch.nn.Embedding):
        return module.embedding_dim, module.num_embeddings
    return int(module.out_features), int(module.in_features)


def lies_transposed(module: torch.nn.Module) -> bool:
    """Whether the weight of a linear layer is [K, N]."""
    return type(module) is Conv1D


def as_linear(module: Any) -> torch.nn.Linear:
    """A linear layer of a kind as torch has it: itself where it is one, else one with its parameters; a weight that lies
    transposed is copied."""
    if is_known_linear(module):
        return module  # type: ignore[no-any-return]
    N, K = sizes(module)
    layer = torch.nn.Linear(K, N, module.bias is not None, device="meta")
    weight = module.weight.detach().T.contiguous() if lies_transposed(module) else module.weight
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    if module.bias is not None:
        layer.bias = module.bias
    return layer


def why_no_rows(embedding: torch.nn.Embedding) -> str | None:
    """Why nothing can be trained on an embedding."""
    for name, unused in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
        if getattr(embedding, name) != unused:
            return f"an embedding with {name}"
    return None


def _qualified(module: torch.nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
