"""A service on a thread of the test process, and parts of it, on tiny random models."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from safetensors.torch import load_file
from waiting import SECONDS, wait_for

from packlora.serve.app import Keys, application
from packlora.serve.desk import Desk
from packlora.serve.host import Host, run_of
from packlora.serve.limits import Limits
from packlora.serve.messages import Datum, message
from packlora.serve.service import Service

NAME = "Qwen/Qwen3-4B-Instruct-2507"
"""What the tiny model is served as: a name that the public client's cookbook knows."""


def host_of(folder: str, state: Path, *settings: str, name: str = NAME, budget: int | None = None) -> Host:
    run = run_of(folder, ["device=cpu", *settings], None, state)
    return Host(name, run, 256, budget)


@contextlib.contextmanager
def served(host: Host, state: Path, keys: list[str] | None = None, limits: Limits | None = None) -> Iterator[Any]:
    """Address of a service, and the service."""
    state.mkdir(parents=True, exist_ok=True)
    service = Service({host.facts.name: host}, state, limits)
    app = application(Desk(service), Keys(keys), hold=2.0)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    service.start()
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", service
    finally:
        app.state.door.close()
        server.should_exit = True
        thread.join(SECONDS)
        service.stop()
        leave(service)
        assert not thread.is_alive(), "a request holds the server"


def leave(service: Service) -> None:
    """Take what a service has put onto its bases off again, as the end of a process does."""
    for tenant in service.tenants.values():
        tenant.sleep()
    for host in service.hosts.values():
        host.states.clear()
        host.engine.follow({})


class Killed(BaseException):
    """What a test raises where the process would have been killed."""


class Talk:
    """A client of a service without HTTP, whose thread is the test: nothing runs but by `run`.

    Args:
        service: on a host; a new one on the same folder goes on.
    """

    def __init__(self, service: Service, owner: str = "owner") -> None:
        self.service, self.desk, self.owner = service, Desk(service), owner
        self.seqs: dict[str, int] = {}

    def run(self) -> None:
        """Do all that is due."""
        while self.service.turn():
            pass

    def session(self, key: str = "session") -> str:
        return self.desk.create_session(self.owner, {"sdk_version": "0.38.0"}, key)

    def model(self, session: str, number: int = 0, rank: int = 4, seed: int = 1, **packlora: Any) -> str:
        body = {
            "session_id": session, "model_seq_id": number, "base_model": NAME,
            "lora_config": {"rank": rank, "seed": seed, "train_unembed": False}, "user_metadata": {"packlora": packlora},
        }  # fmt: skip
        return str(self.result(self.desk.create_model(self.owner, body))["model_id"])

    def seq(self, model: str) -> int:
        self.seqs[model] = self.seqs.get(model, 0) + 1
        return self.seqs[model]

    def forward_backward(
        self, model: str, rows: Sequence[Datum], loss: str = "cross_entropy", seq: int | None = None, only: bool = False,
        **config: float,
    ) -> str:  # fmt: skip
        body = forward_backward_body(model, seq or self.seq(model), rows, loss, only, config)
        return self.desk.forward_backward(self.owner, body)

    def step(self, model: str, lr: float = 1e-2, seq: int | None = None, **adam: float) -> str:
        return self.call(model, "optim_step", seq, adam_params={"learning_rate": lr, **adam})

    def call(self, model: str, kind: str, seq: int | None = None, /, **body: Any) -> str:
        return self.desk.submit(self.owner, kind, {"model_id": model, "seq_id": seq or self.seq(model), **body})

    def result(self, promise: str) -> Any:
        """JSON of a result, or the arrays and metrics of a forward_backward."""
        row = self.desk.result(self.owner, promise)
        assert row is not None, "it was not done"
        if row["kind"] not in ("forward_backward", "sample") or row["state"] == "failed":
            return json.loads(row["result"])
        if row["kind"] == "sample":
            return message("SampleResponse").FromString(row["result"])
        found = message("ForwardBackwardOutput").FromString(row["result"])
        arrays = [
            np.frombuffer(record.fields["logprobs"].data, "<f4") for record in found.loss_fn_outputs
        ]  # fmt: skip
        return dict(found.metrics), np.concatenate(arrays)

    def folder(self, model: str, name: str = "end") -> Path:
        """Files of a model as it is."""
        promise = self.call(model, "save_weights_external", path=name)
        self.run()
        return self.service.stores.checkpoint(self.result(promise)["path"])

    def tensors(self, model: str, name: str = "end") -> dict[str, torch.Tensor]:
        return load_file(self.folder(model, name) / "adapter_model.safetensors")


def datum(seed: int, length: int, **inputs: Any) -> Datum:
    """A sample of so many tokens; targets are the tokens that follow."""
    ids = np.random.default_rng(seed).integers(6, 320, length + 1).astype(np.int64)
    return Datum(ids[:-1].astype(np.int32), {"target_tokens": ids[1:], **inputs})


def forward_backward_body(
    model: str, seq: int, rows: Sequence[Datum], loss: str = "cross_entropy", only: bool = False,
    config: Mapping[str, float] | None = None,
) -> bytes:  # fmt: skip
    out = message("ForwardBackwardRequest")(model_id=model, seq_id=seq, loss_fn=loss, forward_only=only)
    out.loss_fn_config.update(config or {})
    for row in rows:
        one = out.data.add()
        one.model_input.add().encoded_text.tokens = row.ids.tobytes()
        for name, values in row.inputs.items():
            values = np.asarray(values)
            values = values.astype(np.float32) if values.dtype.kind == "f" else values
            field = one.loss_fn_inputs[name]
            field.dense, field.dtype = values.tobytes(), 1 if values.dtype.kind == "f" else 2
            field.shape.extend(values.shape)
    return bytes(out.SerializeToString())


@pytest.fixture(scope="module")
def host(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Host:
    return host_of(tiny_base("llama"), tmp_path_factory.mktemp("serve"), budget=64)
