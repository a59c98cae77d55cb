"""Order of work: the requests of a model by their numbers, and models by fair shares of tokens.

A client numbers the requests of a model from 1 without holes, and may send them in another order: what comes early waits. A
lane is a model's requests. Among lanes the one whose owner has been given the fewest tokens comes first, then the one that has
been given the fewest of the owner's: who has one request does not wait behind five hundred of another.

All calls hold `Queue.changed`, a condition that says when something has come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from packlora.serve.losses import Work, cut


@dataclass(slots=True, eq=False)
class Request:
    """A request of a model. state: `waiting`, or `done` or `failed` where its result is known and the model's state lacks it.

    work: of a forward_backward, once it was read. pieces: rows of each part of a microbatch, once it was cut. at: the next
    piece. logprobs: of each sample that has run. arrived: seconds of a monotonic clock.
    """

    id: str
    model: str
    seq: int
    kind: str
    payload: bytes
    budget: int
    state: str = "waiting"
    forward_only: bool = False
    work: Work | None = None
    pieces: list[range] = field(default_factory=list)
    at: int = 0
    logprobs: list[np.ndarray] = field(default_factory=list)
    loss: float = 0.0
    """Mean of a label, once its rows have run."""
    alone: bool = False
    """Whether it runs in microbatches of its own, since one with others has failed."""
    arrived: float = field(default_factory=time.monotonic)

    @property
    def is_replayed(self) -> bool:
        """Whether its result is known."""
        return self.state != "waiting"

    def begin(self, budget: int) -> None:
        """Cut what is left of it into pieces of so many tokens."""
        assert self.work is not None
        done = len(self.logprobs)
        rest = cut(self.work.samples[done:], budget, lambda sample: max(sample.num_tokens, sample.num_labels))
        self.pieces = [range(done + piece.start, done + piece.stop) for piece in rest]
        self.at = 0

    @property
    def tokens(self) -> int:
        """Tokens of the next piece."""
        assert self.work is not None
        return sum(self.work.samples[number].num_tokens for number in self.pieces[self.at])


class Lane:
    """Requests of a model that were not carried out. next: number of the one that is due."""

    def __init__(self, owner: str, model: str, host: str) -> None:
        self.owner, self.model, self.host, self.next = owner, model, host, 1
        self.requests: dict[int, Request] = {}
        self.waiting = 0
        """Requests whose result is not known."""
        self.bytes = 0
        """Bytes of their payloads."""
        self.is_roused = False
        """Whether requests are to be done again though nothing waits behind them."""

    @property
    def head(self) -> Request | None:
        """The request that is due. A lane whose results are all known has none, unless it is roused: its model sleeps until
        there is more to do."""
        return self.requests.get(self.next) if self.waiting or self.is_roused else None

    def put(self, request: Request) -> None:
        """Add a request."""
        self.requests[request.seq] = request
        self._count(request, 1)

    def after(self, request: Request) -> Request | None:
        """The request behind one, if it has come."""
        return self.requests.get(request.seq + 1)

    def fail(self, request: Request) -> None:
        """A request that is not due yet has failed; it is still to be passed over in its turn."""
        self._count(request, -1)
        request.state = "failed"

    def pop(self, request: Request) -> None:
        """A request was carried out."""
        del self.requests[request.seq]
        self._count(request, -1)
        self.next = request.seq + 1

    def _count(self, request: Request, sign: int) -> None:
        """A request came, or went, whose result may not be known."""
        if not request.is_replayed:
            self.waiting += sign
            self.bytes += sign * len(request.payload)


class Sharer(Protocol):
    """A holder of a share: a lane, or a request for samples."""

    owner: str
    model: str


S = TypeVar("S", bound=Sharer)


class Shares:
    """Tokens that were given to owners and their models. One that was idle is as one that was given the fewest."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, ...], float] = {}
        self._active: set[tuple[str, ...]] = set()

    def order(self, lanes: Iterable[S]) -> list[S]:
        """Lanes, the one first that is due."""
        lanes = list(lanes)
        keys: set[tuple[str, ...]] = {(lane.owner,) for lane in lanes} | {(lane.owner, lane.model) for lane in lanes}
        for level in (1, 2):
            here = {key for key in keys if len(key) == level}
            for peers in _peers(here):
                floor = min((self._used[key] for key in peers if key in self._active), default=0.0)
                for key in peers - self._active:
                    self._used[key] = max(self._used.get(key, 0.0), floor)
        self._active = keys

        def rank(lane: S) -> tuple[float, float]:
            return self._used[lane.owner,], self._used[lane.owner, lane.model]

        return sorted(lanes, key=rank)

    def charge(self, lane: Sharer, tokens: int) -> None:
        """Tokens were given to a lane."""
        for key in ((lane.owner,), (lane.owner, lane.model)):
            self._used[key] = self._used.get(key, 0.0) + tokens

    def drop(self, lane: Lane) -> None:
        self._used.pop((lane.owner, lane.model), None)


