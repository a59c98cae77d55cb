"""`large`'s case `served`: `packlora serve` of a model over all GPUs is killed, and goes on on half of them.

The service writes its state beside the model. Whatever hangs is killed after LIMIT seconds, and the row says so.
"""

from __future__ import annotations

import contextlib
import http.client
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.commands import WORDS
from benchmarks.harness import Row
from benchmarks.tenants import Connection, Served, Tenant, request_of
from benchmarks.watched import Watch, descendants, kill, wait_until_gone

RANK, RATE = 16, 1e-3
"""Of the adapters. The rate is high, so that a loss tells which steps were done before it."""
STEPS, BEFORE = 4, 2
"""Steps of each model; steps of the one that is interrupted whose results come before the kill."""
LIMIT, HELD = 400.0, 0.9
"""Seconds after which the service is killed, from the begin of the case; share of a GPU's memory that weights may take."""


class Story:
    """What the case does, with a line for each part.

    Args:
        folder: with the base model in base/.
        sizes: processes of the first service, and of the one that goes on.
        length: tokens of a sample.
    """

    def __init__(self, folder: Path, sizes: tuple[int, int], samples: int, length: int, device: torch.device) -> None:
        self.folder, self.sizes, self.device = folder, sizes, device
        self.began, self.tokens, self.length = time.monotonic(), samples * length, length
        drawn = np.random.default_rng(0).integers(3, 3 + WORDS, (samples, length + 1))
        self.request = request_of(list(drawn))
        self.row: Row = {"resumed_on": sizes[1], "host_gib": 0.0, "losses": [], "whole_losses": []}

    def tell(self) -> None:
        """Train a model without a break and one with a kill. Fills the row; raises what ends it."""
        with self._service(self.sizes[0], "start_s") as service:
            whole, broken = service.models(2, RANK)
            self.row["tokens_per_s"] = self._steps(whole, "whole_losses", STEPS)
            self._steps(broken, "losses", BEFORE)
            promises = broken.send(self.request), broken.step(RATE)
            found = descendants(service.process.pid)
            kill(found)
            self.say("killed with step 3 promised")
            wait_until_gone(found)
        with self._service(self.sizes[1], "restart_s") as service:
            broken.connection = Connection(service.address)
            self._done(broken, promises, "losses")
            self.row["resumed_tokens_per_s"] = self._steps(broken, "losses", STEPS - BEFORE - 1)

    @contextlib.contextmanager
    def _service(self, processes: int, key: str) -> Iterator[Served]:
        """A service on so many processes. key: of the row, for the seconds until it answers."""
        self.say(f"a service on {processes} processes starts")
        settings = ("dtype=bfloat16", "gradient_checkpointing=true", f"max_tokens_per_microbatch={4 * self.length}")
        state, watches = self.folder / "served", list[Watch]()
        watch = lambda pid: watches.append(Watch(pid, self.is_late))  # noqa: E731
        try:
            service = Served(self.folder / "base", state, self.device.type, processes, settings, watch)
            self.row[key] = service.seconds
            self.say(f"it answers after {service.seconds:.1f} s")
            try:
                yield service
            finally:
                service.stop()
        except BaseException:
            print(state.with_suffix(".log").read_text()[-4000:], flush=True)
            raise
        finally:
            for own in watches:
                own.end()
                self.row["host_gib"] = max(self.row["host_gib"], own.most / 2**30)

    def _steps(self, model: Tenant, key: str, steps: int) -> float:
        """Take steps, each waited for. Returns the tokens a second of those after the first one, if there are some."""
        ends = [time.perf_counter()]
        for _ in range(steps):
            self._done(model, (model.send(self.request), model.step(RATE)), key)
            ends.append(time.perf_counter())
        first = min(1, steps - 1)
        return self.tokens * (steps - first) / (ends[-1] - ends[first])

    def _done(self, model: Tenant, promises: tuple[str, str], key: str) -> None:
        """Wait for the results of a step. key: of the row, for the mean loss of a token before it."""
        loss = model.loss(promises[0]) / self.tokens
        model.stepped(promises[1])
        self.row[key].append(loss)
        self.say(f"{key}: step {len(self.row[key])} has loss {loss:.5f}")

    def is_late(self) -> bool:
        """Whether the case has taken too long."""
        return time.monotonic() - self.began > LIMIT

    def say(self, text: str) -> None:
        """Print a line, at once: a run that is cut off has told how far it came."""
        print(f"{time.monotonic() - self.began:7.1f} s served: {text}", flush=True)


def fit_on(processes: int, weights: int, device: torch.device) -> bool:
    """Whether the GPUs of so many processes hold weights of so many bytes together, beside what training takes."""
    return device.type != "cuda" or weights <= HELD * processes * torch.cuda.get_device_properties(0).total_memory


def served(folder: Path, size: int, samples: int, length: int, weights: int, device: torch.device) -> Row:
    """The row of the case. size: processes; half of them go on after the kill, where their GPUs hold the weights (in bytes)."""
    half = size // 2
    story = Story(folder, (size, half if fit_on(half, weights, device) else size), samples, length, device)
    row: dict[str, Any] = story.row
    try:
        story.tell()
    except (RuntimeError, OSError, http.client.HTTPException) as error:
        late = f"killed after {LIMIT:.0f} s: " if story.is_late() else ""
        return row | {"failed": {"packlora": f"{late}{type(error).__name__}: {error}"[:600]}}
    pairs = list(zip(row["losses"], row["whole_losses"], strict=True))
    return row | {
        "loss_difference": max(abs(own - whole) / whole for own, whole in pairs),
        "loss_change": abs(pairs[-1][1] - pairs[0][1]) / pairs[0][1], "failed": {},
    }  # fmt: skip
