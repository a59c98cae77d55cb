"""How the processes of a run find one another, when they are started and when torchrun starts them again.

torchrun keeps the store at which they meet, and tells each process only how often processes of its own node have failed. Nodes
count differently: where processes are started again because those of another node failed, that is none of theirs. So process 0
counts the attempts in the store itself, and tells the others which one this is, each by a name of its own: what processes of
earlier attempts have left in the store is taken for nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from packlora.errors import InputError, ProcessError, foreign
from packlora.parallel.alone import was_restarted

PAUSE = 0.02
"""Seconds between two looks for processes that are not here yet."""
GRACE = 5.0
"""Seconds beyond its timeout that a process waits for process 0 to say who is missing."""
_joined = 0
"""How often this process has joined the others: once a run."""


def join(seconds: float, timeout: float) -> bool:
    """Start the process group of the processes that were started together; whether they have been started before.

    Args:
        seconds: for which the others are waited for.
        timeout: of the group's collectives, in seconds.

    Raises:
        InputError: the environment does not say who the others are.
        ProcessError: not all of them came in time, or their address cannot be used.
    """
    global _joined
    limit = timedelta(seconds=timeout)
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    who = f"process {os.environ.get('RANK', '?')} of {os.environ.get('WORLD_SIZE', '?')}"
    try:
        store, rank, size = _store(timedelta(seconds=seconds))
        attempt, missing = _meet(PrefixStore("packlora-start", store), rank, size, seconds)
        if missing:
            raise ProcessError(
                f"{who} waited {seconds:g} s for the others at {where}; these processes have not come: {missing}"
            )
        store.set_timeout(limit)
        # NCCL wherever there are GPUs, also for a process that gets none: groups of processes have one backend
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        os.environ.setdefault(
            "NCCL_GRAPH_REGISTER", "0"
        )  # memory of graphs that are dropped would stay known to the others
        group = PrefixStore(f"attempt-{attempt}", store)  # addresses are not those of the attempt before
        dist.init_process_group(backend, store=group, rank=rank, world_size=size, timeout=limit)
    except (KeyError, ValueError) as error:
        told = f"{error} is not set" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{who} does not know the others: {told}; torchrun sets this") from None
    except RuntimeError as error:
        raise ProcessError(
            f"{who} could not join the others, for which it waits {seconds:g} s at {where}: {foreign(error)}"
        ) from None
    _joined += 1
    return attempt > _joined or was_restarted()


def _store(limit: timedelta) -> tuple[Store, int, int]:
    """Store of all processes, the rank of this one, and how many they are. Where torchrun has none, process 0 makes it."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    makes = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {"timeout": limit, "wait_for_workers": False, "multi_tenant": True}
    return dist.TCPStore(address, port, size, makes, **options), rank, size  # type: ignore[attr-defined]


def _meet(store: Store, rank: int, size: int, seconds: float) -> tuple[int, str]:
    """The number of this attempt, from 1, once all processes are here; or who is not in time."""
    deadline = time.monotonic() + seconds
    if rank == 0:
        attempt = store.add("attempts", 1)
        absent = _absent(store, size, attempt, deadline)
        missing = ", ".join(map(str, absent))
        store.set(f"missing/{attempt}", missing)
        if missing:  # the store may be gone with this process
            there = [f"heard/{attempt}/{other}" for other in range(1, size) if other not in absent]
            with contextlib.suppress(RuntimeError):
                store.wait(there, timedelta(seconds=GRACE))
        return attempt, missing
    name = uuid.uuid4().hex
    store.set(f"here/{rank}", name)
    try:
        attempt = int(store.get(f"attempt/{name}"))
    except dist.DistStoreError:
        return 0, "0"
    store.set(f"seen/{attempt}/{rank}", "")
    store.wait([f"missing/{attempt}"], timedelta(seconds=max(deadline - time.monotonic(), 0) + GRACE))
    missing = store.get(f"missing/{attempt}").decode()
    if missing:
        store.set(f"heard/{attempt}/{rank}", "")
    return attempt, missing


def _absent(store: Store, size: int, attempt: int, deadline: float) -> list[int]:
    """Tell each process that comes which attempt this is; those that have not answered in time."""
    told: dict[int, bytes] = {}
    absent = list(range(1, size))
    while absent and time.monotonic() < deadline:
        for rank in list(absent):
            name = store.get(f"here/{rank}") if store.check([f"here/{rank}"]) else None
            if name is not None and name != told.get(rank):
                told[rank] = name
                store.set(f"attempt/{name.decode()}", str(attempt))
            if store.check([f"seen/{attempt}/{rank}"]):
                absent.remove(rank)
        time.sleep(PAUSE)
    return absent
