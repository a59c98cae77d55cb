"""Events of processes that train other jobs travel to the first process, where all subscribers are; what those ask for travels
back.

The events of a process keep their order; those of two processes mix as they come.
"""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import TypeAdapter

from packlora.events import (
    Event,
    MicrobatchDone,
    PipelineRan,
    RunBegan,
    RunEnded,
    StopAsked,
    TrainingBegan,
    WindowPlanned,
)
from packlora.parallel.layout import Layout
from packlora.parallel.mesh import Mesh
from packlora.result import Result
from packlora.runtime.events import Emitter, StopRequest

POLL = 0.05
"""Seconds between two looks for the events of others, once this process has nothing else to do."""
STOPPING = 15.0
"""Seconds after which a silent process is given up while the run stops: a save may hold the interpreter for as long, and
torchrun ends all processes after 30."""
ENDED = "ended"
"""Set once all jobs of the run have ended."""
KINDS: dict[str, TypeAdapter[Any]] = {kind.__name__: TypeAdapter(kind) for kind in get_args(Event)}
RESULT = TypeAdapter(Result)


def encoded(event: Event) -> str:
    """An event as JSON; NaN and infinity as Python writes them."""
    kind = type(event).__name__
    return json.dumps([kind, KINDS[kind].dump_python(event, mode="json")])


def decoded(text: str | bytes) -> Event:
    kind, fields = json.loads(text)
    event: Event = KINDS[kind].validate_python(fields)
    return event


def of_first(mesh: Mesh, result: Result | None) -> Result:
    """The result that the first process gives, on every process."""
    tree = None if result is None else RESULT.dump_python(result, mode="json")
    found: Result = RESULT.validate_python(mesh.gather(tree)[0])
    return found


def patience(mesh: Mesh, stopping: bool) -> float:
    """Seconds after which a silent process is given up by those whose jobs have ended."""
    return min(STOPPING, mesh.timeout) if stopping else mesh.timeout


def await_end(mesh: Mesh, stop: StopRequest) -> None:
    """Wait, on another process than the first and once its own jobs have ended, until those of all have, however long that
    takes.

    Args:
        stop: what this process was asked for, as by torchrun once a process has died.

    Raises:
        ProcessError: another process has failed, or the first one gives no sign of life.
    """
    with mesh.told():
        while not mesh.store.check([ENDED]):
            if failure := mesh.failure():
                raise failure
            if mesh.silent([0], patience(mesh, stop.asked)) is not None:
                raise mesh.no_sign(0)
            time.sleep(POLL)


class Relay:
    """A subscriber where events begin that are told elsewhere; takes up what the first process asks for."""

    def __init__(self, mesh: Mesh, group: int, events: Emitter) -> None:
        self.mesh, self.group, self.events = mesh, group, events
        self._sent = self._asked = 0

    def __call__(self, event: Event) -> None:
        self.mesh.store.set(f"event/{self.group}/{self._sent}", encoded(event))
        self._sent += 1
        self.look()

    def look(self) -> None:
        """Take up what the first process asks for."""
        stop = self.events.stop
        while self.mesh.store.check([key := f"ask/{self.group}/{self._asked}"]):
            job, reason, number = json.loads(self.mesh.store.get(key))
            self._asked += 1
            if job is not None:
                stop.jobs.setdefault(job, reason)
            elif not stop.asked:
                stop.ask(number)
        if not stop.asked and self.mesh.hanging([0]) is not None:  # nobody writes logs, or asks for anything
            stop.ask()


