"""The benchmark of the service: its clients train as any, and its figures are the right way round."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from serving import host_of, served

from benchmarks import serve, tenants
from benchmarks.harness import case


@pytest.fixture(scope="module")
def running(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    """What a Served has, of a service in this process; and the service."""
    state = tmp_path_factory.mktemp("serve")
    with served(host_of(tiny_base("llama"), state, name=tenants.NAME), state) as (url, service):
        address = url.removeprefix("http://")
        session = tenants.Connection(address).post("create_session", {"sdk_version": "0.38.0"})["session_id"]
        yield SimpleNamespace(address=address, session=session), service


def samples(seed: int) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(6, 300, (2, 12)))


def test_tenants_at_once_and_one_by_one_take_the_same_steps(running: tuple[Any, Any]) -> None:
    """Twins have the same samples, and the same losses before and after."""
    found = []
    for number, way in enumerate((tenants.all_at_once, tenants.one_by_one)):
        own = [tenants.Tenant(running[0], 10 * number + each, 4) for each in range(3)]
        requests = [tenants.request_of(samples(each)) for each in range(3)]
        first = [one.loss(one.send(request)) for one, request in zip(own, requests, strict=True)]
        way(own, requests, 3)()
        last = [one.loss(one.send(request)) for one, request in zip(own, requests, strict=True)]
        models = [running[1].tenants[one.model] for one in own]
        assert [(model.steps, one.seq) for model, one in zip(models, own, strict=True)] == [(3, 8)] * 3
        assert all(after < before for before, after in zip(first, last, strict=True))
        found.append((first, last))
    assert found[0] == found[1] and len(set(found[0][1])) == 3


def test_a_connection_that_the_service_has_closed_is_opened_again(running: tuple[Any, Any]) -> None:
    tenant = tenants.Tenant(running[0], 100, 2)
    promise, inner = tenant.send(tenants.request_of(samples(0))), tenant.connection._inner
    inner.sock.shutdown(socket.SHUT_RDWR)
    assert np.isfinite(tenant.loss(promise))
    with pytest.raises(RuntimeError, match=r"retrieve_future: 410 .*no promise"):
        tenant.loss("another")


def test_what_fails_is_no_time(running: tuple[Any, Any]) -> None:
    tenant = tenants.Tenant(running[0], 101, 2)
    request = tenants.request_of(samples(0))
    request.loss_fn = "stable_reinforce"
    with pytest.raises(RuntimeError, match="stable_reinforce"):
        tenant.loss(tenant.send(request))
    with pytest.raises(RuntimeError, match="gradients since the last"):
        tenant.stepped(tenant.step())


def test_more_than_one_means_that_all_at_once_is_faster() -> None:
    many = [case(f"tenants {tokens}", what="tenants", key=key) for tokens, key in ((64, "a"), (250, "b"))]
    others = [case("one tenant", what="one"), case("idle models", what="idle"), case("latency datum", what="latency")]
    measured: list[dict[str, Any]] = [
        {"over_packlora": {"sequential": 3.0}, "tokens_per_s": {"packlora": 9.0}},
        {"over_packlora": {"sequential": 2.0, "set_adapter": 7.0}, "tokens_per_s": {}},
        {"over_train": 1.02, "tokens_per_s": {"train": 5.0}},
        {"rate_ratio": 0.99, "gib": {"used": 3.0, "idle": 1.5, "without": 1.0}},
        {"ms": {"packlora": 30.0, "engine": 20.0}},
    ]
    rows = [
        {"case": one.label, **one.values, **row} for one, row in zip([*many, *others], measured, strict=True)
    ]  # fmt: skip
    assert serve.serve_summary(rows) == {
        "a": 3.0, "packlora_64_tokens_per_s": 9.0, "b": 2.0, "mixed_vs_set_adapter": 7.0, "one_tenant_over_train": 1.02,
        "one_tenant_train_tokens_per_s": 5.0, "idle_models_tokens_per_s": 0.99, "idle_models_gib": 0.5,
        "p50_packlora_ms": 30.0, "p50_engine_ms": 20.0, "p50_small_over_compute": 1.5,
    }  # fmt: skip


def test_steps_are_timed_from_end_to_end_without_the_first() -> None:
    assert tenants.seconds_of_a_step([5.0, 9.0, 10.0, 11.0, 14.0], 2) == 1.0
