"""The thread that computes: it drains the queue, packs rows of all tenants into shared microbatches, steps, samples, publishes.

One turn does what is due: saves and loads of models, a slot of the engine, a step of the samplers. A result is committed to the
journal before anybody sees it. A service that starts on a state folder goes on where the last one was, whatever ended it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packlora.engine.memory import free_memory
from packlora.errors import InputError, WriteError, reason_of
from packlora.serve.adapters import Wanted
from packlora.serve.errors import Failed
from packlora.serve.host import Host
from packlora.serve.limits import Limits
from packlora.serve.logs import LOG
from packlora.serve.losses import work_of
from packlora.serve.messages import parsed, read_forward_backward
from packlora.serve.publisher import Publisher
from packlora.serve.queue import Lane, Request
from packlora.serve.retention import Retention
from packlora.serve.samplers import Samplers
from packlora.serve.saves import carry_out
from packlora.serve.slots import Ahead, Outcome, Slotted, fill, run_slot
from packlora.serve.tenant import Tenant

LOOK_SECONDS = 1.0
"""Seconds between two looks for models without work, where others have some."""


class Service(Publisher):
    """Tenants on base models. Arguments as of Core.

    Args:
        max_wait: seconds that a microbatch with room waits for more.

    Raises:
        InputError: the state folder is of other bases, or none of ours.
    """

    def __init__(
        self, hosts: Mapping[str, Host], state: Path, limits: Limits | None = None, max_wait: float = 0.0
    ) -> None:
        super().__init__(hosts, state, limits)
        self.max_wait, self._expired, self._retention = max_wait, {}, Retention()
        self.samplers = self._make_samplers()
        self._ahead: Ahead | None = None
        """Microbatch that the last slot has made ready, for the next one."""
        self._look_at = 0.0
        """When to look for models without work though others have some, seconds of a monotonic clock."""
        self._thread: threading.Thread | None = None
        self._check_bases()
        self._restore()

    def _make_samplers(self) -> Samplers:
        """Samples of the service."""
        return Samplers(self)

    # --- start and end -----------------------------------------------------------------------------------------------------

    def _check_bases(self) -> None:
        """Raises InputError where the state folder is of other weights."""
        for name, host in self.hosts.items():
            assert host.base.fingerprint is not None
            key, now = f"base {name}", host.base.fingerprint.model_dump_json()
            before = self.journal.fact(key)
            if before is None:
                self.journal.set_fact(key, now)
            elif before != now:
                raise InputError(
                    f"--state {self.state}: it was made with other weights of {name!r} than {host.facts.path} holds; give "
                    "these weights, or another --state"
                )

    def _restore(self) -> None:
        for row in self.journal.all("select * from models where state = 'open'"):
            host = self.hosts.get(row["base"])
            if host is None:
                raise InputError(
                    f"--state {self.state}: it has models of {row['base']!r}, which is not served now; add --base "
                    f"{row['base']}=PATH, or give another --state"
                )
            self.add_tenant(row, host)
        self._refuse_closed()
        samplers = self.journal.all("select folder from samplers where state = 'open' and folder is not null")
        self.stores.clean(self.tenants, [row["folder"] for row in samplers])
        self.samplers.restore()

    def add_tenant(self, row: Any, host: Host) -> None:
        """A model of the journal may have work now."""
        wanted = Wanted.of_dict(json.loads(row["spec"]))
        folder = self.stores.model(row["id"])
        tenant = Tenant(host, row["id"], row["owner"], row["session"], wanted, folder, row["snapshot"])
        lane = Lane(row["owner"], row["id"], host.facts.name)
        self.tenants[tenant.id] = tenant
        self._rewind(lane, tenant, None)
        self.queue.open(lane)

    def start(self) -> None:
        """Compute in a thread from now on."""
        self._thread = threading.Thread(target=self._run, name="packlora-serve", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the thread after its present turn, and close the journal. Returns how many promises the next start keeps."""
        self.stopping = True
        with self.queue.changed:
            self.queue.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        row = self.journal.one("select count(*) as n from requests where state = 'waiting'")
        self.journal.close()
        return 0 if row is None else int(row["n"])

    def _run(self) -> None:
        try:
            for host in self.hosts.values():
                host.take_device()
            while not self.stopping:
                before = self.queue.version
                if not self.turn():
                    with self.queue.changed:
                        if self.queue.version == before and not self.stopping:
                            self.queue.changed.wait(1.0)
        except BaseException as error:
            self.end_by(error)

    # --- a turn ------------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Do what is due. Returns whether there was anything."""
        did = False
        for task in self.queue.take_tasks():
            task()
            did = True
        for host in self.hosts.values():
            lanes = [lane for lane in self.queue.due() if lane.host == host.facts.name]
            ready = [lane for lane in lanes if self._prepare(lane)]
            did |= bool(lanes)
            if ready:
                self._slot(host, ready)
            did |= self.samplers.step(host)
        if not did or time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS  # one at a time: others wait while its snapshot is written
            did |= self._tidy()
            for host in self.hosts.values():
                did |= host.tidy()
        return did

    def _prepare(self, lane: Lane) -> bool:
        """Make the head of a lane ready for a slot, or carry it out where it needs none. Returns whether it needs one."""
        tenant = self.tenants[lane.model]
        try:
            tenant.wake()
        except (MemoryError, InputError, OSError, Failed) as error:
            why = error.text if isinstance(error, Failed) else reason_of(error)
            self._fail_first(lane, Failed(f"the model cannot be loaded: {why}", "server"))
            return False
        request = lane.head
        assert request is not None
        try:
            return self._is_for_slot(lane, tenant, request)
        except Failed as error:
            self.finish(lane, request, error)
        except OSError as error:
            self.finish(lane, request, Failed(f"{request.kind} {request.seq}: {reason_of(error)}", "server"))
        except (sqlite3.Error, WriteError):  # the journal cannot be written, which is no fault of the request
            raise
        except Exception as error:  # a defect met by one model is no other's matter
            LOG.exception("%s of a model failed", request.kind)
            self._refuse(lane, request, error)
            self._set_aside(lane)
        return False

    def _is_for_slot(self, lane: Lane, tenant: Tenant, request: Request) -> bool:
        if request.kind == "forward_backward":
            if request.state == "failed":
                if not request.forward_only:
                    tenant.spoil(request.seq)
            elif not (request.is_replayed and request.forward_only):
                self._read(tenant.host, request)
                return True
        elif request.kind == "optim_step":
            if request.state == "failed":
                tenant.discard()
            elif (spoilt := tenant.spoilt) is not None:
                tenant.discard()
                raise Failed(
                    f"optim_step {request.seq}: forward_backward {spoilt} before it failed, so the gradients since the last "
                    "step were dropped and nothing was changed; send them again"
                )
            elif tenant.has_gradient:
                return True
            else:
                self.finish(lane, request, {"metrics": {"grad_norm": 0.0, "step": float(tenant.steps)}})
                return False
        elif not request.is_replayed:
            self.finish(lane, request, *carry_out(self, tenant, request))
            if request.kind == "save_weights_for_sampler":
                self.samplers.make_room(tenant.owner)
            return False
        self.queue.pop(lane, request)
        return False

    def _read(self, host: Host, request: Request) -> None:
        """Read the rows of a request that came with an earlier process, whose context may have been longer."""
        if request.work is None:
            found, most = read_forward_backward(parsed(request.payload), self.limits), self.limits.targets
            request.work = work_of(found, host.facts.vocabulary, most, most)
        if not request.pieces:
            request.begin(request.budget)

    # --- slots -------------------------------------------------------------------------------------------------------------

    def _slot(self, host: Host, lanes: list[Lane]) -> None:
        filled = fill(host, lanes, self.tenants)
        if self.max_wait and not filled.is_full and (left := filled.arrived + self.max_wait - time.monotonic()) > 0:
            with self.queue.changed:
                self.queue.changed.wait(left)
            return
        tokens = {lane.model: filled.tokens_of(lane) for lane in filled.lanes}
        before, self._ahead = self._ahead, None
        try:
            outcome = run_slot(host, filled, before, lambda: self._is_alone(host, filled))
        except (sqlite3.Error, KeyboardInterrupt, SystemExit):
            raise
        except Exception as error:
            self._blame(filled, error)
            return
        for lane in filled.lanes:
            self.queue.shares.charge(lane, tokens[lane.model])
        if outcome.lacking:
            self._lower_budget(host, filled, outcome.lacking)
            return
        if not any(isinstance(found, Failed) for _, _, found in outcome.steps):
            self._ahead = filled.ahead
        self._take(outcome)

    def _is_alone(self, host: Host, filled: Slotted) -> bool:
        """Whether no other model has work on a base."""
        lanes = filled.lanes
        return all(lane in lanes for lane in self.queue.working() if lane.host == host.facts.name)

    def _blame(self, filled: Slotted, error: Exception) -> None:
        """A slot has failed. Requests of several models are tried one by one; one that fails by itself is refused. Models that
        keep some of it begin at their snapshots, so that no rows count twice and no step is half taken."""
        LOG.warning("a slot of %d models failed: %s", len(filled.lanes), reason_of(error))
        kept, blamed = filled.drop_gradients(), filled.to_blame
        for lane, request in blamed:
            if len(blamed) > 1:
                request.alone = True
                if lane in kept and request.work is not None:
                    request.begin(request.budget)
            else:
                self._refuse(lane, request, error)
        for lane in kept:
            self._set_aside(lane)

    def _lower_budget(self, host: Host, filled: Slotted, tokens: int) -> None:
        """Memory ran out, and nothing was added to any gradient: the same rows come again, in smaller microbatches unless
        models that left have given memory back."""
        if not host.tidy(0):
            host.budget.tokens = host.budget.below(tokens)
            LOG.warning("memory ran out in a microbatch of %d tokens; from now on %d", tokens, host.budget.tokens)
        free_memory(host.device)
        for _, request in filled.requests:
            request.begin(host.budget.tokens)

    def _take(self, outcome: Outcome) -> None:
        """Publish what came of a slot: results of requests whose last piece it was, and of steps."""
        rewound: list[Lane] = []
        results: list[tuple[Lane, Request, Any]] = []
        for lane, request in outcome.ended:
            try:
                results.append((lane, request, b"" if request.is_replayed else outcome.result(request)))
                self.tenants[lane.model].saw_loss(request)
            except Failed as error:
                results.append((lane, request, error))
        for lane, request, found in outcome.steps:
            results.append((lane, request, found))
            if isinstance(found, Failed):
                rewound.append(lane)
        self._publish(results)
        for lane in rewound:  # its moments may not be finite
            self._set_aside(lane)
        self.figures.slot(outcome.tokens, outcome.models, len(outcome.steps))
