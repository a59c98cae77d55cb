"""Values of a model, parameters and optimizer: read from files and taken by the model, and made whole for files.

Where a process holds slices of the base model, it takes its slices of whole tensors; `parameters` and `moments` join those of
all processes, which call them together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from packlora.adapters.attach import Adapter
from packlora.adapters.reading import read_adapter
from packlora.engine.adapters import AdapterState
from packlora.engine.memory import launched
from packlora.errors import InputError

OPTIMIZER = "optimizer.safetensors"
STEPS, SCALE = "steps", "loss_scale"
"""Numbers beside the optimizer's tensors: steps, and the state of float16's loss scale as JSON."""


@dataclass(frozen=True, slots=True)
class Values:
    """Whole tensors of a model.

    parameters: by name. moments: of the optimizer, by name of the parameter and by leaf; none before the first step.
    numbers: texts, see STEPS.
    """

    parameters: Mapping[str, torch.Tensor]
    moments: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps that the model has taken."""
        return int(self.numbers.get(STEPS, 0))


def read_folder(folder: Path, adapter: Adapter, optimizer: bool) -> Values:
    """Values of an adapter folder. optimizer: with those of the optimizer. Raises InputError, OSError."""
    stored, numbers = _read(folder / OPTIMIZER) if optimizer else ({}, {})
    return Values(read_adapter(folder, adapter), _by_name(stored), numbers)


def read_snapshot(file: Path) -> Values:
    """Values of a snapshot. Raises as read_folder."""
    tensors, numbers = _read(file)
    kinds: dict[str, dict[str, torch.Tensor]] = {"adapter": {}, "optimizer": {}}
    for key, own in tensors.items():
        kind, _, name = key.partition("/")
        kinds[kind][name] = own
    return Values(kinds["adapter"], _by_name(kinds["optimizer"]), numbers)


def _read(file: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    try:
        with safe_open(file, "pt") as stored:
            return {key: stored.get_tensor(key) for key in stored.keys()}, stored.metadata()  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"cannot read {file.name}: {error}") from None


def _by_name(stored: Mapping[str, torch.Tensor]) -> Mapping[str, Mapping[str, torch.Tensor]]:
    """Tensors by `name/leaf` as Values has them."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, own in stored.items():
        name, _, leaf = key.rpartition("/")
        found.setdefault(name, {})[leaf] = own
    return found


@torch.no_grad()
def take(adapter: Adapter, state: AdapterState | None, found: Values) -> None:
    """Take values: parameters, and what a state has beside them."""
    parameters = adapter.named_parameters()
    for name, own in adapter.own_of(found.parameters).items():
        parameters[name].copy_(own)
    if state is None:
        return
    own_moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, leaves in found.moments.items():
        for leaf, whole in leaves.items():
            for own_name, own in ({name: whole} if leaf == "step" else adapter.own_of({name: whole})).items():
                own_moments.setdefault(own_name, {})[leaf] = own
    state.optimizer.load(own_moments)
    if state.scale is not None and SCALE in found.numbers:
        state.scale.load(json.loads(found.numbers[SCALE]))


# --- for files --------------------------------------------------------------------------------------------------------------


def parameters(state: AdapterState) -> Mapping[str, torch.Tensor]:
    """Whole parameters by name, copies on the CPU."""
    found = state.whole_of(state.adapter.flat)
    launched(state.adapter.flat.device)()
    return found


def moments(state: AdapterState) -> dict[str, torch.Tensor]:
    """Whole state of the optimizer, by `name/leaf`, on the CPU."""
    found: Any = state.optimizer.state(state.whole_of, state.everywhere)
    launched(state.adapter.flat.device)()
    return {f"{name}/{leaf}": own for name, leaves in found.items() for leaf, own in leaves.items()}


def numbers_of(state: AdapterState, steps: int) -> dict[str, str]:
    """Numbers beside the optimizer's tensors."""
    return {STEPS: str(steps)} | ({} if state.scale is None else {SCALE: json.dumps(state.scale.state())})
