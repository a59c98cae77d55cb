"""The engine: runs slots of microbatches and steps adapters.

A slot is a place in the order of microbatches. Place n begins with the backward of slot n - ahead and the steps of slot
n - lag; then slot n is asked for and begins. An adapter that steps after slot p has rows of its next global batch in slot
p + lag or later (schedule/verify.py). Here both numbers are 1: a slot is done before the next one is asked for. The engine of a
pipeline, whose stages run several slots at a time, is packlora/pipeline/engine.py.

Replicas of the model run their own microbatches of a slot. They add up gradients before a step.

Errors: MemoryError where memory runs out and nothing is left that may be changed; ProcessError where another process ended.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from packlora.engine.adapters import AdapterState
from packlora.engine.memory import TokenBudget, on_its_way, on_their_way
from packlora.engine.parts import Parts, num_tokens
from packlora.engine.passes import Executor, MicrobatchResult, insist, run_microbatch
from packlora.parallel.alone import Alone

Refusal = Literal["loss", "norm", "gradient", "overflow"]


@dataclass(frozen=True, slots=True)
class Step:
    """Optimizer step of an adapter, by its number, at a learning rate."""

    adapter: int
    lr: float


@dataclass(frozen=True, slots=True)
class Slot:
    """Work of one moment on all replicas.

    parts: microbatch of this replica, ordered by adapter; empty where it has none.
    counted: adapters whose rows count, on whichever replica. Rows of others are computed and dropped.
    steps: taken after it.
    tag: comes back untouched.
    wants_losses: whether the cross entropy of its labels is requested; on one device.
    """

    parts: Parts = ()
    counted: frozenset[int] = frozenset()
    steps: tuple[Step, ...] = ()
    tag: Any = None
    wants_losses: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether it is a place alone."""
        return not (self.counted or self.steps)


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step was taken, or refused: then parameters are as before it, moments of the optimizer are not.

    loss: sum of the losses of the global batch. norm: of the gradient before clipping. sums: of losses and metrics [1 + M]
    float64. refused: what was not finite, or missing. reverted: whether the parameters went back one step more, to the newest
    values that are known to give a finite loss. scale: of the loss.

    overflow: the gradient was not finite at this scale, and may be at a smaller one, which comes next. This step alone is
    skipped: moments are as before it too, and no Confirmed follows.
    """

    adapter: int
    loss: float
    norm: float
    sums: torch.Tensor
    refused: Refusal | None = None
    reverted: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The parameters after a step. It comes before the adapter's next step.

    largest: of them. changed: whether any changed. reverted: whether some became infinite, so that the step was taken back.
    """

    adapter: int
    largest: float
    changed: bool
    reverted: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """A slot is done.

    lacking: tokens of a microbatch for which memory ran out; then the accumulators are as before the slot, or partly so where
    CUDA graphs add to them, and `run` returns. asked: whether a process was asked for something that others do not know.
    losses_L: cross entropy of all labels on the CPU, padding included, where the slot requests it.
    """

    slot: Slot
    events: tuple[StepDone | Confirmed, ...] = ()
    lacking: int = 0
    asked: bool = False
    losses_L: torch.Tensor | None = None


class Slots(Protocol):
    """Source of slots. All processes that train the same adapters answer alike, but for `is_asked`."""

    def next(self) -> Slot | None:
        """Slot that enters now; None: run dry and return. The results of all slots up to `lag` before it were handed out."""

    def peek(self) -> Parts:
        """Microbatch of this replica that `next` would most likely give, the same object; empty where that is not known."""

    def is_asked(self) -> bool:
        """Whether this process was asked for something that the others do not know of."""


@dataclass(slots=True)
class Inside:
    """A slot on its way. pending: its forward, where other slots run before the backward. found: by stepping parameter, see
    _agree."""

    slot: Slot
    pending: Any = None
    sums: torch.Tensor | None = None
    found: Sequence[int] = ()
    lacking: int = 0
    asked: bool = False
    losses_L: Callable[[], torch.Tensor] | None = None


