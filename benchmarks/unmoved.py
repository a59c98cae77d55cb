"""Whether a run that learns from rewards moves weights between its trainer and its sampler: it is watched while it runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from packlora.rl.changes import RolloutChanges
from packlora.rl.drawing import Drawing

Places = dict[str, tuple[int, ...]]


class Unmoved:
    """What was seen of a run. looks: how often it was looked at; samplers: that it has made. moved: weights that were copied,
    merged or loaded again, in words."""

    def __init__(self) -> None:
        self.looks = self.samplers = 0
        self.moved: list[str] = []
        self._first: Places | None = None
        self._bits: dict[str, int] = {}
        self._before = {id(one) for one in _models()}

    def look(self, changes: RolloutChanges) -> None:
        """Compare the places of all weights with those of the first look."""
        self.looks += 1
        model, now = changes.base.model, _places(changes)
        if self._first is None:
            self._first, self._bits = now, _bits(model)
        away = [name for name in now if self._first.setdefault(name, now[name]) != now[name]]
        self._tell("is elsewhere or was written", away)
        for job in changes.jobs:
            for path, weights in job.adapter.weights.items():
                layer: Any = model.get_submodule(path)
                if layer.adapters.get(job.adapter.number) is not weights:
                    self._tell("is not the trainer's", [f"{job.name} on {path}"])

    def end(self, changes: RolloutChanges) -> None:
        """Look for the last time: also at the bits of the base model, and for other models."""
        self.look(changes)
        model, bits = changes.base.model, _bits(changes.base.model)
        self._tell("has other bits", [name for name in bits if self._bits.get(name) != bits[name]])
        own = {id(module) for module in model.modules()}
        more = [type(one).__name__ for one in _models() if id(one) not in own | self._before]
        self._tell("was loaded beside the base model", more)

    def made(self, sampler: Any, drawing: Drawing) -> None:
        """Look at a sampler: it runs the trainer's own model."""
        self.samplers += 1
        passes = getattr(sampler, "_passes", sampler)
        passes = getattr(passes, "eager", passes)
        models = {id(passes.model), id(drawing.base.model), id(drawing.single.base.model)}
        self._tell("is not the trainer's", ["the sampler's model"] * (len(models) > 1))

    def _tell(self, what: str, names: list[str]) -> None:
        self.moved += [f"{name} {what}" for name in names]


@contextmanager
def watched() -> Iterator[Unmoved]:
    """Watch the runs in a `with`: before and after all that is generated, and at their ends."""
    seen = Unmoved()
    change, end, sampler = RolloutChanges.change, RolloutChanges.end, Drawing.sampler

    def changed(self: RolloutChanges, *args: Any) -> Any:
        seen.look(self)
        found = change(self, *args)
        seen.look(self)
        return found

    def ended(self: RolloutChanges, *args: Any) -> None:
        seen.end(self)
        end(self, *args)

    def made(self: Drawing) -> Any:
        found = sampler(self)
        seen.made(found, self)
        return found

    with (
        patch.object(RolloutChanges, "change", changed), patch.object(RolloutChanges, "end", ended),
        patch.object(Drawing, "sampler", made),
    ):  # fmt: skip
        yield seen


def _places(changes: RolloutChanges) -> Places:
    """Places of all weights, and the writes into those of the base model."""
    frozen: Places = {
        f"base {name}": (own.data_ptr(), own._version) for name, own in changes.base.model.named_parameters()
    }
    for job in changes.jobs:
        frozen[job.name] = (job.adapter.flat.data_ptr(),)
        frozen |= {f"{job.name} {name}": (own.data_ptr(),) for name, own in job.adapter.named_parameters().items()}
    return frozen


def _bits(model: torch.nn.Module) -> dict[str, int]:
    """Sums of the bits of the base model's weights."""
    flat = {name: own.detach().reshape(-1).view(torch.uint8) for name, own in model.named_parameters()}
    return {name: int(own.sum(dtype=torch.int64)) for name, own in flat.items()}


def _models() -> list[PreTrainedModel]:
    """Models with weights; those by which a plan counts bytes have none."""
    found = [one for one in gc.get_objects() if issubclass(type(one), PreTrainedModel)]
    return [one for one in found if any(not own.is_meta for own in one.parameters())]
