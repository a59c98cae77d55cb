"""The processes of a run, as torchrun started them: their process group, and the store for signs of life and errors.

What is exchanged here is small and on the CPU (JSON, counters): gloo, whatever the device. Tensors go through process groups
of the device's own backend.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from packlora.errors import InputError, ProcessError, shown
from packlora.parallel.alone import OneProcess, T, was_restarted
from packlora.parallel.collectives import in_vain, is_unanswered

HEARTBEAT = 2.0
"""Seconds between two signs of life of a process."""
PAUSE = 0.005
"""Seconds between two looks for a value of another process."""
LAST_WORDS = 10.0
"""Seconds that a process which found bad input waits for the words of the first one."""
_runs = itertools.count()
_groups: WeakKeyDictionary[Any, dict[Any, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups for the runs to come, by the process group of all."""


def as_bytes(value: Any) -> torch.Tensor:
    """A plain value as JSON, uint8."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def from_bytes(text: torch.Tensor) -> Any:
    """Value that `as_bytes` was given."""
    return json.loads(text.numpy().tobytes())


class Mesh(OneProcess):
    """All processes of a run.

    Args:
        store: shared by the processes.
        timeout: seconds after which a process that does not answer is given up.
    """

    _looked = -math.inf

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        self.rank, self.size, self.is_first, self.timeout = rank, size, rank == 0, timeout
        self.store = PrefixStore(f"packlora-{next(_runs)}", store)
        self._made: dict[Any, int] = {}
        """How many groups of the same kind this run has taken."""
        self._control = self.new_group(range(size), backend="gloo")
        self._heard: dict[int, tuple[bytes | None, float]] = {}
        """Last sign of life by rank, and when it was first seen."""
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="packlora-heartbeat", daemon=True)
        self._heart.start()

    def new_group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        """Process group of some ranks. All processes take it together.

        A group that an earlier run of the same processes ended with is taken again: torch keeps what it knows of a group
        (specifications of DTensor among it) as long as the process lives, and each group has threads of its own.

        Args:
            ranks: its processes.
            backend: "gloo" for what is on the CPU whatever the device; None is the backend of the processes.
        """
        kind = (tuple(ranks), backend, self.timeout)
        nth = self._made[kind] = self._made.get(kind, 0) + 1
        groups = _groups.setdefault(dist.group.WORLD, {})
        if (kind, nth) not in groups:
            timeout = timedelta(seconds=self.timeout)
            groups[kind, nth] = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        return groups[kind, nth]

    def gather(self, value: Any) -> list[Any]:
        return self.gather_in(self._control, value)

    def gather_in(self, group: dist.ProcessGroup, value: Any) -> list[Any]:
        """Values that every process of a group gives, by rank in it. The group has gloo for tensors on the CPU."""
        own, among = as_bytes(value), dist.get_world_size(group)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(among)]
        with self.told():
            dist.all_gather(sizes, torch.tensor([own.numel()]), group=group)
            most = max(int(size) for size in sizes)
            texts = [torch.zeros(most, dtype=torch.uint8) for _ in range(among)]
            dist.all_gather(texts, torch.nn.functional.pad(own, (0, most - own.numel())), group=group)
        return [from_bytes(text[: int(size)]) for text, size in zip(texts, sizes, strict=True)]

    def barrier(self) -> None:
        with self.told():
            dist.barrier(group=self._control)

    def together(self, compute: Callable[[], T]) -> T:
        error, out = None, None
        try:
            out = compute()
        except InputError as found:
            error = found
        told = self.gather(None if error is None else str(error))
        said = {text: rank for rank, text in reversed(list(enumerate(told))) if text is not None}
        if not said:
            return out  # type: ignore[return-value]
        text, rank = min(said.items(), key=lambda item: item[1])
        everywhere = len(said) == 1 and None not in told
        raise InputError(text if everywhere else f"process {rank} of {self.size}: {text}") from None

    def same(self, found: Mapping[str, str]) -> None:
        all_found = self.gather(dict(found))
        for what in dict.fromkeys(what for own in all_found for what in own):
            first = all_found[0].get(what)
            for rank, own in enumerate(all_found):
                if own.get(what) != first:
                    raise InputError(
                        f"the processes of a run must have the same {what}: process 0 has {shown(first)}, process {rank} has "
                        f"{shown(own.get(what))}"
                    )

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Says which process failed, where a collective fails because of it."""
        try:
            yield
        except RuntimeError as error:
            raise self.failure() or in_vain(error) from error

    # --- who has failed ------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the others why this process ends; the first reason stays."""
        text = f"process {self.rank} of {self.size} failed: {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            if not self.store.check(["failed"]):
                self.store.set("failed", text)

    def failure(self) -> ProcessError | None:
        """Why another process has ended, if one has."""
        with contextlib.suppress(Exception):
            if self.store.check(["failed"]):
                return ProcessError(self.store.get("failed").decode())
        return None

    def speaks_of_failure(self) -> bool:
        """Whether this process is the first to report the failure; yes where that cannot be known."""
        with contextlib.suppress(Exception):
            return bool(self.store.add("spoken", 1) == 1)
        return True

    def heard(self) -> None:
        """Once bad input was said: keep this process until the first one has said it. torchrun ends all once one has ended."""
        with contextlib.suppress(Exception):
            if self.is_first:
                self.store.set("heard", "")
            else:
                self.store.wait(["heard"], timedelta(seconds=LAST_WORDS))

    def silent(self, ranks: Sequence[int], seconds: float) -> int | None:
        """One of these processes that has given no sign of life for so many seconds, by two calls or more; else None."""
        now = time.monotonic()
        for rank in ranks:
            key = f"alive/{rank}"
            beat = self.store.get(key) if self.store.check([key]) else None
            known, since = self._heard.get(rank, (None, now))
            if rank not in self._heard or beat != known:
                self._heard[rank] = beat, now
            elif now - since > max(seconds, 3 * HEARTBEAT):
                return rank
        return None

    def no_sign(self, rank: int) -> ProcessError:
        """Error of a process that is given up."""
        return ProcessError(f"process {rank} of {self.size} gives no sign of life; --resume goes on")

    def awaited(self, key: str, rank: int) -> bytes:
        """Value of a key of the store, once the process of this rank has set it, however long that takes.

        Raises:
            ProcessError: another process has failed, or this one gives no sign of life.
        """
        while not self.store.check([key]):
            if failure := self.failure():
                raise failure
            if self.silent([rank], self.timeout) is not None:
                raise self.no_sign(rank)
            time.sleep(PAUSE)
        value: bytes = self.store.get(key)
        return value

    def hanging(self, ranks: Sequence[int]) -> int | None:
        """One of these processes that does not answer; asked at every microbatch, it looks as often as processes give signs
        of life."""
        if (now := time.monotonic()) - self._looked < HEARTBEAT:
            return None
        self._looked = now
        return self.silent(ranks, self.timeout)

    def _beat(self) -> None:
        for beat in itertools.count():
            if self._ended.wait(HEARTBEAT):
                return
            with contextlib.suppress(Exception):
                self.store.set(f"alive/{self.rank}", str(beat))

    def close(self) -> None:
        self._ended.set()
        self._heart.join()


