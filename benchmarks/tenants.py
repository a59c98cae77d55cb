"""Tenants of a `packlora serve` in a process of its own, which they reach by HTTP.

The public `tinker` client is not used: a machine that measures may lack it, and its own work would be measured. Requests are
those that it sends: protobuf for forward_backward, JSON for all else, results by held requests. A tenant has a thread and a
connection.
"""

from __future__ import annotations

import http.client
import json
import re
import statistics
import subprocess
import sys
import time
import urllib.request
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.watched import descendants, environment, kill
from packlora.serve.messages import message

NAME, KEY = "base", "tml-benchmark"
JSON, PROTOBUF = "application/json", "application/x-protobuf"
AHEAD = 1
"""Steps that a tenant sends before the result of the one before has come, as the client's documentation advises."""
STARTING = 300.0
"""Seconds until a service answers, at most."""
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}


class Served:
    """A service on a free port, until `stop` or the end of this process.

    Args:
        folder: of the base model.
        state: folder of the service; its output goes into `state`.log.
        processes: that hold the base model together, by torchrun where they are several.
        settings: KEY=VALUE of a run file.
        watch: is called with the process's id before it answers.

    Raises:
        RuntimeError: it ended, or does not answer; with the end of its output.
    """

    def __init__(
        self, folder: Path, state: Path, device: str, processes: int = 1, settings: Sequence[str] = (),
        watch: Callable[[int], None] = lambda pid: None,
    ) -> None:  # fmt: skip
        self.log, began = state.with_suffix(".log"), time.monotonic()
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
        words = [sys.executable, "-m", *(torchrun if processes > 1 else []), "packlora", "serve"]
        words += ["--base", f"{NAME}={folder}", "--state", str(state), "--port", "0", "--max-wait-ms", "0"]
        cut = [f"parallel.tensor={processes}"] if processes > 1 else []
        words += [word for setting in (f"device={device}", *settings, *cut) for word in ("--set", setting)]
        with self.log.open("wb") as out:
            env = environment() | {"PYTHONUNBUFFERED": "1"}
            self.process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=env)
        self.stop = weakref.finalize(self, _stop, self.process)
        watch(self.process.pid)
        self.address = self._address()
        self.seconds = time.monotonic() - began
        """From its start until it answered."""
        self.session = str(self.post("create_session", {"sdk_version": "0.38.0", "tags": []})["session_id"])

    def _address(self) -> str:
        until = time.monotonic() + STARTING
        while time.monotonic() < until and self.process.poll() is None:
            found = re.search(r"TINKER_BASE_URL=http://(\S+)", self.log.read_text())
            if found:
                with urllib.request.urlopen(f"http://{found[1]}/api/v1/healthz", timeout=STARTING):
                    return found[1]
            time.sleep(0.05)
        raise RuntimeError(f"packlora serve does not answer: {self.log.read_text().strip()[-400:]}")

    def post(self, path: str, body: Any) -> Any:
        """Answer to a call by a connection of its own."""
        return Connection(self.address).post(path, body)

    def models(self, count: int, rank: int, first: int = 0) -> list[Tenant]:
        """Tenants with a new LoRA adapter each, on all linear layers but the output. first: number of the first one."""
        return [Tenant(self, first + number, rank) for number in range(count)]

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.address}/{path}") as answer:
            return str(answer.read().decode())

    def on_the_base(self) -> int:
        """Number of models that have not been put aside."""
        return int(json.loads(self._get("status"))["models_on_the_base"])

    def recorded(self) -> int:
        """Sizes of microbatches that were recorded as CUDA graphs since the start."""
        return int(self._figure("recorded_graphs"))

    def memory_bytes(self) -> float:
        """Bytes of the device's memory that tensors take; on a CPU, of the process."""
        if (found := self._figure("device_bytes")) > 0:
            return found
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * float(status.partition("VmRSS:")[2].split()[0])

    def _figure(self, name: str) -> float:
        found = re.search(rf"^packlora_{name} (\S+)$", self._get("metrics"), re.MULTILINE)
        assert found is not None
        return float(found[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    found = descendants(process.pid)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        kill(found)
        process.wait()


class Connection:
    """One connection that is kept open, and opened again where the service has closed it since it was not used for long."""

    def __init__(self, address: str) -> None:
        self._inner = http.client.HTTPConnection(address, timeout=STARTING)

    def call(self, path: str, body: bytes, kind: str = JSON) -> tuple[int, bytes]:
        """Status and body of an answer. Raises RuntimeError where it is refused."""
        try:
            answer = self._answer(path, body, kind)
        except ConnectionError:  # a request that comes again gets the same promise
            self._inner.close()
            answer = self._answer(path, body, kind)
        content = answer.read()
        if answer.status not in (200, 408):
            raise RuntimeError(f"{path}: {answer.status} {content[:300]!r}")
        return answer.status, content

    def _answer(self, path: str, body: bytes, kind: str) -> http.client.HTTPResponse:
        self._inner.request("POST", f"/api/v1/{path}", body, {"x-api-key": KEY, "content-type": kind})
        return self._inner.getresponse()

    def post(self, path: str, body: Any) -> Any:
        """The JSON of an answer."""
        return json.loads(self.call(path, json.dumps(body).encode())[1])

    def result(self, promise: str) -> bytes:
        """The result of a promise, waited for."""
        body = json.dumps({"request_id": promise}).encode()
        while True:
            status, content = self.call("retrieve_future", body)
            if status == 200:
                return content


class Tenant:
    """A client with a model of its own."""

    def __init__(self, served: Served, number: int, rank: int) -> None:
        self.connection, self.seq = Connection(served.address), 0
        lora = {"rank": rank, "seed": 0, "train_unembed": False}
        body = {"session_id": served.session, "model_seq_id": number, "base_model": NAME, "lora_config": lora}
        made = json.loads(self.connection.result(self.connection.post("create_model", body)["request_id"]))
        self.model = str(made["model_id"])

    def _next(self) -> int:
        self.seq += 1
        return self.seq

    def send(self, request: Any) -> str:
        """Promise of a forward_backward. request: see request_of."""
        request.model_id, request.seq_id = self.model, self._next()
        answer = self.connection.call("forward_backward", request.SerializeToString(), PROTOBUF)[1]
        return str(json.loads(answer)["request_id"])

    def step(self, rate: float = ADAM["learning_rate"]) -> str:
        """Promise of an optimizer step."""
        body = {"model_id": self.model, "seq_id": self._next(), "adam_params": ADAM | {"learning_rate": rate}}
        return str(self.connection.post("optim_step", body)["request_id"])

    def loss(self, promise: str) -> float:
        """Sum of the losses of a forward_backward, waited for. Raises RuntimeError where it failed."""
        content = self.connection.result(promise)
        if content.startswith(b"{"):
            raise RuntimeError(content.decode()[:300])
        return float(message("ForwardBackwardOutput").FromString(content).metrics["loss:sum"])

    def stepped(self, promise: str) -> None:
        """Wait for an optimizer step. Raises RuntimeError where it failed."""
        found = json.loads(self.connection.result(promise))
        if "error" in found:
            raise RuntimeError(found["error"])

    def train(self, request: Any, steps: int) -> list[float]:
        """Steps on the same samples, AHEAD of their results. Returns the seconds of a clock at which each result came."""
        ends, waiting = list[float](), deque[tuple[str, str]]()
        for number in range(steps + AHEAD):
            if number < steps:
                waiting.append((self.send(request), self.step()))
            if number >= AHEAD:
                rows, step = waiting.popleft()
                assert np.isfinite(self.loss(rows))
                self.stepped(step)
                ends.append(time.perf_counter())
        return ends


def request_of(samples: Sequence[np.ndarray]) -> Any:
    """ForwardBackwardRequest without a model. samples: token ids [n + 1]: n are run, each of which predicts the next one."""
    out = message("ForwardBackwardRequest")(loss_fn="cross_entropy")
    for ids in samples:
        one = out.data.add()
        one.model_input.add().encoded_text.tokens = ids[:-1].astype("<i4").tobytes()
        field = one.loss_fn_inputs["target_tokens"]
        field.dense, field.dtype = ids[1:].astype("<i8").tobytes(), 2
        field.shape.append(len(ids) - 1)
    return out


def all_at_once(tenants: Sequence[Tenant], requests: Sequence[Any], steps: int) -> Callable[[], None]:
    """Work: each tenant takes so many steps, all at the same time."""
    pool = ThreadPoolExecutor(len(tenants))

    def run() -> None:
        for done in [pool.submit(own.train, request, steps) for own, request in zip(tenants, requests, strict=True)]:
            done.result()

    return run


def one_by_one(tenants: Sequence[Tenant], requests: Sequence[Any], steps: int) -> Callable[[], None]:
    """Work: each tenant takes so many steps, one tenant after the other."""

    def run() -> None:
        for own, request in zip(tenants, requests, strict=True):
            own.train(request, steps)

    return run


def seconds_of_a_step(ends: Sequence[float], warm: int) -> float:
    """Median time from the end of one step to the end of the next, without the first ones."""
    return float(statistics.median(np.diff(ends)[warm - 1 :]))
