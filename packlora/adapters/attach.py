"""Put the adapters of several jobs onto one model.

Adapted linear layers are replaced in place by AdaptedLinear; everything else of the model is left alone and frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from packlora.adapters.in_place import watched
from packlora.adapters.linear import AdaptedLinear, AdapterWeights, Call, Router, Tokens, compute
from packlora.adapters.norms import RowNorms
from packlora.adapters.outputs import untouched_outputs
from packlora.adapters.recipes import add_recipes
from packlora.adapters.siblings import SiblingGroup, sibling_groups
from packlora.adapters.spec import AdapterSpec
from packlora.ops.dropout.keys import layer_salt
from packlora.ops.lora_linear.plan import CHAIN, Plan
from packlora.ops.lora_linear.types import Layer, Segment
from packlora.plans.select import Planner
from packlora.runtime.collate import MIN_ROWS
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


def attach(
    model: PreTrainedModel, specs: dict[str, AdapterSpec], seed: int | Mapping[str, int], planner: Planner | None = None
) -> tuple[Router, list[Adapter]]:
    """Freeze the model and attach one adapter per job.

    Initial values depend on (seed, module path) alone: a job starts the same whatever it is called and is trained beside.

    Args:
        model: gets its adapted layers replaced, in place.
        specs: by job name, from spec.resolve on this model.
        seed: of every adapter, or by job name.
        planner: chooses how layers are computed; by default from what is known of the device.
    """
    model.requires_grad_(False)
    router = Router(planner or Planner(model.device))
    layers: dict[str, AdaptedLinear] = {}
    norms = RowNorms()
    groups = shared_inputs(model)
    seeds = dict.fromkeys(specs, seed) if isinstance(seed, int) else seed
    adapters = []
    for number, (job, spec) in enumerate(specs.items()):
        weights = {}
        for path, module_spec in spec.modules.items():
            if path not in layers:
                layers[path] = _replace(model, path, groups.get(path, (path,))[0], router)
            weights[path] = AdapterWeights(
                module_spec, layers[path].base, stable_hash("start", seeds[job], path), norms
            )
            layers[path].adapters[number] = weights[path]
        adapters.append(Adapter(job, number, spec, weights))
    for paths in set(groups.values()):
        members = [layers[path] for path in paths if path in layers]
        if len(members) > 1:
            group = SiblingGroup(members, compute, Call)
            group.attach(model.get_submodule(paths[0].rpartition(".")[0]))
            for index, member in enumerate(members):
                member.siblings, member.index = group, index
    if model.device.type == "cuda":  # where activations are what memory goes to
        add_recipes(model)
    return router, adapters


class _Plain(Planner):
    """For a few tokens nothing is compiled."""

    def plan_of(self, x_TK: torch.Tensor, layers: Sequence[Layer], runs: Sequence[Segment]) -> Plan:
        return CHAIN


WATCHED = ((MIN_ROWS,), (MIN_ROWS + 1, 2 * MIN_ROWS + 7))
"""Lengths of the samples of each run that keep_outputs watches."""


def keep_outputs(model: PreTrainedModel, router: Router, adapters: Sequence[Adapter]) -> str | None:
    """Let DoRA layers whose outputs nobody writes into keep these for the gradient of the magnitude, in the place of a product
    as large beside them. Found by running every DoRA adapter forward and backward on a few tokens.

    Args:
        model, router, adapters: of attach, with their first values, ready to train.

    Returns:
        What was found, in words; None where no layer has DoRA.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, AdaptedLinear)}
    with_dora = [
        (adapter.number, [path for path, own in adapter.weights.items() if own.magnitude is not None])
        for adapter in adapters
    ]
    every = dict.fromkeys(path for _, paths in with_dora for path in paths)
    if not every:
        return None
    wanted = [path for path in every if _may_keep(layers[path])]
    others = len(every) - len(wanted)
    because = f"; {others} with a bias, dropout or a magnitude of 0 keep a product" if others else ""
    planner, router.planner = router.planner, _Plain(model.device)

    def watch() -> set[str]:
        kept = set(wanted)
        for lengths in WATCHED:
            example = _packed(model, lengths)
            for number, paths in with_dora:
                if own := [path for path in paths if path in kept]:
                    with router.route(Tokens(sum(lengths), ((number, 0, sum(lengths)),))):
                        kept -= set(own) - untouched_outputs(model, own, [example]).keys()
        return kept

    try:
        kept, _ = watched(model, wanted, watch) if wanted else (set[str](), 0)
    except Exception as error:  # any model, any error: products are kept then
        return f"DoRA: outputs are not kept, the run that watches them failed ({type(error).__name__}: {error})"
    finally:
        router.planner = planner
        router.forget()
    for path in kept:
        layers[path].keep_output = True
    return f"DoRA: {len(kept)} of {len(every)} layers keep their output for the gradient of the magnitude{because}"


def _may_keep(layer: AdaptedLinear) -> bool:
    """Whether an output can stand in for the product: with a bias the difference would cost digits, dropout on the base product
    makes two products, and where a magnitude is 0 the output tells nothing."""
    return layer.bias is None and not any(
        own.bias is not None
        or (own.magnitude is not None and ((own.spec.dropout > 0 and own.spec.base_dropped) or not own.magnitude.all()))
        for own in layer.adapters.values()
    )


def _packed(model: PreTrainedModel, lengths: Sequence[int]) -> dict[str, Any]:
    """Keyword arguments for packed samples of these lengths."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (1, sum(lengths)), generator=torch.Generator().manual_seed(0)).to(model.device)
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, "sample_lengths": tuple(lengths)}


def shared_inputs(model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """For every linear layer that has siblings, the paths of its group in the order of their calls.

    All linear layers of the base model are looked at, adapted or not: the group, whose first path names its dropout mask,
    does not depend on which jobs there are.
    """
    paths = [path for path, module in model.named_modules() if type(module) is torch.nn.Linear]
    ids = torch.arange(MIN_ROWS, device=model.device)[None]
    example = {"input_ids": ids, "position_ids": ids, "use_cache": False, "sample_lengths": (MIN_ROWS,)}
    return {path: group for group in sibling_groups(model, paths, example) for path in group}


def _replace(model: PreTrainedModel, path: str, salt: str, router: Router) -> AdaptedLinear:
    parent_path, _, leaf = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    base = getattr(parent, leaf)
    assert type(base) is torch.nn.Linear
    layer = AdaptedLinear(base, layer_salt(salt), router)
    setattr(parent, leaf, layer)
    return layer
