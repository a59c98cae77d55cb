"""Adapters of experts in PEFT's files: one A, one B and one magnitude for all experts of a layer, named by the parameter that
transformers has their weights in.

    <layer>.mlp.experts.base_layer.lora_A.weight  [E r, K]     of mlp.experts.gate_up_proj (up_proj without gates)
    <layer>.mlp.experts.base_layer.lora_B.weight  [N, r E]
    <layer>.mlp.experts.lora_A.weight             [E r, K]     of mlp.experts.down_proj
    ...                    lora_magnitude_vector.weight [E, N]

A has one expert's ranks after the other's, in B the expert's number runs fastest. Where one of both weights is adapted, it has
the names of the last one. Gate and up are one layer here and one parameter there, with one A.

Shapes: E experts, r rank, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from packlora.errors import InputError
from packlora.megatron.targets import is_expert

Tensors = dict[str, torch.Tensor]
OWNER = "mlp.experts"
DOWN = "down_proj"


def place_of(path: str, config: Any) -> tuple[str, str, int] | None:
    """(module, parameter, expert) in transformers' model of a layer of Megatron-Core; None for a layer that belongs to no
    expert."""
    if not is_expert(path):
        return None
    head, _, rest = path.partition(".local_experts.")
    number, _, leaf = rest.partition(".")
    at = head.removeprefix("decoder.layers.").removesuffix(f".{OWNER}")
    if not at.isdigit() or leaf not in ("linear_fc1", "linear_fc2"):
        return None
    first = "gate_up_proj" if config.gated_linear_unit else "up_proj"
    return f"model.layers.{at}.{OWNER}", DOWN if leaf == "linear_fc2" else first, int(number)


# --- out --------------------------------------------------------------------------------------------------------------


def stacked(
    whole: Mapping[str, Tensors], told: Mapping[str, tuple[int, float]], config: Any, name: str
) -> tuple[dict[str, Tensors], dict[str, tuple[int, float]]]:
    """The tensors of all experts by the module's path in PEFT's files, and by the parameter's path rank and scaling.

    Args:
        whole: tensors by the names of Megatron-Core's layers, of all processes; others than experts are left out.
        told: rank and scaling of each.
        config: of the model.

    Raises:
        InputError: some of a layer's experts have no adapter.
    """
    found: dict[str, dict[str, dict[int, str]]] = {}
    for path in whole:
        if place := place_of(path, config):
            found.setdefault(place[0], {}).setdefault(place[1], {})[place[2]] = path
    tensors: dict[str, Tensors] = {}
    specs: dict[str, tuple[int, float]] = {}
    for owner, parameters in found.items():
        for parameter, paths in parameters.items():
            missing = sorted(set(range(config.num_moe_experts)) - paths.keys())
            if missing:
                raise InputError(
                    f"adapter {name!r}: expert {missing[0]} of {owner} has none (and {len(missing) - 1} more); PEFT's format "
                    "has all experts of a layer or none"
                )
            inner = parameter != DOWN and DOWN in parameters
            own, spec = _stack([(whole[paths[at]], told[paths[at]]) for at in sorted(paths)])
            tensors[f"{owner}.base_layer" if inner else owner] = own
            specs[f"{owner}.{parameter}"] = spec
    return tensors, specs


def _stack(experts: list[tuple[Tensors, tuple[int, float]]]) -> tuple[Tensors, tuple[int, float]]:
    """Stack the experts' tensors of one weight. The result has the first expert's scaling; B absorbs the ratio of the
    others'."""
    rank, scaling = experts[0][1]
    out = {
        "A": torch.cat([own["A"] for own, _ in experts]),
        "B": torch.stack([own["B"] * (spec[1] / scaling) for own, spec in experts], -1).flatten(1),
    }
    if "magnitude" in experts[0][0]:
        out["magnitude"] = torch.stack([own["magnitude"] for own, _ in experts])
    return out, (rank, scaling)


def parameter_names(specs: Iterable[str], known: Iterable[str]) -> set[str]:
    """target_parameters of adapted parameters: without the layer's number where all layers' are adapted.

    known: all parameters of the model that could be.
    """

    def short(path: str) -> str:
        return ".".join(path.split(".")[3:])

    adapted = set(specs)
    lacking = {short(path) for path in set(known) - adapted}
    return {path if short(path) in lacking else short(path) for path in adapted}


# --- in ---------------------------------------------------------------------------------------------------------------


def source_of(
    by_part: Mapping[str, Tensors], targets: Collection[str] | None, path: str, config: Any
) -> tuple[str, str] | None:
    """(module of the file, parameter) from which an expert's adapter is read; None where the file has none in this form.

    targets: the file's target_parameters. config: of the model.
    """
    place = place_of(path, config)
    if place is None:
        return None
    owner, parameter, _ = place
    two = f"{owner}.base_layer" in by_part
    if two:
        return (owner if parameter == DOWN else f"{owner}.base_layer"), f"{owner}.{parameter}"
    named = any(f"{owner}.{parameter}".endswith(target) for target in targets or ())
    return (owner, f"{owner}.{parameter}") if named and owner in by_part else None


def own_of(tensors: Tensors, experts: int, number: int, rank: int) -> Tensors:
    """Tensors of one expert. Those of all have the shapes of `stacked_shapes`."""
    out = {
        "A": tensors["A"].unflatten(0, (experts, rank))[number],
        "B": tensors["B"].unflatten(1, (rank, experts))[..., number],
    }
    return out | {key: tensors[key][number] for key in tensors.keys() & {"magnitude"}}


def stacked_shapes(own: Mapping[str, tuple[int, ...]], experts: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of all experts, from those of one."""
    (rank, inputs), (rows, _) = own["A"], own["B"]
    shapes: dict[str, tuple[int, ...]] = {"A": (experts * rank, inputs), "B": (rows, rank * experts)}
    return shapes | {"magnitude": (experts, rows)} if "magnitude" in own else shapes