class Engine:
    """Engine of the processes that train the same adapters.

    Args:
        executor: runs microbatches.
        group: the processes.
        budget: tokens of a microbatch.
    """

    lag = ahead = 1
    """Number of slots that begin from a slot on until its steps are taken, and until its backward runs."""

    def __init__(self, executor: Executor, group: Alone, budget: TokenBudget) -> None:
        self.executor, self.group, self.budget = executor, group, budget
        self.adapters: Mapping[int, AdapterState] = {}

    def follow(self, adapters: Mapping[int, AdapterState]) -> None:
        """These adapters may own rows and step now. Between two runs."""
        self.adapters = dict(adapters)

    def run(self, slots: Slots) -> Iterator[Done]:
        """Run slots until they run dry. Whoever iterates takes all of it: one Done a slot, in their order."""
        inside: dict[int, Inside] = {}
        end: int | None = None
        for number in itertools.count():
            if (one := inside.get(number - self.ahead)) is not None:
                self._backward(one, slots)
            if (one := inside.pop(number - self.lag, None)) is not None:
                yield self._finish(one, slots)
                if one.lacking:
                    return
            if end is None:
                if (slot := slots.next()) is not None:
                    inside[number] = self._forward(slot)
                else:
                    end = number
            if end is not None and number >= end + self.lag - 1:
                break
        yield from self._run_dry()

    # --- forward and backward ----------------------------------------------------------------------------------------------

    def _forward(self, slot: Slot) -> Inside:
        """Begin a slot. Here the forward runs with the backward."""
        return Inside(slot)

    def _backward(self, one: Inside, slots: Slots) -> None:
        slot, result = one.slot, None
        if slot.parts:
            result = self._run(one)
            for adapter, names in result.added.items() if result is not None else ():
                self.adapters[adapter].added = names
        elif not slot.is_empty:
            self.executor.idle(backward=True)
        if slot.is_empty:
            return
        self._agree(one, slots)
        if one.lacking:
            self._drop_gradients(slot)
            return
        self._collect(slot, result)
        if slot.wants_losses and result is not None:
            one.losses_L = on_its_way(result.losses_L)  # steps are launched before it is waited for
        if slot.steps:
            self._add_up(one, [self.adapters[step.adapter] for step in slot.steps], slots)

    def _run(self, one: Inside) -> MicrobatchResult | None:
        """None where memory ran out."""
        run = partial(run_microbatch, self.executor, one.slot.parts)
        result = self.budget.attempt(tokens := num_tokens(one.slot.parts), run, trains=True)
        one.lacking = tokens if result is None else 0
        return result

    def _add_up(self, one: Inside, states: Sequence[AdapterState], slots: Slots) -> None:
        """Add up what the steps after a slot need, over the processes."""
        if self.group.processes == 1:
            return
        from packlora.engine.replicated import add_up, join_found

        if one.found:
            join_found(states, one.found)
        add_up(states, self.group)

    def _agree(self, one: Inside, slots: Slots) -> None:
        """The largest lacking of all processes, whether one was asked for something, and which parameters got gradients."""
        if self.group.processes == 1:
            return
        slot = one.slot
        found = [
            int(own)
            for step in slot.steps
            for own in self.adapters[step.adapter].found(step.adapter in slot.counted).values()
        ]
        one.lacking, asked, *one.found = self.group.most([one.lacking, int(slots.is_asked()), *found])
        one.asked = bool(asked)

    def _drop_gradients(self, slot: Slot) -> None:
        for adapter in self.group.reached({part.adapter for part in slot.parts}, self.adapters):
            self.adapters[adapter].drop_gradients()

    def _collect(self, slot: Slot, result: MicrobatchResult | None) -> None:
        here = {part.adapter for part in slot.parts}
        for adapter in here:
            if adapter in slot.counted:
                assert result is not None
                insist(self.executor, partial(self.adapters[adapter].collect, result.sums[adapter]))
            else:
                self.adapters[adapter].discard()
        for adapter in self.group.reached(here, self.adapters) - here:
            state = self.adapters[adapter]
            if adapter in slot.counted:
                state.collect(state.no_sums())
            state.drop_gradients()

    # --- steps -------------------------------------------------------------------------------------------------------------

    def _finish(self, one: Inside, slots: Slots) -> Done:
        events = [] if one.lacking else self._step(one, slots)
        losses_L = None if one.losses_L is None else one.losses_L()
        return Done(one.slot, tuple(events), one.lacking, one.asked, losses_L)

    def _run_dry(self) -> Iterator[Done]:
        """Results that are left to tell when no slot is on its way."""
        return iter(())

    def _step(self, one: Inside, slots: Slots) -> list[StepDone | Confirmed]:
        """Take the steps of a slot."""
        return self.take_steps(one.slot.steps, lambda: self._prepare(slots.peek()))

    def _prepare(self, parts: Parts) -> None:
        if parts:
            self.executor.prepare(parts)

    def take_steps(self, steps: Sequence[Step], meanwhile: Callable[[], None]) -> list[StepDone | Confirmed]:
        """Optimizer steps on one device. It is waited for once; meanwhile the host may do something, and launch something: what
        is launched then is not waited for. Where memory runs out they are taken again, what they have done left out."""

        def taken() -> torch.Tensor:
            return torch.stack([self.adapters[step.adapter].step(step.lr) for step in steps])

        numbers = torch.empty(0)
        if steps:
            is_whole = self.group.holders is None  # slices add up their norm, which none can do again by itself
            numbers = self.group.largest(insist(self.executor, taken) if is_whole else taken())
        read = on_their_way(numbers)
        meanwhile()
        out: list[StepDone | Confirmed] = []
        for step, (loss, norm, largest, changed) in zip(steps, read(), strict=True):
            out.append(done := self._judge(step, loss, norm))
            if done.refused is None:
                out.append(self._confirm(step.adapter, largest, changed))
        return out

    def _judge(self, step: Step, loss: float, norm: float) -> StepDone:
        """Accept a step that was begun, or put it back. Its global batch is over."""
        state, sums = self.adapters[step.adapter], self.adapters[step.adapter].sums
        refused: Refusal | None = None
        reverted, scale = False, state.grad_scale
        assert sums is not None
        if not math.isfinite(loss):
            refused = "loss"
        elif not math.isfinite(norm):
            refused = "overflow" if state.scale is not None and state.scale.can_fall else "norm"
        elif not state.has_gradient:
            refused = "gradient"
        if refused is None:
            state.accept()
        elif refused == "overflow":
            state.skip()
        else:
            state.put_back()
            reverted = refused == "loss" and state.revert()
        state.close()
        return StepDone(step.adapter, loss, norm, sums, refused, reverted, scale)

    def _confirm(self, adapter: int, largest: float, changed: float) -> Confirmed:
        """Take a step back that has made parameters infinite."""
        reverted = not math.isfinite(largest) and self.adapters[adapter].revert()
        return Confirmed(adapter, largest, bool(changed), reverted)
