"""What an operator sees: the page's figures, metrics, the log, `packlora serve status`, and a stop by a signal."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from serving import NAME, Talk, datum, host_of, leave
from starlette.testclient import TestClient
from waiting import SECONDS, own_port, wait_for

from packlora.engine.generate import Sampler
from packlora.errors import InputError
from packlora.serve import command
from packlora.serve.app import Keys, application
from packlora.serve.logs import LOG, Logfmt, log
from packlora.serve.page import PAGE
from packlora.serve.rest import Rest
from packlora.serve.service import Service

KEYS = ["tml-the-first-one", "tml-the-other-one"]


@pytest.fixture
def talk(tiny_base: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "packlora.serve")
    found = Talk(Service({NAME: host_of(tiny_base("llama"), tmp_path)}, tmp_path), Keys(KEYS).owner(KEYS[0]))
    yield found
    leave(found.service)


def test_figures_are_those_of_what_was_done_and_models_are_shown_to_their_owner(
    talk: Talk, caplog: pytest.LogCaptureFixture
) -> None:
    session = talk.session()
    model = talk.model(session, use_dora=True)
    losses = []
    for _ in range(3):
        promise = talk.forward_backward(model, [datum(1, 20)])
        talk.step(model)
        talk.run()
        losses.append(round(talk.result(promise)[0]["loss:sum"] / 20, 4))
    talk.step(model, seq=9)
    apps = [TestClient(application(talk.desk, Keys(keys), hold=0.0)) for keys in (KEYS, None)]
    shown = [
        apps[0].get("/status", headers={"x-api-key": KEYS[0]}), apps[1].get("/status"), apps[0].get("/status"),
        apps[0].get("/status", headers={"x-api-key": KEYS[1]}),
    ]  # fmt: skip
    want = {"base": NAME, "method": "DoRA", "rank": 4, "steps": 3, "losses": losses, "waiting": 1, "on_the_base": True}
    assert [own.json()["training"] for own in shown] == [[want], [want], [], []]
    found = shown[2].json()
    assert (found["status"], found["sessions"], found["models"], found["waiting_requests"]) == ("ok", 1, 1, 1)
    assert found["shares"] == [1.0] and found["tokens_per_second"] > 0
    assert all(session not in own.text and KEYS[0] not in own.text and talk.owner not in own.text for own in shown)
    assert apps[0].get("/status", headers={"x-api-key": "tml-nobody"}).status_code == 401

    apps[0].get("/v1/models")
    text = apps[0].get("/metrics").text
    for line in (
        "packlora_trained_tokens_total 60.0", "packlora_optimizer_steps_total 3.0", "packlora_sessions 1.0",
        "packlora_waiting_requests 1.0", 'packlora_models{state="on the base"} 1.0', "packlora_running_samples 0.0",
        "packlora_recorded_graphs 0.0", "packlora_padding_tokens 0.0",
        'packlora_http_answers_total{status="401"} 2.0',
        'packlora_request_seconds_count{kind="forward_backward"} 3.0',
    ):  # fmt: skip
        assert line in text, line
    page = apps[0].get("/").text
    for name in re.findall(r"found\.(\w+)|one\.(\w+)|^  (\w+): \"|, (\w+): \"", page, re.M):
        (key,) = filter(None, name)
        assert key in found or key in want, f"the page shows {key}"
    events = [record.getMessage() for record in caplog.records if record.name == "packlora.serve"]
    assert events == ["session opened", "model made"]
    assert KEYS[0] not in "".join(str(vars(record)) for record in caplog.records)


def test_steps_that_come_after_their_rows_have_run_are_no_microbatches(talk: Talk) -> None:
    model = talk.model(talk.session())
    for _ in range(2):
        talk.forward_backward(model, [datum(1, 20)])
        talk.run()
        talk.step(model)
        talk.run()
    text = talk.service.figures.text().decode()
    for line in (
        "packlora_optimizer_steps_total 2.0", "packlora_microbatches_total 2.0",
        "packlora_tenants_of_a_microbatch_count 2.0", "packlora_tenants_of_a_microbatch_sum 2.0",
    ):  # fmt: skip
        assert line in text, line


def test_a_run_is_listed_with_the_time_of_its_last_request(talk: Talk) -> None:
    session, rest = talk.session(), Rest(talk.desk)
    models = [talk.model(session, number) for number in range(2)]
    with talk.service.journal.write() as db:
        db.execute("update models set created = 0, used = 0")
    talk.step(models[0])
    runs = [rest.answer(talk.owner, "GET", f"training_runs/{model}", {}, {}, "") for model in models]
    last = [datetime.fromisoformat(run["last_request_time"]).timestamp() for run in runs]
    assert abs(last[0] - time.time()) < 60 and last[1] == 0


def test_a_line_of_the_log_is_made_of_fields(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(Logfmt())
    LOG.addHandler(handler)
    try:
        log("model made", logging.WARNING, model="a:train:0", why='a "word"\nand more', rank=8)
        try:
            raise ValueError("x")
        except ValueError:
            LOG.exception("it failed: %s", 7)
    finally:
        LOG.removeHandler(handler)
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ level=warning event=\"model made\" .*", first)
    assert first.endswith(r'model=a:train:0 why="a \"word\"\nand more" rank=8')
    assert 'level=error event="it failed: 7"' in second and trace[-1] == "ValueError: x"


def test_a_service_that_is_asked_to_stop_says_what_waits(
    tiny_base: Callable[[str], str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command in this process: `status` prints its figures; SIGTERM ends it, streams end with a reason."""
    step, drawn = Sampler.step, itertools.count()
    monkeypatch.setattr(Sampler, "step", lambda own: step(own) if next(drawn) < 9 else [])  # no stream ends by itself
    port = own_port()
    url, said = f"http://127.0.0.1:{port}", dict[str, Any]()

    def post(path: str, body: Any) -> Any:
        headers = {"x-api-key": "tml-local", "authorization": "Bearer tml-local"}
        return urllib.request.urlopen(
            urllib.request.Request(url + path, json.dumps(body).encode(), headers), timeout=SECONDS
        )

    def listens() -> bool:
        with contextlib.suppress(urllib.error.URLError):
            return bool(post("/api/v1/client/config", {"sdk_version": "0.38.0"}))
        return False

    def use() -> None:
        try:
            wait_for(listens)
            session = json.load(post("/api/v1/create_session", {"sdk_version": "0.38.0"}))["session_id"]
            model = {"session_id": session, "model_seq_id": 0, "base_model": NAME, "lora_config": {"rank": 4}}
            json.load(post("/api/v1/create_model", model))
            post("/api/v1/optim_step", {"model_id": f"{session}:train:0", "seq_id": 2})
            command.status("127.0.0.1", port)
            chat = {"model": NAME, "prompt": "a", "max_tokens": 200, "n": 100, "stream": True}
            stream = post("/v1/completions", chat)
            stream.readline()
            os.kill(os.getpid(), signal.SIGTERM)
            said["stream"] = stream.read().decode()
        except BaseException as error:
            said["error"] = error
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    user = threading.Thread(target=use)
    user.start()
    state = tmp_path / "state"
    command.serve([f"{NAME}={tiny_base('llama')}"], state, "127.0.0.1", port, None, None, ["device=cpu"], 0.0, 256)
    user.join()
    out, err = capsys.readouterr()
    assert "error" not in said, said
    assert "the service is stopping" in said["stream"]
    assert f"TINKER_BASE_URL={url} TINKER_API_KEY=tml-local" in out
    assert re.search(r"waiting requests +1\n", out) and re.search(
        r"model 1 +LoRA r 4 on .*, 0 steps, 1 requests wait", out
    )
    assert "stopped; 1 requests wait for the next start" in err
    signal.signal(signal.SIGTERM, before)
    with pytest.raises(urllib.error.URLError):
        post("/api/v1/client/config", {})


