"""Values of the messages that rank 0 tells the others: adapters, rows, steps and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from packlora.adapters.spec import AdapterSpec, ModuleSpec
from packlora.data.targets import TargetSample
from packlora.engine.adapters import AdapterState
from packlora.engine.decode import NextToken, Prompt
from packlora.engine.engine import Slot, Step
from packlora.engine.optimizer import FlatAdamW
from packlora.engine.parts import Part, Parts
from packlora.engine.rows import Row
from packlora.lora_config import LoraConfig
from packlora.serve.losses import FACTS, Summed, objective_of
from packlora.serve.optimizer import FIRST
from packlora.serve.ranks.channel import array_from, array_values


def spec_values(spec: AdapterSpec) -> dict[str, Any]:
    """Modules of an adapter. Its configuration is for files, which rank 0 reads and writes."""
    return {path: asdict(module) for path, module in spec.modules.items()}


def spec_from(values: Mapping[str, Any]) -> AdapterSpec:
    """The adapter of `spec_values`."""
    modules = {path: ModuleSpec(**own | {"tokens": tuple(own["tokens"])}) for path, own in values.items()}
    return AdapterSpec(LoraConfig(), modules)


# --- rows and steps ---------------------------------------------------------------------------------------------------------


def parts_values(parts: Parts) -> list[dict[str, Any]]:
    """Parts of a microbatch of the service."""
    return [_part_values(part) for part in parts]


def _part_values(part: Part) -> dict[str, Any]:
    assert isinstance(part.objective, Summed)
    return {
        "adapter": part.adapter, "weight": part.weight, "rows": [_row_values(row) for row in part.rows],
        "loss": [part.objective.name, dict(part.objective.config)],
    }  # fmt: skip


def _row_values(row: Row) -> list[Any]:
    sample = row.sample
    assert isinstance(sample, TargetSample)
    columns = {name: array_values(own) for name, own in sample.columns.items()}
    return [*map(array_values, (sample.ids, sample.predicting, sample.labels)), columns, row.draw]


def parts_from(values: Sequence[Mapping[str, Any]]) -> list[Part]:
    """The parts of `parts_values`."""
    return [
        Part(own["adapter"], [*map(_row_from, own["rows"])], objective_of(*own["loss"]), own["weight"], facts=FACTS)
        for own in values
    ]


def _row_from(values: Sequence[Any]) -> Row:
    *arrays, columns, draw = values
    ids, places, labels = map(array_from, arrays)
    sample = TargetSample.of(ids, places, labels, {name: array_from(own).copy() for name, own in columns.items()})
    return Row(sample, None if draw is None else tuple(draw))


def slot_values(slot: Slot, states: Mapping[int, AdapterState]) -> dict[str, Any]:
    """A slot of the engine, and what the others do not know of its adapters' states: the settings of its steps, and `fresh`,
    whose gradient begins with it."""
    touched = {part.adapter for part in slot.parts} | {step.adapter for step in slot.steps}
    return {
        "parts": parts_values(slot.parts), "counted": sorted(slot.counted),
        "steps": [[step.adapter, step.lr, *_settings(states[step.adapter])] for step in slot.steps],
        "fresh": sorted(number for number in touched if states[number].sums is None),
    }  # fmt: skip


def _settings(state: AdapterState) -> list[Any]:
    assert isinstance(state.optimizer, FlatAdamW)
    return [state.max_grad_norm, state.optimizer.config.model_dump()]


def slot_from(values: Mapping[str, Any], states: Mapping[int, AdapterState]) -> Slot:
    """The slot of `slot_values`; states are made as they are told."""
    for number in values["fresh"]:
        states[number].discard()
    steps = []
    for number, lr, most, config in values["steps"]:
        state = states[number]
        assert isinstance(state.optimizer, FlatAdamW)
        state.max_grad_norm, state.optimizer.config = most, FIRST.model_copy(update=config)
        steps.append(Step(number, lr))
    return Slot(parts_from(values["parts"]), frozenset(values["counted"]), tuple(steps))


# --- samples ----------------------------------------------------------------------------------------------------------------


def prompt_values(prompt: Prompt) -> list[Any]:
    """A prompt."""
    return [list(prompt.ids), prompt.adapter, list(prompt.slots), list(prompt.places)]


def prompt_from(values: Sequence[Any]) -> Prompt:
    """The prompt of `prompt_values`."""
    return Prompt(*values)


def token_values(token: NextToken) -> list[int]:
    """The last token of a sample."""
    return [*token]


def token_from(values: Sequence[int]) -> NextToken:
    """The token of `token_values`."""
    return NextToken(*values)