class Hub:
    """Subscriber of the first process to its own events, which tells `outer` those of all groups as of one run.

    Args:
        layout: of the run; groups without jobs tell nothing.
        outer: where the subscribers are.
        inner: the events of this process.
        logged: microbatches that earlier sessions have logged.
    """

    def __init__(
        self, mesh: Mesh, layout: Layout, outer: Emitter, inner: Emitter, order: Sequence[str], logged: int
    ) -> None:
        self.mesh, self.layout, self.outer, self.inner, self.order = mesh, layout, outer, inner, list(order)
        self.groups = [number for number, jobs in enumerate(layout.groups) if jobs]
        self._others = [layout.ranks(group)[0] for group in self.groups if group]
        self._heard = dict.fromkeys(self.groups, 0)
        self._asked = dict.fromkeys(self.groups, 0)
        self._began: dict[int, RunBegan] = {}
        self._ended: dict[int, RunEnded] = {}
        self._early: deque[tuple[int, Event]] = deque()
        """Events that came before all groups had begun."""
        self._said: set[str] = set()
        self._logged = logged

    def __call__(self, event: Event) -> None:
        self._take(0, event)
        self.look()

    def look(self) -> None:
        """Hear the others, and pass on what subscribers ask for."""
        if not self.outer.stop.asked and (rank := self.mesh.hanging(self._others)) is not None:
            self.outer.stop.ask()
            self.outer.emit(StopAsked(f"process {rank} of {self.mesh.size} gives no sign of life"))
        self._hear()

    def finish(self) -> Result:
        """Once this process's own jobs have ended: hear the others to their end, and tell that of the run.

        Raises:
            ProcessError: another process has failed, or gives no sign of life.
        """
        while len(self._ended) < len(self.groups):
            self._hear()
            if failure := self.mesh.failure():
                raise failure
            stopping = self.outer.stop.asked or self.inner.stop.asked  # as torchrun asks for it once a process has died
            if (rank := self.mesh.silent(self._others, patience(self.mesh, stopping))) is not None:
                raise self.mesh.no_sign(rank)
            time.sleep(POLL)
        event = self._end()
        self.outer.emit(event)
        self.mesh.store.set(ENDED, "")
        return event.result

    def _hear(self) -> None:
        """Hear what others have told since. What subscribers ask for then is passed on."""
        for group in self.groups[1:]:
            while self.mesh.store.check([key := f"event/{group}/{self._heard[group]}"]):
                event = decoded(self.mesh.store.get(key))
                self.mesh.store.delete_key(key)
                self._heard[group] += 1
                self._take(group, event)
        self._pass_on()

    def _take(self, group: int, event: Event) -> None:
        if isinstance(event, RunBegan):
            self._began[group] = event
            if len(self._began) == len(self.groups):
                self.outer.emit(self._beginning())
                while self._early:
                    self._tell(*self._early.popleft())
        elif len(self._began) < len(self.groups):
            self._early.append((group, event))
        else:
            self._tell(group, event)

    def _tell(self, group: int, event: Event) -> None:
        match event:
            case RunEnded():
                self._ended[group] = event
                return
            case TrainingBegan() | StopAsked():
                if (
                    isinstance(event, StopAsked) and not self.outer.stop.asked
                ):  # what one process is asked for stops all
                    self.outer.stop.ask(signal.Signals.__members__.get(event.by))
                if (kind := type(event).__name__) in self._said:
                    return
                self._said.add(kind)
            case MicrobatchDone():
                event = replace(
                    event,
                    index=self._logged,
                    rank=self.layout.ranks(group)[event.rank * self.layout.devices_per_replica],
                )
                self._logged += 1
            case WindowPlanned() | PipelineRan():
                event = replace(event, group=group)
        self.outer.emit(event)

    def _pass_on(self) -> None:
        asked, own = self.outer.stop, self.inner.stop
        if own.asked and not asked.asked:  # by a signal
            asked.ask(own.signal)
        if asked.asked and not own.asked:
            own.ask(asked.signal)
        if asked.asked and "stop" not in self._said:
            self._said.add("stop")
            for group in self.groups[1:]:
                self._ask(group, None, "", asked.signal)
        for job in list(asked.jobs):
            reason = asked.jobs.pop(job)
            group = next((number for number, jobs in enumerate(self.layout.groups) if job in jobs), 0)
            if group:
                self._ask(group, job, reason, None)
            else:
                own.jobs.setdefault(job, reason)

    def _ask(self, group: int, job: str | None, reason: str, number: int | None) -> None:
        self.mesh.store.set(f"ask/{group}/{self._asked[group]}", json.dumps([job, reason, number]))
        self._asked[group] += 1

    def _beginning(self) -> RunBegan:
        first, every = self._began[0], [self._began[group] for group in self.groups]
        jobs = {job.name: job for event in every for job in event.jobs}
        earlier = [told for event in every for told in event.earlier]
        return replace(first, jobs=tuple(jobs[name] for name in self._in_order(jobs)), earlier=tuple(earlier))

    def _in_order(self, jobs: Collection[str]) -> list[str]:
        """Sort the jobs of the run file in its order, then those that have joined."""
        return [name for name in dict.fromkeys([*self.order, *jobs]) if name in jobs]

    def _end(self) -> RunEnded:
        every = [self._ended[group] for group in self.groups]
        results = [event.result for event in every]
        jobs = {name: job for result in results for name, job in result.jobs.items()}
        of_all = {result.status for result in results}
        status = next((word for word in ("interrupted", "failed") if word in of_all), "done")
        signals = [result.signal for result in results if result.signal is not None]
        result = replace(
            results[0], status=status, seconds=max(own.seconds for own in results), tokens=sum(own.tokens for own in results),
            jobs={name: jobs[name] for name in self._in_order(jobs)}, signal=signals[0] if signals else None,
        )  # fmt: skip
        seconds, memory = max(event.seconds for event in every), max(event.peak_memory for event in every)
        return RunEnded(result, seconds, sum(event.tokens for event in every), memory)
