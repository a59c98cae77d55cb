"""Put the adapters of several jobs onto one model.

Adapted linear layers are replaced in place by AdaptedLinear; everything else of the model is left alone and frozen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from packlora.adapters.linear import AdaptedLinear, AdapterWeights, Router
from packlora.adapters.spec import AdapterSpec
from packlora.seeding import stable_hash


@dataclass(slots=True)
class Adapter:
    """One job's adapter on the model: its number in the router and its weights by module path."""

    name: str
    number: int
    spec: AdapterSpec
    weights: dict[str, AdapterWeights]

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """All trainable parameters, as `module path/A` and so on, in model order."""
        return {
            f"{path}/{name}": parameter
            for path, weights in self.weights.items()
            for name, parameter in weights.named_parameters().items()
        }

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.named_parameters().values())


def attach(model: PreTrainedModel, specs: dict[str, AdapterSpec], seed: int) -> tuple[Router, list[Adapter]]:
    """Freeze the model and attach one adapter per job.

    Initial values depend on (seed, job, module path) alone: a job starts the same whatever is trained beside it.

    Args:
        model: gets its adapted layers replaced, in place.
        specs: by job name, from spec.resolve on this model.
        seed: of the run.
    """
    model.requires_grad_(False)
    router = Router()
    layers: dict[str, AdaptedLinear] = {}
    adapters = []
    for number, (job, spec) in enumerate(specs.items()):
        weights = {}
        for path, module_spec in spec.modules.items():
            if path not in layers:
                layers[path] = _replace(model, path, router)
            weights[path] = AdapterWeights(module_spec, layers[path].base, stable_hash(seed, job, path))
            layers[path].adapters[number] = weights[path]
        adapters.append(Adapter(job, number, spec, weights))
    return router, adapters


def _replace(model: PreTrainedModel, path: str, router: Router) -> AdaptedLinear:
    parent_path, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    base = getattr(parent, leaf)
    assert type(base) is torch.nn.Linear
    layer = AdaptedLinear(base, path, router)
    setattr(parent, leaf, layer)
    return layer
