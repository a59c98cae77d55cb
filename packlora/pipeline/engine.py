"""The engine of one stage of a pipeline of S stages, which never flushes between slots (1F1B). At place n stage s runs

    backward   of slot n - (S - s). If adapters step after it, each stage adds what a step needs to what the stage above has
               sent, and sends it on down: squares of the gradient, the loss
    steps      of slot n - S. The first stage, whose backward is the last one, has all sums; they go up again as totals
    forward    of slot n, which is asked for now

The totals leave a stage before the hidden states of slot n do. So all stages clip by the same norm, take the same decisions
from the same bits, and know of the same steps when they ask for a slot.

A pipeline steps by what is known before the step: loss and norm. What a step has made of the parameters goes down with the sums
of the adapter's next step, or is told when the pipeline is dry; both come before the next step.

The processes of a stage that is cut have the same microbatches and the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from packlora.engine.adapters import AdapterState
from packlora.engine.engine import Confirmed, Done, Engine, Inside, Slot, Slots, StepDone
from packlora.engine.memory import TokenBudget
from packlora.engine.parts import num_tokens
from packlora.engine.passes import Executor, MicrobatchResult
from packlora.pipeline.links import Links
from packlora.pipeline.sums import StageSums


class StageEngine(Engine):
    """Engine of a stage.

    Args:
        links: to the neighbours.
    """

    def __init__(self, executor: Executor, links: Links, budget: TokenBudget) -> None:
        super().__init__(executor, links, budget)
        self.lag, self.ahead = links.stages, links.stages - links.stage
        self._sums = StageSums(links, budget.device)

    def _forward(self, slot: Slot) -> Inside:
        """See Engine."""
        one = Inside(slot)
        if slot.parts:
            forward = partial(self.executor.forward, slot.parts)
            one.pending = self.budget.attempt(num_tokens(slot.parts), forward, trains=True)
        return one

    def _run(self, one: Inside) -> MicrobatchResult | None:
        """See Engine."""
        backward, one.pending = partial(self.executor.backward, one.pending), None
        return self.budget.attempt(num_tokens(one.slot.parts), backward, trains=True)

    def _agree(self, one: Inside, slots: Slots) -> None:
        """Nothing: memory that runs out ends the run, and all else is agreed on by the totals."""

    def _add_up(self, one: Inside, states: Sequence[AdapterState], slots: Slots) -> None:
        """See Engine."""
        one.sums = self._sums.sums(states, slots.is_asked())

    def _step(self, one: Inside, slots: Slots) -> list[StepDone | Confirmed]:
        """See Engine. The device is waited for."""
        out: list[StepDone | Confirmed] = []
        if not one.slot.steps:
            return out
        states = [self.adapters[step.adapter] for step in one.slot.steps]
        one.asked, totals = self._sums.totals(states, one.sums)
        for step, state, total in zip(one.slot.steps, states, totals, strict=True):
            if total.before is not None:
                out.append(before := self._confirm(step.adapter, *total.before))
                if before.reverted:
                    state.discard()
                    continue
            state.sums, state.found_elsewhere = total.sums, total.found
            made = state.step(step.lr, total.norm)
            out.append(done := self._judge(step, total.loss, total.norm_value))
            if done.refused is None:
                self._sums.unconfirmed[step.adapter] = made[2:]
        return out

    def _run_dry(self) -> Iterator[Done]:
        """See Engine."""
        yield Done(Slot(), tuple(self._confirm(*one) for one in self._sums.dry()))
