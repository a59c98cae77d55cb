"""Processes of a process group, for tests: started once, given functions to run.

    def mean(rank: int, value: float) -> float: ...     # at the top of a test module; runs on every rank

    def test_mean(ranks: Ranks) -> None:
        assert ranks(2).run(mean, 3.0) == [3.0, 3.0]    # the answers, by rank

The processes are forks of one that has only imported things: they have no threads and no locks of the tests that came before,
and start in a tenth of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from seeds import SOAK
from waiting import SECONDS

PRELOADED = ["torch.distributed", "transformers.models.llama.modeling_llama", "packlora.runtime.run", "peft"]
AFTER = 5.0 if SOAK else 1.5
"""Seconds that the other ranks have for errors that no test looks at, once one has failed: most wait for it in vain."""

fresh = multiprocessing.get_context("forkserver")
"""Forks of a process that has run nothing."""
fresh.set_forkserver_preload(PRELOADED)


class RankFailed(AssertionError):
    """A rank raised, died or did not answer in time; the message has the traceback of each that raised."""


class Ranks:
    """A process group of so many ranks, with one thread each. A call that fails ends its processes; the next one starts others.

    Args:
        device: cpu, by gloo; cuda: each rank has a GPU, by NCCL, and is a Python of its own.
    """

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.size, self.device = size, device
        self._running: list[tuple[Any, Connection]] = []

    def run(
        self, function: Callable[..., Any], *args: Any, seconds: float = SECONDS, after: float = AFTER
    ) -> list[Any]:  # fmt: skip
        """What function(rank, *args) returns on each rank. All of it is pickled: the function is one of a module.

        Args:
            seconds: after which the call is given up.
            after: seconds that the other ranks have for errors of their own once one has failed.

        Raises:
            RankFailed: not every rank answered.
        """
        self._start()
        for _, pipe in self._running:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while len(answers) + len(errors) < self.size:
            left = deadline - time.monotonic()
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._running) if rank not in answers | errors}
            ready = wait(list(waiting), max(left, 0))
            if not ready:
                errors |= dict.fromkeys(waiting.values(), "no answer")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    good, found = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._running[rank][0].join(SECONDS)
                    good, found = False, f"the process ended with {self._running[rank][0].exitcode}"
                (answers if good else errors)[rank] = found
            if errors:
                deadline = min(deadline, time.monotonic() + after)
        if errors:
            self.close()
            raise RankFailed("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        return [answers[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._running:
            pipe.close()
            process.kill()
            process.join()
        if self._running:
            self._folder.cleanup()
        self._running = []

    def _start(self) -> None:
        if self._running:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context: Any = fresh if self.device == "cpu" else multiprocessing.get_context("spawn")  # no fork after CUDA
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self.size, self._folder.name, theirs, self.device), daemon=True
            )
            process.start()
            theirs.close()
            self._running.append((process, ours))


def serve(rank: int, size: int, folder: str, pipe: Connection, device: str = "cpu") -> None:
    """What a rank does: run functions until the pipe is closed."""
    import gc

    gc.freeze()  # what this is a fork with is not looked through, nor are its pages copied
    from datetime import timedelta

    import conftest  # noqa: F401 - the same settings as in the tests' own process
    import torch

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", init_method=f"file://{Path(folder, 'store')}", rank=rank,
        world_size=size, timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    while True:
        gc.collect()
        gc.freeze()  # so that what is imported by now is not looked through by every collection of a call
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = True, function(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
