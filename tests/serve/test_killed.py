"""The command itself, killed while a client trains."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import NAME
from test_client import ADAM, datum, model, tinker
from waiting import SECONDS, own_port, wait_for


@pytest.mark.slow
def test_a_client_goes_on_after_a_sigkill_with_the_bits_of_a_run_without(
    tiny_base: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    port = str(own_port())
    words = ["--base", f"{NAME}={tiny_base('llama')}", "--state", str(tmp_path / "state"), "--port", port]

    def start() -> Any:
        with (tmp_path / "out").open("ab") as out:
            command = [sys.executable, "-m", "packlora", "serve", *words, "--set", "device=cpu"]
            return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ)

    def answers() -> bool:
        assert service.poll() is None, (tmp_path / "out").read_text()
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/healthz"))
        return False

    service = start()
    try:
        wait_for(answers)
        found = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            client = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key="tml-local")
            for kill in (True, False):
                own, futures = model(client), []
                for step in range(20):
                    futures.append(own.forward_backward([datum()] * 20, "cross_entropy"))
                    own.optim_step(ADAM)
                    if kill and step == 10:
                        futures[1].result()
                        service.kill()
                        service.wait()
                        service = start()
                found.append([future.result().metrics["loss:sum"] for future in futures])
        assert found[0] == found[1] and found[0][-1] < found[0][0]
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(SECONDS) == 0, (tmp_path / "out").read_text()
    assert "nothing waits" in (tmp_path / "out").read_text()