@contextlib.contextmanager
def joined(timeout: float, joining: float) -> Iterator[Mesh]:
    """See start.started, of several processes."""
    own, no_gpu, restarted = not dist.is_initialized(), None, was_restarted()
    if own:
        no_gpu = take_gpu()
        from packlora.parallel.join import join

        restarted = join(joining, timeout)
    mesh = Mesh(dist.get_rank(), dist.get_world_size(), distributed_c10d._get_default_store(), timeout)
    mesh.no_gpu = no_gpu
    try:
        mesh.restarted = any(mesh.gather(restarted))
        yield mesh
        mesh.barrier()
    except BaseException as error:
        _groups.clear()  # a message may be on its way in one of them
        failure = mesh.failure() if isinstance(error, ProcessError | RuntimeError) else None
        if failure is None and is_unanswered(error):
            failure = in_vain(error)
        if failure is not None:  # a message in a forward or a backward failed because another process did
            failure.is_news = mesh.speaks_of_failure()
            raise failure from error
        if isinstance(error, ProcessError):
            error.is_news = mesh.speaks_of_failure()
        else:
            mesh.fail(error)
        if isinstance(error, InputError):
            error.heard = mesh.heard  # type: ignore[attr-defined]
        raise
    finally:
        mesh.close()
        if own:
            dist.destroy_process_group()


def take_gpu() -> str | None:
    """Make this process's own GPU the current one; why there is none, on a machine that has some."""
    if not torch.cuda.is_available():
        return None
    local, here = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if local < here:
        torch.cuda.set_device(local)
        return None
    return (
        f"this machine has {here} usable GPU{'s' if here > 1 else ''}, but {os.environ.get('LOCAL_WORLD_SIZE', local + 1)} "
        f"processes were started on it, and each needs its own; start {here} (--nproc-per-node), or set device: cpu"
    )
