"""How processes find one another: those that come again, those that are missing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any

import patience
import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from waiting import SECONDS

from packlora.parallel import join
from packlora.parallel.start import started

SIZE = 3


@pytest.fixture
def client() -> Callable[[float], Any]:
    """Of a store as torchrun keeps it, one for each process, with the seconds that it waits for a value."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)

    def make(seconds: float) -> Any:
        limit = timedelta(seconds=SECONDS)
        made = dist.TCPStore("127.0.0.1", server.port, SIZE, False, limit, wait_for_workers=False)
        made.set_timeout(timedelta(seconds=seconds))
        return made

    return make


def met(client: Callable[[float], Any], ranks: Collection[int]) -> dict[int, tuple[int, str]]:
    """What processes of these ranks, as threads, are told: the attempt, and who is missing. They wait for one another."""
    told: dict[int, tuple[int, str]] = {}

    def come(rank: int) -> None:
        told[rank] = join._meet(client(SECONDS if 0 in ranks else 0.2), rank, SIZE, 0.2)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in ranks]
    with pytest.MonkeyPatch.context() as patch:
        patience.wait_for_ranks(ranks, patch.setattr)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return told


def test_processes_that_come_again_agree_on_the_attempt_and_all_are_told_who_is_missing(
    client: Callable[[float], Any],
) -> None:
    assert met(client, [0, 1, 2]) == dict.fromkeys(range(SIZE), (1, ""))
    assert met(client, [2, 1, 0]) == dict.fromkeys(range(SIZE), (2, ""))
    assert met(client, [0, 1]) == {0: (3, "2"), 1: (3, "2")}, "what 2 has left in the store is not its answer"
    assert met(client, [1]) == {1: (0, "0")}
    assert met(client, [1, 0, 2]) == dict.fromkeys(range(SIZE), (4, ""))


def test_a_second_run_of_the_same_processes_is_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(join, "_store", lambda _: (store, 0, 1))
    monkeypatch.setattr(join, "_joined", 0)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    assert [join.join(1.0, 1.0) for _ in range(2)] == [False, False]
    monkeypatch.setattr(join, "_joined", 0)  # as in processes that torchrun has started in their place
    assert join.join(1.0, 1.0)
    assert PrefixStore("packlora-start", store).add("attempts", 0) == 3


def test_one_process_that_was_started_again_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, restarted in ((None, False), ("0", False), ("1", True)):
        if count is not None:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        with started() as alone:
            assert alone.restarted == restarted
