"""Gathers by copies: their order, with threads in the place of processes, and where they are not asked for."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from packlora.parallel import gathers

SIZE, PIECE = 3, 20


class Memory:
    """What processes share: each sees the buffers of all."""

    world_size = SIZE

    def __init__(self, rank: int, shown: list[torch.Tensor], met: threading.Barrier) -> None:
        self.rank, self.shown, self._met = rank, shown, met

    def barrier(self, timeout_ms: int) -> None:
        self._met.wait(timeout_ms / 1000)

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        time.sleep(0.01 * self.rank)  # some are late
        return self.shown[rank][: sizes[0]].view(dtype)


@pytest.mark.parametrize(("dtype", "numbers"), [(torch.bfloat16, 27), (torch.uint8, PIECE), (torch.float64, 1)])
def test_all_parts_come_to_all_processes_whoever_is_late(
    dtype: torch.dtype, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, the last of which is smaller; two gathers that follow one another share the memory."""
    shown, met = [torch.zeros(PIECE, dtype=torch.uint8) for _ in range(SIZE)], threading.Barrier(SIZE)
    stream = SimpleNamespace(wait_event=lambda event: None)
    event = SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(gathers, "PIECE", PIECE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    parts = [torch.arange(SIZE * numbers).to(dtype) + offset for offset in (0, 100)]

    def run(rank: int) -> list[torch.Tensor]:
        copies: Any = object.__new__(gathers.Copies)
        copies._shown, copies._memory, copies._done = shown[rank], Memory(rank, shown, met), event
        copies._timeout_ms = 10_000
        found = []
        for whole in parts:
            out = copies.allocate((SIZE * numbers,), dtype=dtype, device=torch.device("cpu")).zero_()
            own = slice(rank * numbers, (rank + 1) * numbers)
            out[own] = whole[own]
            time.sleep(0.01 * rank)
            copies(output_tensor=out, input_tensor=out[own], group=None)
            found.append(out)
        return found

    with ThreadPoolExecutor(SIZE) as pool:
        for found in pool.map(run, range(SIZE)):
            assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))


@pytest.mark.parametrize("host", ["another", "unknown", "this"])
def test_memory_of_gpus_is_shared_on_a_host_that_is_known_to_be_one(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host has a GPU 3, this one has not."""
    monkeypatch.setattr(gathers, "BOOT", tmp_path / "boot_id")
    if host != "unknown":
        gathers.BOOT.write_text("this\n")
    known = zlib.crc32(b"this\n") if host != "unknown" else 0

    def all_of(own: torch.Tensor, group: Any) -> list[torch.Tensor]:
        return [own, own if len(own) == 1 else torch.tensor([3, known + (host == "another")])]

    def reaches(own: int, other: int) -> bool:
        assert host == "this", "Invalid peer device id"
        return (own, other) == (0, 3)

    monkeypatch.setattr(gathers, "all_of", all_of)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reaches)
    group: Any = None
    assert gathers._reachable(group, torch.device("cpu", 0)) == (host == "this")


def test_memory_is_shared_without_multicast(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str | None] = []
    monkeypatch.setenv(gathers.MULTICAST, "")
    monkeypatch.delenv(gathers.MULTICAST)
    monkeypatch.setattr(gathers.symmetric, "empty", lambda *size, **kinds: torch.empty(1))
    monkeypatch.setattr(gathers.symmetric, "rendezvous", lambda *_: found.append(os.environ.get(gathers.MULTICAST)))
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    options = SimpleNamespace(_timeout=timedelta(seconds=1))
    group: Any = SimpleNamespace(group_name="", _get_backend=lambda device: SimpleNamespace(options=options))
    gathers.Copies(group, torch.device("cpu"))
    assert found == ["1"]
