"""The command, with the public client: it is killed, or one of two ranks that torchrun has started, and the service goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import Forks
from served_ranks import NAME, Process, client_of, forks_of, story
from serving import host_of, served
from test_client import ADAM, datum, model
from waiting import SECONDS, own_port, wait_for

pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks | None]:
    with forks_of(tmp_path_factory.mktemp("forks"), "packlora.serve.service") as forks:
        yield forks


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_service_which_goes_on_with_the_bits_of_one_process(
    tiny_base: Callable[[str], str], forks: Forks | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    base, state = tiny_base("llama"), tmp_path / "state"
    words = ["--base", f"{NAME}={base}", "--state", str(state), "--set", "device=cpu"]
    port = own_port()
    two = Process(forks, 2, words, port, tmp_path / "two")
    running = [two]

    def kill() -> None:
        assert two.status["models"] == 2 and " 1 models" in two.status["ranks"][1]
        two.kill(1)
        assert two.process.wait(SECONDS) == 1
        running.append(Process(forks, 1, words, port, tmp_path / "one"))

    try:
        two.wait()
        with client_of(two.url) as client:
            found = story(client, kill)
            running[-1].end()
            again = Process(forks, 2, words, port, tmp_path / "again")
            running.append(again)
            again.wait()
            assert [" 1 models" in rank for rank in again.status["ranks"]] == [True, True]
    finally:
        for process in running:
            process.end()
    assert "rank 1 (process " in two.said and "has ended without a word, as a process that was killed does" in two.said
    assert running[1].process.returncode == 0 and "stopped; nothing waits" in running[1].said
    assert "stopped; nothing waits" in again.said and "has ended" not in again.said
    with served(host_of(base, tmp_path), tmp_path / "reference") as (url, _), client_of(url) as client:
        assert story(client) == found


@pytest.mark.slow
def test_a_client_goes_on_after_a_sigkill_with_the_bits_of_a_run_without(
    tiny_base: Callable[[str], str], forks: Forks | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    words = ["--base", f"{NAME}={tiny_base('llama')}", "--state", str(tmp_path / "state"), "--set", "device=cpu"]
    port, found = own_port(), []
    service = Process(forks, 1, words, port, tmp_path / "out")
    try:
        service.wait()
        with client_of(service.url) as client:
            for kill in (True, False):
                own, futures = model(client), []
                for step in range(20):
                    futures.append(own.forward_backward([datum()] * 20, "cross_entropy"))
                    own.optim_step(ADAM)
                    if kill and step == 10:
                        futures[1].result()
                        service.process.kill()
                        service.process.wait(SECONDS)
                        wait_for(lambda killed=service: not killed.is_there())  # type: ignore[misc] # also the fork
                        service = Process(forks, 1, words, port, tmp_path / "out")
                found.append([future.result().metrics["loss:sum"] for future in futures])
        assert found[0] == found[1] and found[0][-1] < found[0][0]
    finally:
        service.end()
    assert service.process.returncode == 0 and "nothing waits" in service.said
