"""Figures of a running service, for /metrics, the live page and `packlora serve status`."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

WINDOW = 60.0
"""Seconds over which tokens a second are counted."""


class Figures:
    """Counters of the thread that computes; any thread reads them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own = self.registry
        self.trained = Counter("packlora_trained_tokens", "Tokens of forward and backward passes", registry=own)
        self.sampled = Counter("packlora_sampled_tokens", "Tokens that were sampled", registry=own)
        self.steps = Counter("packlora_optimizer_steps", "Optimizer steps", registry=own)
        self.slots = Counter("packlora_microbatches", "Microbatches", registry=own)
        self.tenants = Histogram(
            "packlora_tenants_of_a_microbatch", "Models in a microbatch", buckets=[1, 2, 4, 8, 16, 32, 64], registry=own
        )
        self.seconds = Histogram(
            "packlora_request_seconds", "From a request's arrival to its result, by kind", ["kind"],
            buckets=[0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100], registry=own,
        )  # fmt: skip
        self.waiting = Gauge("packlora_waiting_requests", "Requests that wait", registry=own)
        self.samples = Gauge("packlora_running_samples", "Samples that have not ended", registry=own)
        self.sessions = Gauge("packlora_sessions", "Sessions that have not ended", registry=own)
        self.models = Gauge("packlora_models", "Models, by whether they are on the base", ["state"], registry=own)
        self.memory = Gauge("packlora_device_bytes", "Memory of GPUs that tensors take; 0 on a CPU", registry=own)
        self.graphs = Gauge("packlora_recorded_graphs", "Sizes of microbatches recorded as CUDA graphs", registry=own)
        self.padding = Gauge(
            "packlora_padding_tokens", "Tokens of nobody that microbatches have computed", registry=own
        )
        self.answers = Counter("packlora_http_answers", "Answers by status", ["status"], registry=own)
        self.began = time.monotonic()
        self._recent: deque[tuple[float, str, int]] = deque()
        self._drawn: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()

    def slot(self, by_owner: Mapping[str, int], models: int, steps: int) -> None:
        """A slot has run. by_owner: tokens. models: how many had rows; 0: it was steps alone, without a microbatch."""
        now = time.monotonic()
        if models:
            self.slots.inc()
            self.tenants.observe(models)
        self.trained.inc(sum(by_owner.values()))
        self.steps.inc(steps)
        with self._lock:
            self._recent.extend((now, owner, tokens) for owner, tokens in by_owner.items())
            while self._recent and self._recent[0][0] < now - WINDOW:
                self._recent.popleft()

    def drew(self, tokens: int) -> None:
        """So many tokens were sampled."""
        now = time.monotonic()
        self.sampled.inc(tokens)
        with self._lock:
            self._drawn.append((now, tokens))
            while self._drawn[0][0] < now - WINDOW:
                self._drawn.popleft()

    def shares(self) -> dict[str, int]:
        """Tokens of each owner in the last minute."""
        since, out = time.monotonic() - WINDOW, dict[str, int]()
        with self._lock:
            for at, owner, tokens in self._recent:
                if at >= since:
                    out[owner] = out.get(owner, 0) + tokens
        return out

    def text(self) -> bytes:
        """Figures in Prometheus' format."""
        return generate_latest(self.registry)

    def status(self) -> dict[str, Any]:
        """Speed, and the share of each owner, whose name is not in it."""
        shares, now = self.shares(), time.monotonic()
        total, over = sum(shares.values()), max(min(WINDOW, now - self.began), 1.0)
        with self._lock:
            drawn = sum(tokens for at, tokens in self._drawn if at >= now - WINDOW)
        return {
            "seconds": round(now - self.began),
            "tokens_per_second": round(total / over, 1),
            "sampled_per_second": round(drawn / over, 1),
            "shares": sorted((round(own / total, 3) for own in shares.values()), reverse=True) if total else [],
        }
