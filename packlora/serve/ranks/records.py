"""Records that rank 0 has of the others: a record and a lane of each of their models, and the load of all ranks."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from packlora.errors import ProcessError
from packlora.serve.figures import WINDOW
from packlora.serve.queue import Lane, Request
from packlora.serve.ranks.channel import Channel
from packlora.serve.tenant import Tenant

PASSED_ON = ("id", "model", "seq", "kind", "payload", "budget", "state", "forward_only")
"""What another rank gets of a request."""


BYTES_OF_A_TOKEN = 16
"""Bytes of a token in a request: its id, its target's, and a weight."""


class RemoteTenant(Tenant):
    """Record of a model that is on another rank."""

    rank = 0
    is_awake_there = False

    @property
    def is_on_the_base(self) -> bool:
        """See Tenant."""
        return self.is_awake_there

    def take(self, steps: int, losses: Sequence[float], trained_at: float, is_awake: bool) -> None:
        """Its rank says how it stands."""
        self.steps, self.trained_at, self.is_awake_there = steps, trained_at, is_awake
        self.losses = deque(losses, self.losses.maxlen)


class RemoteLane(Lane):
    """Requests of a model that is on another rank. None of them is due here.

    Args:
        rank: that gets them.
    """

    def __init__(self, owner: str, model: str, host: str, rank: Rank) -> None:
        super().__init__(owner, model, host)
        self.rank = rank

    @property
    def head(self) -> None:
        """See Lane."""

    def put(self, request: Request) -> None:
        """Pass a request on."""
        self.expect(request)
        own = {name: getattr(request, name) for name in PASSED_ON}
        self.rank.channel.send("put", request=own)

    def expect(self, request: Request) -> None:
        """Count a request until its result comes."""
        if not request.is_replayed:
            super().put(request)
            self.rank.away[request.id] = self, request


@dataclass(eq=False)
class Rank:
    """Another rank.

    away: requests without results that it has, by promise, with their lanes. samples: that have not ended there.
    """

    number: int
    channel: Channel
    pid: int = 0
    device: str = ""
    away: dict[str, tuple[RemoteLane, Request]] = field(default_factory=dict)
    samples: int = 0
    is_stopped: bool = False

    def __str__(self) -> str:
        return f"rank {self.number} (process {self.pid}{f', {self.device}' if self.device else ''})"

    def ready(self) -> Rank:
        """Wait until it has loaded the base models. Raises ProcessError where it fails."""
        while not self.device:
            try:
                kind, values = self.channel.read()
            except EOFError:
                raise ProcessError(self.lost) from None
            if kind == "failed":
                raise ProcessError(f"{self}: {values['reason']}")
            self.pid, self.device = values.get("pid", self.pid), values.get("device", "")
        return self

    @property
    def lost(self) -> str:
        """Message where it ends without a word."""
        return (
            f"{self} has ended without a word, as a process that was killed does; start again, and the service goes on"
        )


class Recent:
    """Tokens that a rank has trained in the last minute. Any thread may call it."""

    def __init__(self) -> None:
        self._own, self._total, self._lock = deque[tuple[float, int]](), 0, threading.Lock()

    def add(self, tokens: int) -> None:
        """The rank has trained so many."""
        with self._lock:
            self._own.append((time.monotonic(), tokens))
            self._total += tokens
            self._forget()

    @property
    def tokens(self) -> int:
        """How many they are."""
        with self._lock:
            self._forget()
            return self._total

    def _forget(self) -> None:
        """Forget what is older."""
        since = time.monotonic() - WINDOW
        while self._own and self._own[0][0] < since:
            self._total -= self._own.popleft()[1]


def number_of(lane: Lane) -> int:
    """Number of the rank that has a lane's model."""
    return lane.rank.number if isinstance(lane, RemoteLane) else 0


def waiting_tokens(lane: Lane) -> int:
    """About how many tokens wait in a lane, by the bytes of its requests."""
    return lane.bytes // BYTES_OF_A_TOKEN
