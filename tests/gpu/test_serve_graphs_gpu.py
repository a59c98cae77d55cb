"""Models of a service whose microbatches go by CUDA graphs: the bits of the same passes without, whoever comes and goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_model
from graphed import Story
from serving import datum, host_of

from packlora.engine.graphs import MOST
from packlora.runtime.run import deterministic
from packlora.serve import graphs as serve_graphs
from packlora.serve.host import Host

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """A model whose weights bfloat16 holds."""
    folder, model = (
        tmp_path_factory.mktemp("base"),
        tiny_model("llama", num_hidden_layers=2, max_position_embeddings=4096),
    )
    model.to(torch.bfloat16).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def same_bits() -> Iterator[None]:
    with deterministic():
        yield


Make = Callable[..., Host]


@pytest.fixture
def make(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """(patience, settings) -> a host on the GPU, of 4096 tokens a microbatch."""

    def host(patience: int, *settings: str) -> Host:
        monkeypatch.setattr(serve_graphs, "PATIENCE", patience)
        return host_of(base, tmp_path, "device=cuda", *settings, budget=4096)

    return host


def apart(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Largest distance of two arrays over the norm of one."""
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, want, strict=True))


def test_models_that_come_and_go_have_the_bits_of_the_same_passes_without_graphs(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = make(1, "dtype=bfloat16")
    story = partial(Story, longer=12, targets=TARGETS)
    graphs = story(host, tmp_path / "graphs")
    got = graphs.run()
    assert host.graphs is not None and host.graphs.why_not is None
    assert not any("CUDA graphs" in record.message for record in caplog.records)
    bare = story(make(10**6, "dtype=bfloat16"), tmp_path / "bare")
    assert all(np.array_equal(one, other) for one, other in zip(got, bare.run(), strict=True))
    plain = story(make(1, "dtype=bfloat16", "cuda_graphs=false"), tmp_path / "plain")
    exact = story(make(1, "dtype=float64"), tmp_path / "exact")
    plain.run(), exact.run()
    own, other = apart(graphs.logprobs, exact.logprobs), apart(plain.logprobs, exact.logprobs)
    print(f"distance of log-probabilities from float64: graphs {own:.2e}, without {other:.2e}")
    assert own <= 1.5 * other < 0.2


def test_replays_of_many_sizes_have_the_bits_of_the_same_passes_without_graphs(make: Make, tmp_path: Path) -> None:
    """From a few tokens to a full microbatch, in any order."""
    lengths = [[7], [64], [200, 120], [64] * 10, [250] * 4, [240] * 11, [250] * 16, [31] * 40]
    found = []
    for patience in (1, 10**6):
        host = make(patience, "dtype=bfloat16")
        story = Story(host, tmp_path / str(patience), targets=TARGETS)
        story.enter("dora", "dropped")
        for again in range(3):
            for number in np.random.default_rng(again).permutation(len(lengths)):
                rows = [datum(int(number) + at, length) for at, length in enumerate(lengths[number])]
                promises = [story.talk.forward_backward(model, rows) for model in story.models.values()]
                for model in story.models.values():
                    story.talk.step(model, 1e-3)
                story.talk.run()
                story.logprobs += [story.talk.result(promise)[1] for promise in promises]
        assert host.graphs is not None and host.graphs.why_not is None
        bodies = host.graphs._bodies
        assert 5 <= len(bodies) <= MOST
        assert sum(body.recorded for body in bodies.values()) == (len(bodies) if patience == 1 else 0)
        found.append(story.logprobs)
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


def test_a_neighbour_that_is_not_finite_changes_no_bit(make: Make, tmp_path: Path) -> None:
    found = []
    for lr in (1e-3, 1e30):
        host = make(1, "dtype=bfloat16")
        story = Story(host, tmp_path / str(lr), 12, TARGETS)
        story.enter("dora", "dropped")
        for number in range(5):
            rows = [datum(number, 200)]
            promise = story.talk.forward_backward(story.models["dora"], rows)
            story.talk.forward_backward(story.models["dropped"], rows)
            story.talk.step(story.models["dora"], 1e-3)
            story.talk.step(story.models["dropped"], lr if number > 2 else 1e-3)
            story.talk.run()
            found.append(story.talk.result(promise)[1])
        assert host.graphs is not None and any(body.recorded for body in host.graphs._bodies.values())
    assert all(np.array_equal(one, other) for one, other in zip(found[:5], found[5:], strict=True))
    assert all(np.isfinite(own).all() for own in found)


def test_models_that_have_left_leave_no_memory_behind(make: Make, tmp_path: Path) -> None:
    host = make(1, "dtype=bfloat16")
    story = Story(host, tmp_path / "state", 12, TARGETS)
    story.enter("dora", "dropped", "later")
    for number in range(4):
        story.step(number)
    assert host.graphs is not None and any(body.recorded for body in host.graphs._bodies.values())
    adapters: list[Any] = [story.service.tenants[model].adapter for model in story.models.values()]
    tensors = [[weakref.ref(t) for t in (own.flat, *own.named_parameters().values())] for own in adapters]
    del adapters
    story.leave("dropped")
    story.leave("later")
    assert len(host.graphs.adapters) == 3
    host.tidy(0)
    for number in range(4):
        story.step(number)
    assert len(host.graphs.adapters) == 1 and any(body.recorded for body in host.graphs._bodies.values())
    gc.collect()
    assert [any(tensor() is not None for tensor in own) for own in tensors] == [True, False, False]
