"""A rank other than 0 of a base that is cut: it does what rank 0 tells, in that order, with its own slices."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from packlora.adapters.attach import Adapter
from packlora.config import Run
from packlora.engine.adapters import AdapterState
from packlora.errors import ProcessError, reason_of
from packlora.serve.group.host import GroupHost, hosts_of
from packlora.serve.group.together import Ended, processes
from packlora.serve.group.told import parts_from, prompt_from, slot_from, spec_from, token_from
from packlora.serve.host import freeze
from packlora.serve.ranks.channel import Channel
from packlora.serve.slots import OneSlot

LOST = "rank 0 has ended; the same command goes on"


class Follower:
    """Obeys what a rank is told of a base. Adapters have the numbers that they have on rank 0. Raises together.Ended."""

    def __init__(self, host: GroupHost) -> None:
        self.host = host
        self._adapters: dict[int, Adapter] = {}
        self._states: dict[int, AdapterState] = {}
        self._handlers: dict[str, Callable[..., Any]] = {
            "attach": self._attach, "detach": self._detach, "state": self._state, "train": self._train, "take": self._take,
            "parameters": lambda number: host.parameters(self._states[number]),
            "moments": lambda number: host.moments(self._states[number]),
            "slot": self._slot, "evaluate": lambda parts: host.evaluate(parts_from(parts)),
            "prefill": lambda prompts: host.passes.prefill([*map(prompt_from, prompts)]),
            "decode": lambda tokens: host.passes.decode([*map(token_from, tokens)]),
            "resize": lambda slots, length, moved: host.passes.cache.resize(slots, length, dict(moved)),
            "clear": lambda slot: host.passes.cache.clear(slot), "free": lambda: host.passes.cache.free(),
        }  # fmt: skip

    def obey(self, kind: str, values: Mapping[str, Any]) -> None:
        """Do what rank 0 does."""
        self._handlers[kind](**values)

    def _attach(self, name: str, spec: Mapping[str, Any], seed: int) -> None:
        with contextlib.suppress(MemoryError):  # rank 0 has it too, and says so
            adapter = self.host.attach(name, spec_from(spec), seed)
            self._adapters[adapter.number] = adapter

    def _detach(self, number: int) -> None:
        self._states.pop(number, None)
        self.host.detach(self._adapters.pop(number))

    def _state(self, number: int) -> None:
        self._states[number] = self.host.state_of(self._adapters[number])

    def _train(self, number: int) -> None:
        self.host.train(self._adapters[number], self._states[number])

    def _take(self, number: int, steps: Mapping[str, float], numbers: Mapping[str, str]) -> None:
        self.host.take_shared(self._adapters[number], self._states.get(number), steps, numbers)

    def _slot(self, **values: Any) -> None:
        deque(self.host.engine.run(OneSlot(slot_from(values, self._states))), 0)


def follow(channel: Channel, hosts: Mapping[str, GroupHost]) -> None:
    """Obey until rank 0 says that it is over. Raises ProcessError where it ends without that, Ended."""
    followers = {name: Follower(host) for name, host in hosts.items()}
    for host in hosts.values():
        host.take_device()
    while True:
        try:
            kind, values = channel.read()
        except EOFError:
            raise ProcessError(LOST) from None
        if kind == "stop":
            channel.send("stopped")
            return
        followers[values.pop("base")].obey(kind, values)


def work(channel: Channel, size: int, runs_of: Callable[[], Mapping[str, Run]], context: int) -> None:
    """Be one of so many ranks until rank 0 says that it is over.

    Args:
        runs_of: makes the settings of the base models, as on rank 0.

    Raises:
        ProcessError: rank 0 has ended, or this rank has failed and rank 0 says why.
    """
    channel.send("process", pid=os.getpid())
    try:
        with processes(size) as group:
            hosts = hosts_of(runs_of(), context, group)
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 gets them too, and lets the others end
                    signal.signal(number, signal.SIG_IGN)
                freeze()
            channel.send("ready", device=str(next(iter(hosts.values())).device))
            follow(channel, hosts)
    except BaseException as error:
        own = not isinstance(error, ProcessError) and not (isinstance(error, Ended) and not error.is_own)
        reason = str(error) if isinstance(error, Ended | ProcessError) else reason_of(error)
        channel.send("failed", reason=reason)
        found = ProcessError(reason)
        found.is_news = not own  # rank 0 says what is this rank's own, and may be no more where it is not
        raise found from error
