"""Rank 0 of a base that is cut: a service as one process is, which tells the other ranks what it computes."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packlora.config import Run
from packlora.errors import InputError, ProcessError
from packlora.serve.adapters import Wanted
from packlora.serve.errors import Refused
from packlora.serve.group.host import GroupHost, hosts_of
from packlora.serve.group.together import Ended, processes
from packlora.serve.host import Host
from packlora.serve.queue import Request
from packlora.serve.ranks.channel import Channel, packed
from packlora.serve.ranks.records import Rank
from packlora.serve.service import Service

LAST_WORDS = 5.0
"""Seconds for which it is waited what another rank says that did not answer, and for the thread that computes once the service
has failed: a message of a rank that is no more may be waited for long."""


class GroupService(Service):
    """The service of rank 0. Arguments as of Service.

    Args:
        ranks: the others, in their order, with the base models loaded.
    """

    def __init__(
        self, hosts: Mapping[str, GroupHost], state: Path, ranks: Sequence[Rank], max_wait: float = 0.0
    ) -> None:
        self.ranks, self._said = ranks, threading.Event()
        self._readers = [threading.Thread(target=self._read_all, args=(rank,), daemon=True) for rank in ranks]
        for host in hosts.values():
            host.announce = self._tell
        super().__init__(hosts, state, max_wait=max_wait)

    def _tell(self, kind: str, **values: Any) -> None:
        data = packed(kind, values)
        for rank in self.ranks:
            rank.channel.pass_on(data)

    def add_tenant(self, row: Any, host: Host) -> None:
        """See Service."""
        try:
            host.spec_of(Wanted.of_dict(json.loads(row["spec"])))
        except Refused as error:
            raise InputError(f"--state {self.state}: it has a model that cannot go on: {error.text}") from None
        super().add_tenant(row, host)

    def _read(self, host: Host, request: Request) -> None:
        """See Service. Where a number of tokens is given, what was promised under a larger one is cut anew: that may have been
        too much."""
        given = host.run.max_tokens_per_microbatch
        request.budget = request.budget if given == "auto" else min(request.budget, int(given))
        super()._read(host, request)

    # --- start and end -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Service."""
        for reader in self._readers:
            reader.start()
        super().start()

    def stop(self) -> int:
        """See Service. Where the service has failed, a thread that waits for a rank that is no more is left alone."""
        if self.failure is not None and self._thread is not None:
            self._thread.join(LAST_WORDS)
            if self._thread.is_alive():
                return self.queue.waiting
        left = super().stop()
        for rank in self.ranks:
            rank.channel.send("stop")
        return left

    def end_by(self, error: BaseException) -> None:
        """See Core."""
        if not isinstance(error, Ended):
            super().end_by(error)
            self.on_failure()
            return
        if not error.is_own:
            self._said.wait(LAST_WORDS)
        self.fail(f"rank 0 has failed: {error.reason}; start again, and the service goes on")

    def fail(self, why: str) -> None:
        """See Core."""
        super().fail(why)
        self._said.set()

    def _read_all(self, rank: Rank) -> None:
        while not rank.is_stopped:
            try:
                kind, values = rank.channel.read()
            except EOFError:
                self.fail(rank.lost)
                return
            rank.is_stopped = kind == "stopped"
            if kind == "failed":
                self.fail(f"{rank} has failed: {values['reason']}; start again, and the service goes on")
                return

    def status(self, owner: str | None = None) -> dict[str, Any]:
        """See Core, with a line a rank."""
        device = next(iter(self.hosts.values())).device
        return super().status(owner) | {"ranks": [f"rank 0 ({device})", *map(str, self.ranks)]}


@contextlib.contextmanager
def led(
    channels: Mapping[int, Channel], runs: Mapping[str, Run], context: int, state: Path, max_wait: float
) -> Iterator[GroupService]:
    """The service of rank 0. The other ranks are let go of once it has stopped.

    Raises:
        InputError: as Service, and as GroupHost.
        ProcessError: another rank has ended.
    """
    ranks = [Rank(number, channels[number]) for number in sorted(channels)]
    with processes(1 + len(ranks)) as group:
        try:
            hosts = hosts_of(runs, context, group)
        except (ProcessError, Ended) as error:
            for rank in [] if isinstance(error, Ended) and error.is_own else ranks:  # one of them knows why
                rank.ready()
            raise ProcessError(str(error)) from error
        yield GroupService(hosts, state, [rank.ready() for rank in ranks], max_wait=max_wait)
