"""A base model that is cut over the ranks, on each of them.

Rank 0 tells the others what it does. On these `tell` is silent, and follower.py calls what they are told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from packlora.adapters.attach import Adapter
from packlora.adapters.flat import FlatLayout
from packlora.adapters.spec import AdapterSpec
from packlora.adapters.weights import shapes_at
from packlora.base.model import Base
from packlora.config import Run
from packlora.engine.adapters import AdapterState
from packlora.engine.decode import Passes
from packlora.engine.engine import Done, Engine, Inside, Slot, Slots
from packlora.engine.generate import FEWEST_ROWS, sampler_for
from packlora.engine.memory import TokenBudget, free_memory
from packlora.engine.optimizer import MOMENTS
from packlora.engine.parts import Parts
from packlora.engine.passes import MicrobatchResult, SingleDevice
from packlora.errors import InputError
from packlora.parallel.collectives import answered
from packlora.parallel.cut import load_cut
from packlora.parallel.replicas import Replicas
from packlora.parallel.tensor import check_cut
from packlora.serve.adapters import METADATA, Wanted
from packlora.serve.errors import Refused
from packlora.serve.group.passes import Tell, ToldCache, ToldPasses
from packlora.serve.group.together import together
from packlora.serve.group.told import parts_values, slot_values, spec_values
from packlora.serve.host import Host
from packlora.serve.ranks.meeting import TENSOR
from packlora.serve.values import Values

LIKE_PARAMETERS = 6
"""Tensors like an adapter's parameters that its training has at most: these, their gradient, moments, and former values."""


def hosts_of(runs: Mapping[str, Run], context: int, group: Replicas) -> dict[str, GroupHost]:
    """Base models of a service by name. All ranks call it."""
    return {name: GroupHost(name, run, context, group) for name, run in runs.items()}


def silent(kind: str, **values: Any) -> None:
    """Tell nobody."""