def _peers(keys: set[tuple[str, ...]]) -> Iterator[set[tuple[str, ...]]]:
    """Keys that share something: all owners, or the models of one."""
    for parent in {key[:-1] for key in keys}:
        yield {key for key in keys if key[:-1] == parent}


class Queue:
    """Lanes of all models, and other work for the thread that computes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.lanes: dict[str, Lane] = {}
        self._filled: dict[str, Lane] = {}
        """Lanes that have requests: models without work cost those that work nothing."""
        self.shares = Shares()
        self._tasks: list[Callable[[], Any]] = []
        self.version = 0
        """Changes when something has come."""

    def open(self, lane: Lane) -> None:
        with self.changed:
            self.lanes[lane.model] = lane
            self._look(lane)

    def close(self, model: str) -> list[Request]:
        """Drop a lane. Returns its requests that waited."""
        with self.changed:
            lane, _ = self.lanes.pop(model, None), self._filled.pop(model, None)
            if lane is None:
                return []
            self.shares.drop(lane)
            return [request for request in lane.requests.values() if not request.is_replayed]

    def put(self, request: Request) -> bool:
        """Add a request to its lane. Returns whether there is one."""
        with self.changed:
            lane = self.lanes.get(request.model)
            if lane is not None:
                lane.put(request)
                self._look(lane)
                self._notify()
            return lane is not None

    def pop(self, lane: Lane, request: Request) -> None:
        """A request was carried out."""
        with self.changed:
            lane.pop(request)
            self._look(lane)

    def rewind(self, lane: Lane, first: int, requests: Iterable[Request]) -> None:
        """Let a lane begin with another request. requests: come before those that it has."""
        with self.changed:
            lane.next = first
            for request in requests:
                lane.put(request)
            self._look(lane)

    def _look(self, lane: Lane) -> None:
        """The requests of a lane are others now."""
        if lane.requests and self.lanes.get(lane.model) is lane:
            self._filled[lane.model] = lane
        else:
            self._filled.pop(lane.model, None)

    def call(self, task: Callable[[], Any]) -> None:
        """Let the thread that computes do something that is of no lane."""
        with self.changed:
            self._tasks.append(task)
            self._notify()

    def take_tasks(self) -> list[Callable[[], Any]]:
        """Tasks that were called for since the last time."""
        with self.changed:
            found, self._tasks = self._tasks, []
            return found

    def _notify(self) -> None:
        self.version += 1
        self.changed.notify_all()

    def working(self) -> list[Lane]:
        """Lanes whose head has come."""
        with self.changed:
            return [lane for lane in self._filled.values() if lane.head is not None]

    def due(self) -> list[Lane]:
        """Lanes whose head has come, the one first that is due."""
        with self.changed:
            return self.shares.order(self.working())

    @property
    def waiting(self) -> int:
        """Requests that were not carried out, of all lanes."""
        with self.changed:
            return sum(lane.waiting for lane in self._filled.values())

    @property
    def bytes(self) -> int:
        """Bytes of the payloads that wait, of all lanes."""
        with self.changed:
            return sum(lane.bytes for lane in self._filled.values())
