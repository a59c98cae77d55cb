"""Shared microbatches: which rows of which tenants run together, and what comes of them.

A slot holds at most one piece of each model: what a request's numbers depend on is how its own rows are cut, and nothing of
the others (losses.cut). Pieces of several requests fill the microbatch by the packer's own subset sums; no token is padding.

Shapes: L labels of a microbatch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from packlora.engine.engine import Confirmed, Done, Slot, Step, StepDone
from packlora.engine.parts import Part, Parts
from packlora.engine.rows import Row
from packlora.schedule.bins import best_subset
from packlora.serve.errors import Failed
from packlora.serve.host import Host
from packlora.serve.losses import FACTS
from packlora.serve.messages import forward_backward_output
from packlora.serve.optimizer import Settings, settings_of
from packlora.serve.queue import Lane, Request
from packlora.serve.tenant import Tenant

FULL = 7 / 8
"""Share of the budget from which on a microbatch of one model is as good as full."""
CANDIDATES = 128
"""Most pieces that are looked at to fill one microbatch."""
WHY = {
    "loss": "the sum of the losses is not finite",
    "norm": "the norm of the gradient is not finite",
    "gradient": "no parameter got a gradient",
}


@dataclass(slots=True)
class Ahead:
    """Next microbatch of a model that fills them by itself: the parts of piece `at` of a request."""

    request: Request
    at: int
    parts: list[Part]


@dataclass(slots=True)
class Slotted:
    """Requests that run together.

    pieces, steps: lanes with the request of which a piece runs, or which is a step. is_evaluation: without gradients.
    is_full: nothing more would fit. ahead: what comes next, once it runs and where that is known. arrived: when the first
    request came. sums: of the models' states before it runs.
    """

    pieces: list[tuple[Lane, Request]]
    steps: list[tuple[Lane, Request]]
    tenants: Mapping[str, Tenant]
    is_evaluation: bool
    is_full: bool
    ahead: Ahead | None = None
    sums: dict[str, Any] = field(default_factory=dict)

    @property
    def requests(self) -> list[tuple[Lane, Request]]:
        return self.pieces or self.steps

    @property
    def lanes(self) -> list[Lane]:
        return [lane for lane, _ in self.requests]

    @property
    def arrived(self) -> float:
        return min(request.arrived for _, request in self.requests)

    def tokens_of(self, lane: Lane) -> int:
        """Tokens that run of a lane."""
        return sum(_tokens(request, request.pieces[request.at]) for own, request in self.pieces if own is lane)

    @property
    def to_blame(self) -> list[tuple[Lane, Request]]:
        """The first request of each lane, one of which may be why a slot fails."""
        return [*self.pieces, *(own for own in self.steps if own[0] not in self.lanes)]

    def drop_gradients(self) -> list[Lane]:
        """Forget what a slot that failed has left. Returns the lanes whose models may keep some of it: sums of rows, which come
        again as a whole, gradients that were added up already, or a part of a step."""
        kept = []
        for lane, request in self.to_blame:
            if (state := self.tenants[lane.model].state) is not None:
                was_added = bool(state.added)
                state.drop_gradients()
                if request.work is None or was_added or state.sums is not self.sums.get(lane.model):
                    request.logprobs.clear()
                    kept.append(lane)
        return kept


def _tokens(request: Request, piece: range) -> int:
    assert request.work is not None
    return sum(request.work.samples[number].num_tokens for number in piece)


def fill(host: Host, lanes: Sequence[Lane], tenants: Mapping[str, Tenant]) -> Slotted:
    """Choose what runs now.

    Args:
        lanes: whose head is ready for a slot, the one first that is due.
    """
    heads = [(lane, request) for lane in lanes if (request := lane.head) is not None]
    rows = [own for own in heads if own[1].kind == "forward_backward"]
    first = next(iter(heads))[1]
    evaluates = first.kind == "forward_backward" and first.forward_only
    rows = [own for own in rows if own[1].forward_only == evaluates][:CANDIDATES]
    steps = [] if evaluates else [own for own in heads if own[1].kind == "optim_step"]
    if first.alone:
        only = heads[:1]
        is_step = first.kind == "optim_step"
        return Slotted([] if is_step else only, only if is_step else [], tenants, evaluates, True)
    rows, steps = ([own for own in some if not own[1].alone] for some in (rows, steps))
    budget = host.budget.tokens
    chosen, full = rows[:1], not rows
    if rows:
        room = budget - rows[0][1].tokens
        kind = tenants[rows[0][0].model].kind
        rest = [own for own in rows[1:] if own[1].tokens <= room and tenants[own[0].model].kind == kind]
        chosen += [rest[number] for number in best_subset([own[1].tokens for own in rest], max(room, 0))]
        full = sum(own[1].tokens for own in chosen) >= budget or len(chosen) < len(rows)
    for lane, request in chosen if not evaluates else ():
        behind = lane.after(request)
        is_last = request.at == len(request.pieces) - 1
        is_step = behind is not None and behind.kind == "optim_step" and behind.state != "failed"
        if is_last and behind is not None and is_step and tenants[lane.model].spoilt is None:
            steps.append((lane, behind))
    return Slotted(chosen, steps, tenants, evaluates, full)


@dataclass(slots=True)
class Outcome:
    """Results of a slot.

    ended: requests of which this was the last piece. steps: with a JSON result, or why one was refused. lacking: tokens for
    which memory ran out, and then nothing else. tokens: by owner. models: how many had rows.
    """

    ended: list[tuple[Lane, Request]] = field(default_factory=list)
    steps: list[tuple[Lane, Request, Any]] = field(default_factory=list)
    lacking: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    models: int = 0

    def result(self, request: Request) -> bytes:
        """Result of a request whose pieces have all run. Raises Failed where its loss is not finite."""
        assert request.work is not None
        work = request.work
        loss = work.loss_of(request.logprobs)
        if not math.isfinite(loss):
            raise Failed(
                f"forward_backward {request.seq}: the sum of its losses is {loss}; the gradients since the last step "
                "are dropped"
            )
        labels = sum(map(len, request.logprobs))
        request.loss = loss / max(labels, 1)
        metrics = {"loss:sum": loss, "tokens:sum": float(labels), "datums:sum": float(len(work.samples))}
        shaped = [own.reshape(shape) for own, shape in zip(request.logprobs, work.shapes, strict=True)]
        return forward_backward_output(shaped, metrics)


class OneSlot:
    """A slot, and then none. ahead: gives the microbatch that comes next, where that is known."""

    def __init__(self, slot: Slot, ahead: Callable[[], Parts] = tuple) -> None:
        self.slot: Slot | None = slot
        self.peek = ahead

    def next(self) -> Slot | None:
        found, self.slot = self.slot, None
        return found

    def is_asked(self) -> bool:
        return False


def run_slot(host: Host, slotted: Slotted, before: Ahead | None = None, is_alone: Callable[[], bool] = bool) -> Outcome:
    """Run a slot and take its steps. Requests count the piece; their results are the caller's to publish.

    Args:
        before: what the slot before has made ready.
        is_alone: whether no other model has work now. Then the next microbatch is made ready while the device works.
    """
    tenants = slotted.tenants
    slotted.sums = {lane.model: tenants[lane.model].sums for lane, _ in slotted.to_blame}
    own = sorted(slotted.pieces, key=lambda found: _number(tenants[found[0].model]))
    if before is not None and [request for _, request in own] == [before.request] and before.request.at == before.at:
        parts = before.parts
    else:
        parts = [_part(tenants[lane.model], request, request.at, slotted.is_evaluation) for lane, request in own]
    for _, request in own:
        assert request.work is not None
        host.budget.take(max(request.work.samples[number].num_tokens for number in request.pieces[request.at]))
    if slotted.is_evaluation:
        found = host.evaluate(parts)
        if found is None:
            return Outcome(lacking=sum(row.sample.num_tokens for part in parts for row in part.rows))
        return _counted(Outcome(), own, found.losses_L.cpu(), tenants)
    settings: list[Settings] = []
    for lane, request in slotted.steps:
        settings.append(_settings(request))
        tenants[lane.model].settle(settings[-1])
    steps = [
        Step(_number(tenants[lane.model]), one.learning_rate)
        for (lane, _), one in zip(slotted.steps, settings, strict=True)
    ]
    slot = Slot(parts, frozenset(part.adapter for part in parts), tuple(steps), wants_losses=True)

    def ahead() -> Parts:
        slotted.ahead = _ahead(host, slotted) if is_alone() else None
        return () if slotted.ahead is None else slotted.ahead.parts

    (done,) = host.engine.run(OneSlot(slot, ahead))
    if done.lacking:
        return Outcome(lacking=done.lacking)
    outcome = Outcome() if done.losses_L is None else _counted(Outcome(), own, done.losses_L, tenants)
    outcome.steps = list(_stepped(slotted, done, tenants))
    return outcome


def _number(tenant: Tenant) -> int:
    assert tenant.adapter is not None
    return tenant.adapter.number


def _settings(request: Request) -> Settings:
    return settings_of(json.loads(request.payload))


def _ahead(host: Host, slotted: Slotted) -> Ahead | None:
    """Next microbatch of the only model of a slot that runs. None where that is not known, or leaves room for others; and where
    rows or their scale are known after the slot alone."""
    if len(slotted.pieces) != 1:
        return None
    lane, request = slotted.pieces[0]
    tenant, at = slotted.tenants[lane.model], request.at + 1
    assert tenant.state is not None
    if at == len(request.pieces):
        stepped = slotted.steps[0][1] if slotted.steps else request
        behind, at = lane.after(stepped), 0
        if behind is None or behind.work is None or behind.forward_only or behind.alone or behind.is_replayed:
            return None
        request = behind
        if not request.pieces:
            request.begin(request.budget)
    if tenant.dropout_key is not None or tenant.state.scale is not None:
        return None
    if _tokens(request, request.pieces[at]) < FULL * host.budget.tokens:
        return None
    return Ahead(request, at, [_part(tenant, request, at, False)])


def _part(tenant: Tenant, request: Request, at: int, evaluates: bool) -> Part:
    assert request.work is not None and tenant.state is not None
    samples, piece = request.work.samples, request.pieces[at]
    rows = [Row(samples[number]) if evaluates else tenant.row(samples[number], number) for number in piece]
    return Part(_number(tenant), rows, request.work.objective, tenant.state.grad_scale, facts=FACTS)


def _counted(
    outcome: Outcome, own: Sequence[tuple[Lane, Request]], losses_L: torch.Tensor, tenants: Mapping[str, Tenant]
) -> Outcome:
    """Share out the log-probabilities of a microbatch. own: in the order of its parts."""
    logprobs = -losses_L.double().numpy()
    outcome.models, start = len(own), 0
    for lane, request in own:
        assert request.work is not None
        tenant, piece = tenants[lane.model], request.pieces[request.at]
        for number in piece:
            stop = start + request.work.samples[number].num_labels
            request.logprobs.append(np.array(logprobs[start:stop]))
            start = stop
        tenant.saw(request.work.samples[piece.start])
        tokens = _tokens(request, piece)
        outcome.tokens[lane.owner] = outcome.tokens.get(lane.owner, 0) + tokens
        request.at += 1
        if not request.forward_only:
            tenant.tokens += tokens
        if request.at == len(request.pieces):
            outcome.ended.append((lane, request))
            tenant.drawn += 0 if request.forward_only else len(request.work.samples)
    return outcome


def _stepped(slotted: Slotted, done: Done, tenants: Mapping[str, Tenant]) -> Iterator[tuple[Lane, Request, Any]]:
    taken = {event.adapter: event for event in done.events if isinstance(event, StepDone)}
    made = {event.adapter: event for event in done.events if isinstance(event, Confirmed)}
    for lane, request in slotted.steps:
        tenant = tenants[lane.model]
        event, after = taken[_number(tenant)], made.get(_number(tenant))
        if event.refused == "overflow":
            metrics = {"step": float(tenant.steps), "skipped": 1.0, "loss_scale": tenant.skipped()}
            yield lane, request, {"metrics": metrics}
            continue
        if event.refused is not None:
            why = WHY[event.refused]
        elif after is not None and after.reverted:
            why = f"the step makes parameters infinite; lower learning_rate {_settings(request).learning_rate:g}"
        else:
            tenant.stepped()
            metrics = {"grad_norm": event.norm, "step": float(tenant.steps)}
            if event.scale != 1.0:
                metrics["loss_scale"] = event.scale
            yield lane, request, {"metrics": metrics}
            continue
        yield (
            lane,
            request,
            Failed(f"optim_step {request.seq}: {why}; nothing was changed, and its gradients were dropped"),
        )