STUBS = """
const element = () => ({append() {}, replaceChildren() {}, style: {}, setAttribute() {}});
globalThis.document = {title: "packlora serve", getElementById: element, createElement: element, createElementNS: element};
const answers = [null, {shares: [], training: [], bases: {}}, null];
globalThis.fetch = async () => {
  const found = answers.shift();
  if (!found) throw new Error();
  return {json: async () => found};
};
globalThis.setInterval = (look) => { (async () => {
  for (let looks = 0; looks < 3; looks++) {
    if (looks) await look();
    await new Promise(setImmediate);
    console.log(document.title);
  }
})(); };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node, which runs the page's script, is not installed")
def test_the_page_s_title_says_no_answer_only_while_there_is_none() -> None:
    script = STUBS + PAGE.partition("<script>")[2].partition("</script>")[0]
    done = subprocess.run(["node", "-"], input=script, capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.splitlines() == ["packlora serve (no answer)", "packlora serve", "packlora serve (no answer)"]


@pytest.mark.parametrize(
    "said", [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.0 200 OK\r\n\r\n[1]", b'HTTP/1.0 200 OK\r\n\r\n"a"']
)
def test_the_status_of_another_program_is_refused(said: bytes) -> None:
    at = command.listening("127.0.0.1", 0)

    def answer() -> None:
        connection, _ = at.accept()
        with connection:
            connection.recv(9000)
            connection.sendall(said)

    other = threading.Thread(target=answer)
    other.start()
    with pytest.raises(InputError, match="no packlora serve answers"):
        command.status("127.0.0.1", at.getsockname()[1])
    other.join(SECONDS)
    at.close()


@pytest.mark.parametrize("key", ["tml-0123456789\ntml-9876543210", "tml-é"])
def test_a_key_that_is_none_is_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", key)
    with pytest.raises(InputError, match="TINKER_API_KEY: it has a character") as refused:
        command.status("127.0.0.1", own_port())
    assert "tml-" not in str(refused.value)
