"""Models that the OpenAI-style endpoint serves of a service: base models, and an owner's checkpoints by name or tinker path.

A name is that of the owner's newest checkpoint of this name. Answers are of their connections: nothing of them is in the
journal, and a client that leaves ends its samples.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

from starlette.concurrency import run_in_threadpool

from packlora.engine.sampling import SampledToken, SampleRequest
from packlora.errors import quoted
from packlora.serve.desk import Desk
from packlora.serve.errors import Failed, Refused
from packlora.serve.openai import Served
from packlora.serve.promises import WAIT
from packlora.serve.samplers import Source
from packlora.serve.stores import new_id

SCHEME = "tinker://"


class ServedModels:
    """The endpoint's backend.

    Args:
        is_closing: whether the service is about to stop.
    """

    def __init__(self, desk: Desk, is_closing: Callable[[], bool]) -> None:
        self.desk, self.service, self.is_closing = desk, desk.service, is_closing
        self._open: Counter[str] = Counter()
        """Streams by owner; used by the server's thread alone."""

    def models(self, owner: str) -> Sequence[Served]:
        """Base models, then checkpoints, the newest first: each by its name, or by its path where a newer one has the name."""
        hosts = self.service.hosts.values()
        out = [Served(host.facts.name, host.tokenizer, frozenset(host.facts.ends)) for host in hosts]
        taken = set(self.service.hosts)
        for row in self._rows("owner = ?", owner):
            if (host := self.service.hosts.get(row["base"])) is not None:
                name = row["path"] if row["name"] in taken else row["name"]
                taken.add(name)
                out.append(Served(name, host.tokenizer, frozenset(host.facts.ends), int(row["created"])))
        return out

    def served(self, owner: str, name: str) -> Served | None:
        """See Backend."""
        source = self._source(owner, name)
        if source is None:
            return None
        host = source.host
        return Served(name, host.tokenizer, frozenset(host.facts.ends))

    def _rows(self, where: str, *values: str) -> list[sqlite3.Row]:
        query = f"select * from checkpoints where {where} and (expires is null or expires > ?) order by rowid desc"
        return self.service.journal.all(query, *values, time.time())

    def _source(self, owner: str, name: str) -> Source | None:
        """The weights of a name; None where the owner sees none of it."""
        if (base := self.service.hosts.get(name)) is not None:
            return Source(base)
        row = None
        if name.startswith(SCHEME):
            with suppress(Refused):
                row = self.desk.checkpoint(owner, name, "model")
        else:
            row = next(iter(self._rows("owner = ? and name = ?", owner, name)), None)
        host = None if row is None else self.service.hosts.get(row["base"])
        if row is None or host is None:
            return None
        folder = self.service.stores.checkpoint(row["path"])
        return Source(host, None, folder, f"{folder.name} {row['created']!r}")

    async def stream(self, owner: str, name: str, request: SampleRequest) -> AsyncGenerator[SampledToken]:
        """See Backend."""
        source = await run_in_threadpool(self._source, owner, name)
        if source is None:
            raise Refused(f"model: {quoted(name)} is not served", 404)
        source.host.check_sample(request)
        if self._open[owner] >= self.service.limits.waiting_requests:
            raise Refused(f"{self._open[owner]} answers are on their way, the limit waiting_requests", 429, WAIT)
        self._open[owner] += 1
        answer = _Answer(self, owner, source, request, lambda: self._source(owner, name))
        key = new_id()
        self.service.listen(key, answer.look)  # it is called where the service stops
        try:
            self._check()
            self.service.queue.call(answer.begin)
            while answer.left:
                token = await answer.tokens.get()
                self._check()
                if isinstance(token, Failed):
                    raise Refused(token.text, 400 if token.category == "user" else 500)
                if token is not None:
                    answer.left -= token.reason is not None
                    yield token
        finally:
            self.service.unlisten(key, answer.look)
            self._open -= Counter([owner])
            answer.is_closed = True
            self.service.queue.call(answer.end)

    def _check(self) -> None:
        """Raises Refused where the service gives no more tokens."""
        if self.service.failure is not None:
            raise Refused("the service has failed; start it again", 503, 5)
        if self.is_closing():
            raise Refused("the service is stopping; ask again when it is back", 503, 2)


class _Answer:
    """A request of the endpoint among the samples that run. The server's thread reads `tokens`, the other methods are for the
    thread that computes."""

    def __init__(
        self, models: ServedModels, owner: str, source: Source, request: SampleRequest,
        find: Callable[[], Source | None],
    ) -> None:  # fmt: skip
        self.owner = owner
        self.samplers, self.source, self.request, self._find = models.service.samplers, source, request, find
        self.left = self._left = request.num_samples
        """Samples that have not ended, for the reader and for the thread that computes."""
        self.is_closed = False
        self.tokens: asyncio.Queue[SampledToken | Failed | None] = asyncio.Queue()
        """None: look whether the service still runs."""
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """Let it run, unless its client has left."""
        if self.is_closed:
            return
        found = self._find()  # the checkpoint may be another one, or gone, since it was asked for
        if found is None:
            self.fail(Failed("model: it was deleted"))
        else:
            self.source = found
            self.samplers.enter(self.request, self, self.begin)

    def end(self) -> None:
        """Forget it."""
        self.samplers.leave(self)

    def take(self, token: SampledToken) -> bool:
        """See Running."""
        self._put(token)
        self._left -= token.reason is not None
        return not self._left

    def fail(self, why: Failed) -> None:
        """See Running."""
        self._put(why)

    def look(self) -> None:
        """Let the reader look whether the service still runs. Any thread may call it."""
        self._put(None)

    def _put(self, found: SampledToken | Failed | None) -> None:
        with suppress(RuntimeError):  # the server's loop is closed
            self._loop.call_soon_threadsafe(self.tokens.put_nowait, found)
