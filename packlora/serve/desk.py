"""The desk: requests are checked, written down and promised, before any of their work is done.

A promise is on the disk when it is answered. A retry, known by the number that the client gave the request and not by any
header, gets the first promise; another request under the same number is refused. Any thread may call it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from packlora.errors import quoted
from packlora.serve.adapters import Wanted, wanted
from packlora.serve.errors import Failed, Refused
from packlora.serve.fields import check_switches, checked_seq, metadata_of, number_of, seconds_of, text_of
from packlora.serve.host import Host
from packlora.serve.journal import add_request, as_json
from packlora.serve.logs import log
from packlora.serve.losses import check_ignored, work_of
from packlora.serve.messages import parsed, read_forward_backward
from packlora.serve.optimizer import settings_of
from packlora.serve.promises import REFUSED, WAIT, Promises, digest_of
from packlora.serve.queue import Request
from packlora.serve.sampling_requests import request_of
from packlora.serve.stores import TRAINING, TinkerPath, checked_name
from packlora.serve.tenant import START, Tenant


class Models(Promises):
    """Models, and requests of models."""

    # --- models ------------------------------------------------------------------------------------------------------------

    def create_model(self, owner: str, body: Mapping[str, Any]) -> str:
        """Promise a model with a new adapter."""
        session, number = self.session(owner, body.get("session_id")), number_of(body, "model_seq_id", 0)
        digest = digest_of(body)
        key = f"make:{session['id']}:{number}"
        if (known := self._known(owner, key, digest)) is not None:
            return known
        host = self.host(body.get("base_model"))
        metadata = metadata_of(body, self.limits.metadata_bytes)
        optimizer = body.get("optimizer_config") or {}
        kind = optimizer.get("type", "adamw") if isinstance(optimizer, Mapping) else optimizer
        if kind != "adamw":
            raise Refused(f"optimizer_config.type: {quoted(kind)} is not served; adamw is")
        own = wanted(body.get("lora_config"), metadata, self.limits)
        host.check_start(host.spec_of(own))
        return self._make(owner, session["id"], number, key, digest, "create_model", host, own, metadata, {})

    def load_as_new(self, owner: str, body: Mapping[str, Any]) -> str:
        """Promise a model that begins with a checkpoint."""
        session, number = self.session(owner, body.get("session_id")), number_of(body, "model_seq_id", 0)
        digest = digest_of(body)
        key = f"make:{session['id']}:{number}"
        if (known := self._known(owner, key, digest)) is not None:
            return known
        row = self.checkpoint(owner, body.get("path"))
        if row["kind"] != TRAINING:
            raise Refused(
                f"path: {row['path']} is of {row['kind']}; load a checkpoint of {TRAINING}, as save_state makes them"
            )
        host, asked = self.host(row["base"]), body.get("base_model")
        if asked is not None and asked != row["base"]:
            raise Refused(f"base_model: {quoted(asked)}, and the checkpoint is of {row['base']}")
        check_switches(body, "optimizer")
        metadata = metadata_of(body, self.limits.metadata_bytes)
        own, result = Wanted.of_dict(json.loads(row["spec"])), {"path": row["path"], "type": "load_weights"}
        host.spec_of(own)
        self._check_room(owner)
        model = f"{session['id']}:train:{number}"
        stores = self.service.stores
        start = stores.model(model) / START
        with self.copying:
            if (known := self._known(owner, key, digest)) is not None:
                return known
            try:
                stores.copy(stores.checkpoint(row["path"]), start)
                if not body.get("optimizer"):
                    (start / "optimizer.safetensors").unlink(missing_ok=True)
                return self._make(
                    owner, session["id"], number, key, digest, "load_weights", host, own, metadata, result
                )
            except BaseException:  # else another model under this number would begin with it
                if self.journal.one("select 1 from requests where key = ? and digest = ?", key, digest) is None:
                    stores.tidy(start)
                raise

    def _make(
        self, owner: str, session: str, number: int, key: str, digest: bytes, kind: str, host: Host, own: Wanted,
        metadata: Mapping[str, Any], result: Mapping[str, Any],
    ) -> str:  # fmt: skip
        self._check_room(owner)
        model, now = f"{session}:train:{number}", time.time()
        spec = as_json(own.as_dict())
        row = (model, owner, session, host.facts.name, now, now, spec, as_json(metadata), None, None, "open")
        found = {"model_id": model, "type": kind, **result}
        make = self._unless_ended(session, "models", row)
        promise, is_new = self.promise(owner, key, kind, digest, b"", found, make)
        if is_new:
            stored = self.journal.one("select * from models where id = ?", model)
            self.service.add_tenant(stored, host)
            closed = self.journal.one("select 1 from models where id = ? and state = 'closed'", model)
            if closed is not None:  # its session has ended meanwhile
                self.service.queue.call(partial(self.service.close_model, model))
            log("model made", model=model, base=host.facts.name, rank=own.rank, owner=owner[:8])
        return promise

    def _check_room(self, owner: str) -> None:
        """End the oldest session of an owner that has models and was silent for long, where there are too many models. Raises
        Refused."""
        query = "select session from models where owner = ? and state = 'open' order by rowid"
        sessions = [row["session"] for row in self.journal.all(query, owner)]
        if len(sessions) >= self.limits.models and not self._end_silent(owner, sessions):
            raise Refused(f"{len(sessions)} open models, the limit models; close sessions that are over", 429, 60)

    def unload(self, owner: str, body: Mapping[str, Any]) -> str:
        """Unload a model; its checkpoints stay. Returns a promise that is kept already."""
        model, digest = text_of(body.get("model_id")), digest_of(body)
        key = f"unload:{owner}:{model}"
        if (known := self._known(owner, key, digest)) is not None:
            return known
        tenant = self.tenant(owner, model)

        def close(db: sqlite3.Connection) -> None:
            db.execute("update models set state = 'closed' where id = ?", (tenant.id,))

        found = {"model_id": tenant.id, "type": "unload_model"}
        promise, _ = self.promise(owner, key, "unload_model", digest, b"", found, close)
        self.service.queue.call(lambda: self.service.close_model(tenant.id))
        return promise

    def host(self, name: Any) -> Host:
        """A base model. Raises Refused."""
        found = self.service.hosts.get(name) if isinstance(name, str) else None
        if found is None:
            raise Refused(f"base_model: {quoted(name)} is not served; served are {', '.join(self.service.hosts)}")
        return found

    def tenant(self, owner: str, model: Any) -> Tenant:
        """A model of an owner that is open. Raises Refused."""
        tenant = self.service.tenants.get(text_of(model))
        if tenant is not None and tenant.owner == owner:
            self._heard[tenant.session] = time.monotonic()
            return tenant
        row = self.journal.one("select state from models where id = ? and owner = ?", text_of(model), owner)
        if row is not None:
            raise Refused(
                f"model_id: {model} was unloaded; go on from a checkpoint: create_training_client_from_state", 410
            )
        raise Refused(f"model_id: there is no model {quoted(model)} of yours", 404)

    def checkpoint(self, owner: str, path: Any, field: str = "path") -> sqlite3.Row:
        """A checkpoint of an owner, or a public one. Raises Refused."""
        text = str(TinkerPath.of(path, field))
        row = self.journal.one("select * from checkpoints where path = ? and (owner = ? or public)", text, owner)
        if row is None or (row["expires"] is not None and row["expires"] < time.time()):
            raise Refused(f"{field}: there is no checkpoint {quoted(text)} of yours", 404)
        return row

    def check_checkpoints(self, owner: str) -> None:
        """Raises Refused where an owner has no room for another checkpoint."""
        count = self.journal.one("select count(*) as n from checkpoints where owner = ?", owner)
        if count is not None and count["n"] >= self.limits.checkpoints:
            raise Refused(f"{count['n']} checkpoints, the limit checkpoints; delete some")

    # --- requests of a model -----------------------------------------------------------------------------------------------

    def forward_backward(self, owner: str, body: bytes) -> str:
        """Promise a forward_backward, or a forward alone."""
        found = parsed(body)
        tenant, seq = self.tenant(owner, found.model_id), checked_seq(found.seq_id)
        digest = hashlib.sha256(found.SerializeToString(deterministic=True)).digest()
        budget = tenant.host.budget.tokens
        request = Request("", tenant.id, seq, "forward_backward", body, budget, forward_only=found.forward_only)

        def check() -> None:
            read, facts = read_forward_backward(found, self.limits), tenant.host.facts
            request.work = work_of(read, facts.vocabulary, facts.context, self.limits.targets)
            check_ignored(read)
            request.begin(budget)

        return self._submit(owner, tenant, request, digest, check)

    def submit(self, owner: str, kind: str, body: Mapping[str, Any]) -> str:
        """Promise a step, a save or a load of a model."""
        tenant, seq = self.tenant(owner, body.get("model_id")), checked_seq(body.get("seq_id"))
        # a retry of an unnamed save has another number of its sampling session
        digest = digest_of({name: own for name, own in body.items() if name != "sampling_session_seq_id"})
        request = Request("", tenant.id, seq, kind, as_json(dict(body)).encode(), tenant.host.budget.tokens)
        return self._submit(owner, tenant, request, digest, lambda: self._check(tenant, kind, body))

    def _check(self, tenant: Tenant, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "optim_step":
            settings_of(body)
        elif kind == "load_weights":
            check_switches(body, "optimizer")
            self._check_load(tenant, self.checkpoint(tenant.owner, body.get("path")))
        else:
            metadata_of(body, self.limits.metadata_bytes)
            seconds_of(body)
            check_switches(body, "overwrite")
            if body.get("path") is not None:
                checked_name(body["path"], self.limits)
            if body.get("kind") not in (None, "snapshot", "inflight"):
                raise Refused(f"kind: {quoted(body['kind'])} is neither snapshot nor inflight")
            self.check_checkpoints(tenant.owner)
            if body.get("age_encryption_recipients"):
                raise Refused(
                    "age_encryption_recipients: it is not served; leave it out, or download what save_weights_external saves"
                )

    def _check_load(self, tenant: Tenant, row: sqlite3.Row) -> None:
        """Raises Refused where the values of a checkpoint would be another function in a model."""
        host, advice = tenant.host, "make a model of it: create_training_client_from_state"
        if row["base"] != host.facts.name:
            raise Refused(f"path: the checkpoint is of {row['base']}, and the model of {host.facts.name}; {advice}")
        theirs = host.spec_of(Wanted.of_dict(json.loads(row["spec"]))).modules
        for path, own in host.spec_of(tenant.wanted).modules.items():
            if path in theirs and theirs[path].scaling != own.scaling:
                raise Refused(
                    f"path: the checkpoint scales {path} by {theirs[path].scaling:g}, and the model by {own.scaling:g}: "
                    f"lora_alpha, alpha_pattern or use_rslora are others; {advice}"
                )

    def _submit(self, owner: str, tenant: Tenant, request: Request, digest: bytes, check: Callable[[], None]) -> str:
        key = f"model:{tenant.id}:{request.seq}"
        if (known := self._known(owner, key, digest)) is not None:
            return known
        lane = self.service.queue.lanes.get(tenant.id)
        next_, waiting = (1, 0) if lane is None else (lane.next, lane.waiting)
        if request.seq <= (snapshot := self.service.snapshot_of(tenant)):
            if (known := self._known(owner, key, digest)) is not None:  # the same request at the same moment
                return known
            next_ = max(next_, snapshot + 1)
            raise Refused(f"seq_id: number {request.seq} was used long ago; the next one is {next_} or later")
        if waiting >= self.limits.waiting_requests:
            raise Refused(f"{waiting} requests of this model wait, the limit waiting_requests", 429, WAIT)
        if self.service.queue.bytes + len(request.payload) > self.limits.waiting_bytes:
            raise Refused("too much waits to be trained, the limit waiting_bytes", 429, WAIT)
        more: dict[str, Any] = {"model": tenant.id, "seq": request.seq, "budget": request.budget}
        more["forward_only"] = request.forward_only
        failure: Failed | None = None
        try:
            check()
        except Refused as error:
            if error.status == 429:
                raise
            self._close_number(owner, key, request, digest, error, more)
            raise
        except Failed as error:
            failure = error

        def use(db: sqlite3.Connection) -> None:
            db.execute("update models set used = ? where id = ?", (time.time(), tenant.id))

        request.id, is_new = self.promise(owner, key, request.kind, digest, request.payload, failure, use, **more)
        if is_new:
            request.state = "waiting" if failure is None else "failed"
            if not self.service.queue.put(request) and failure is None:  # the model was closed meanwhile
                self.service.refuse_unloaded([request.id])
        return request.id

    def _close_number(
        self, owner: str, key: str, request: Request, digest: bytes, error: Refused, more: Mapping[str, Any]
    ) -> None:
        """A request was refused, and the client counts on: nothing waits for its number."""
        text = json.dumps({"error": error.text, "category": "user", "status": error.status}).encode()
        promise = self._id()
        try:
            with self.journal.write() as db:
                add_request(db, promise, owner, key, request.kind, digest, None, state=REFUSED, result=text, **more)
        except sqlite3.IntegrityError:  # the same request at the same moment
            self._known(owner, key, digest)
            return
        request.id, request.state, request.payload = promise, "failed", b""
        self.service.queue.put(request)


class Desk(Models):
    """Entry of the requests of a service."""

    def create_sampling_session(self, owner: str, body: Mapping[str, Any]) -> str:
        """Open a sampling session of a checkpoint or of a base model. Returns its id."""
        session = self.session(owner, body.get("session_id"))["id"]
        number, path = number_of(body, "sampling_session_seq_id", 0), body.get("model_path")
        sampler, key, digest = f"{session}:sample:{number}", f"sampler:{session}:{number}", digest_of(body)
        if self._known(owner, key, digest) is not None:
            return sampler
        row = None if path is None else self.checkpoint(owner, path, "model_path")
        folder, base = None, body.get("base_model") if row is None else row["base"]
        host = self.host(base)
        if body.get("base_model") not in (None, base):
            raise Refused(f"base_model: {quoted(body['base_model'])}, and the checkpoint is of {base}")
        if row is not None:
            folder = self.service.stores.sampler(sampler)
        own = (
            sampler, owner, session, host.facts.name, None, path, None if folder is None else folder.name, "snapshot",
            time.time(), "open",
        )  # fmt: skip
        found = {"sampling_session_id": sampler}
        make = self._unless_ended(session, "samplers", own)
        with self.copying:
            if folder is not None and row is not None and self._known(owner, key, digest) is None:
                self.service.stores.copy(self.service.stores.checkpoint(row["path"]), folder)
            self.promise(owner, key, "create_sampling_session", digest, b"", found, make)
        return sampler

    def sampler(self, owner: str, sampler: Any) -> sqlite3.Row:
        """A sampling session of an owner. Raises Refused."""
        row = self.journal.one("select * from samplers where id = ? and owner = ?", text_of(sampler), owner)
        if row is None:
            raise Refused(f"sampling_session_id: there is no sampling session {quoted(sampler)} of yours", 404)
        if row["state"] != "open":
            raise Refused(f"sampling_session_id: {sampler} is over: its session has ended, or newer ones came", 410)
        self._heard[row["session"]] = time.monotonic()
        return row

    def asample(self, owner: str, body: Mapping[str, Any]) -> tuple[str, list[str]]:
        """Promise samples. Returns the promise and an id of each sample."""
        sampler, seq = self.sampler(owner, body.get("sampling_session_id")), number_of(body, "seq_id", 0)
        key, digest = f"sample:{sampler['id']}:{seq}", digest_of(body)
        failure: Failed | None = None
        if (promise := self._known(owner, key, digest)) is None:
            waiting = "select count(*) as n from requests where owner = ? and kind = 'sample' and state = 'waiting'"
            found = self.journal.one(waiting, owner)
            if found is not None and found["n"] >= self.limits.waiting_requests:
                raise Refused("samples: too many wait, the limit waiting_requests", 429, WAIT)
            host = self.host(sampler["base"])
            try:
                request = request_of(body, host.facts, self.limits)
                host.check_sample(request)
            except Failed as error:
                failure = error
            params = dict(body.get("sampling_params") or {})
            if params.get("seed") is None:
                params["seed"] = secrets.randbits(62)
            payload = as_json({**body, "sampling_params": params}).encode()
            promise, is_new = self.promise(owner, key, "sample", digest, payload, failure)
            if is_new and failure is None:
                self.service.samplers.begin_later(promise)
        return promise, [f"{promise}:{number}" for number in range(body.get("num_samples") or 1)]