class GroupHost(Host):
    """A base model with an engine, on one of the ranks that hold it together. All make it with equal arguments.

    Embedding and output layer are whole on each rank, so that models may train the output layer, as clients ask by default.

    Args:
        group: the ranks.

    Raises:
        InputError: as load_cut; or a key, or the model, is none that is served so.
    """

    group: Replicas

    def __init__(self, name: str, run: Run, context: int, group: Replicas) -> None:
        self.group = group
        self.announce: Tell = silent
        """Is called with what this rank does, and the name of the base; set on rank 0."""
        super().__init__(name, run, context)
        cache = ToldCache(self.tell)
        self.passes = ToldPasses(Passes(self.base.model, self.attached, FEWEST_ROWS, cache), self.tell)
        self._sampling, reason = sampler_for(
            self.base.model, self.attached, self.tokenizer, context=self.facts.context, passes=self.passes
        )
        if reason is not None:
            raise InputError(
                f"--set {TENSOR}: samples of {self.facts.path} are drawn by transformers' own generation ({reason}), which "
                "takes whole models alone; leave it out"
            )

    def tell(self, kind: str, **values: Any) -> None:
        """Tell the other ranks, if this is rank 0 and they listen."""
        self.announce(kind, base=self.facts.name, **values)

    # --- how it is made ----------------------------------------------------------------------------------------------------

    def _load(self, longest: Mapping[str, int]) -> Base:
        """See Host."""
        if self.run.offload_embedding is True:
            raise InputError(f"--set offload_embedding=true does not go with {TENSOR}; leave one of them out")
        if self.run.cuda_graphs is True:
            raise InputError(f"--set cuda_graphs=true is not served with {TENSOR}; leave it out")
        check_cut(self.skeleton, self.run.parallel)
        return load_cut(self.run, self.tokenizer, longest, self.group, vocabulary=False)

    def _graphs(self, single: SingleDevice) -> None:
        """See Host; none of a service holds messages."""

    def _budget(self, tokens: int, is_auto: bool) -> TokenBudget:
        """See Host. Ranks run out of memory at different moments, so nothing is tried again."""
        advice = "start again with --set max_tokens_per_microbatch={}, or with gradient_checkpointing=true"
        return TokenBudget(tokens, 1, False, self.base.device, advice=lambda own: advice.format(max(own // 2, 1)))

    def _engine(self) -> Engine:
        """See Host."""
        return _Engine(self)

    # --- adapters ----------------------------------------------------------------------------------------------------------

    def spec_of(self, wanted: Wanted) -> AdapterSpec:
        """See Host."""
        spec = super().spec_of(wanted)
        if spec.of_weights:
            raise Refused(
                f"{METADATA}.init_lora_weights: {spec.peft.init_lora_weights} needs whole weights, and this service has cut "
                f"its base model ({TENSOR}); leave it out"
            )
        return spec

    def attach(self, name: str, spec: AdapterSpec, seed: int) -> Adapter:
        """See Host. Raises MemoryError on all ranks where one has no room; nothing has changed then."""
        self.tell("attach", name=name, spec=spec_values(spec), seed=seed)
        shapes = [shape for path, own in spec.modules.items() for shape in shapes_at(self.skeleton, path, own).values()]
        with together():
            lacks = self.group.most([not self.has_room(LIKE_PARAMETERS * sum(map(math.prod, shapes)))])[0]
        if lacks:
            raise MemoryError("one of the ranks has no memory for another adapter")
        with together():
            return super().attach(name, spec, seed)

    def has_room(self, elements: int) -> bool:
        """Whether so many elements of an adapter find room on this rank."""
        wide = torch.float64 if self.base.model.dtype == torch.float64 else torch.float32
        try:
            torch.empty(elements, dtype=wide, device=self.device)
        except torch.OutOfMemoryError:
            free_memory(self.device)
            return False
        return True

    def detach(self, adapter: Adapter) -> None:
        """See Host."""
        self.tell("detach", number=adapter.number)
        super().detach(adapter)

    def state_of(self, adapter: Adapter) -> AdapterState:
        """See Host."""
        self.tell("state", number=adapter.number)
        state = super().state_of(adapter)
        self.group.whole([adapter])(adapter, state)
        return state

    def train(self, adapter: Adapter, state: AdapterState) -> None:
        """See Host."""
        self.tell("train", number=adapter.number)
        super().train(adapter, state)

    def take(self, adapter: Adapter, state: AdapterState | None, found: Values) -> None:
        """See Host. The other ranks get the tensors by a message of the group."""
        steps = {name: float(leaves["step"]) for name, leaves in found.moments.items()}
        self.tell("take", number=adapter.number, steps=steps, numbers=dict(found.numbers))
        given = [found.parameters]
        if found.moments:
            given += [{name: leaves[leaf] for name, leaves in found.moments.items()} for leaf in MOMENTS]
        with together():
            self._share(adapter, len(given), given)
            super().take(adapter, state, found)

    def take_shared(
        self, adapter: Adapter, state: AdapterState | None, steps: Mapping[str, float], numbers: Mapping[str, str]
    ) -> None:
        """Take what rank 0 takes, on another one."""
        parameters, *moments = self._share(adapter, 1 + len(MOMENTS) if steps else 1)
        found = {
            name: {"step": torch.tensor(step)} | {leaf: own[name] for leaf, own in zip(MOMENTS, moments, strict=True)}
            for name, step in steps.items()
        }
        super().take(adapter, state, Values(parameters, found, numbers))

    def _share(
        self, adapter: Adapter, count: int, given: Sequence[Mapping[str, torch.Tensor]] = ()
    ) -> list[dict[str, torch.Tensor]]:
        """Whole tensors of an adapter, so many of each name, that rank 0 gives, on all ranks."""
        layout = FlatLayout(adapter.whole_shapes)
        rows = adapter.flat.new_zeros(count, layout.size)
        found = [layout.views(row) for row in rows]
        for views, own in zip(found, given, strict=False):
            for name, tensor in own.items():
                views[name].copy_(tensor)
        with answered():
            dist.broadcast(rows, group=self.group.model, group_src=0)
        return found

    def parameters(self, state: AdapterState) -> Mapping[str, torch.Tensor]:
        """See Host."""
        self.tell("parameters", number=state.adapter.number)
        with together():
            return super().parameters(state)

    def moments(self, state: AdapterState) -> dict[str, torch.Tensor]:
        """See Host."""
        self.tell("moments", number=state.adapter.number)
        with together():
            return super().moments(state)

    def evaluate(self, parts: Parts) -> MicrobatchResult | None:
        """See Host."""
        self.tell("evaluate", parts=parts_values(parts))
        with together():
            return super().evaluate(parts)


class _Engine(Engine):
    """The engine of a host, which tells each slot."""

    def __init__(self, host: GroupHost) -> None:
        super().__init__(host.executor, host.group, host.budget)
        self._tell = host.tell

    def run(self, slots: Slots) -> Iterator[Done]:
        """See Engine."""
        with together():
            yield from super().run(slots)

    def _forward(self, slot: Slot) -> Inside:
        self._tell("slot", **slot_values(slot, self.adapters))
        return super()._forward(slot)
