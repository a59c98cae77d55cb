"""Random interleavings of tenants' requests: whatever their order, cuts and neighbours, each has the numbers that it has alone.

A case is drawn from one number, which a failure names: two or three tenants of different adapters, the requests of each, and
how they arrive.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from seeds import SOAK
from serving import NAME, Talk, datum, host_of, leave

from packlora.ops.cross_entropy.linear_cross_entropy import CHUNK_BYTES
from packlora.serve.host import Host
from packlora.serve.messages import Datum
from packlora.serve.service import Service

BUDGET = 48
"""Tokens of a microbatch: a request of six rows needs several."""
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
MODULES = (["q_proj", "down_proj"], ["q_proj", "k_proj", "v_proj"], None, ["v_proj", "lm_head"])


def cases(count: int) -> Any:
    """So many random cases in `make soak`, and a few, always the same, elsewhere."""

    def decorate(test: Any) -> Any:
        profile = settings(
            max_examples=count if SOAK else 5, derandomize=not SOAK, deadline=None, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False, phases=[Phase.generate],
        )  # fmt: skip
        return profile(given(st.integers(0, 2**63 - 1))(test))

    return decorate


@dataclass
class Step:
    """One step of a tenant: rows in the order in which they are trained, all under one loss."""

    rows: list[Datum]
    loss: str
    clip: float


@dataclass
class Wish:
    """A tenant: its adapter and its steps. cuts: by step, how many of the rows each request has."""

    adapter: dict[str, Any]
    steps: list[Step]
    cuts: list[list[int]] = field(default_factory=list)

    def calls(self) -> list[tuple[str, int, list[Datum]]]:
        """Kind, step and rows of its requests, in the order of their numbers."""
        found: list[tuple[str, int, list[Datum]]] = []
        for number, (step, sizes) in enumerate(zip(self.steps, self.cuts, strict=True)):
            rows = iter(step.rows)
            found += [("rows", number, list(itertools.islice(rows, size))) for size in sizes]
            found.append(("step", number, []))
        return found


def some_tenants(draw: random.Random, dropout: bool = False) -> list[Wish]:
    """Two or three; the first two adapt the same modules, and so share microbatches. dropout: whether some have it."""
    modules = [draw.choice(MODULES)] * 2 + [draw.choice(MODULES)]
    tenants = []
    for own in modules[: draw.choice((2, 3, 3))]:
        adapter = {"rank": draw.randint(1, 8), "seed": draw.randint(1, 99), "use_dora": draw.random() < 0.4}
        adapter |= {"lora_alpha": draw.randint(1, 16), "use_rslora": draw.random() < 0.3}
        if dropout and draw.random() < 0.5:
            adapter["lora_dropout"] = draw.choice((0.1, 0.4))
        wish = Wish(adapter if own is None else adapter | {"target_modules": own}, [])
        for _ in range(draw.randint(1, 2)):
            loss = draw.choice(LOSSES)
            rows = [some_row(draw, loss) for _ in range(draw.randint(1, 6))]
            wish.steps.append(Step(rows, loss, draw.choice((0.0, 0.3))))
        wish.cuts = some_cuts(draw, wish)
        tenants.append(wish)
    return tenants


def some_row(draw: random.Random, loss: str) -> Datum:
    length, values = draw.randint(2, 24), np.random.default_rng(draw.getrandbits(60))
    if loss == "cross_entropy":
        return datum(draw.randrange(10**6), length, weights=values.uniform(-0.2, 1, length))
    logprobs = -5 + values.uniform(-0.3, 0.3, length)
    return datum(draw.randrange(10**6), length, logprobs=logprobs, advantages=values.normal(size=length))


def some_cuts(draw: random.Random, wish: Wish) -> list[list[int]]:
    """Any cut of each step's rows into requests. A sequence's ratio is of one row, so no loss is of several rows."""
    cuts = []
    for step in wish.steps:
        at = sorted(draw.sample(range(1, len(step.rows)), draw.randint(0, len(step.rows) - 1)))
        cuts.append([stop - start for start, stop in itertools.pairwise([0, *at, len(step.rows)])])
    return cuts


@dataclass
class Found:
    """What a tenant got. logprobs, losses: of each step's rows, however they were cut. norms: of gradients."""

    tensors: dict[str, torch.Tensor]
    logprobs: list[np.ndarray]
    losses: list[float]
    norms: list[float]


def life(host: Host, tenants: list[Wish], state: Path, draw: random.Random | None = None) -> list[Found]:
    """Send all requests and carry them out. draw: requests are sent in any order, with turns between; else one by one."""
    state.mkdir()
    talk = Talk(Service({host.facts.name: host}, state))
    try:
        session = talk.session()
        models = [talk.model(session, number, **wish.adapter) for number, wish in enumerate(tenants)]
        todo = [
            (number, seq, call)
            for number, wish in enumerate(tenants)
            for seq, call in enumerate(wish.calls(), talk.seqs.get(models[number], 0) + 1)
        ]
        if draw is not None:
            ahead = draw.choice((0.5, 3.0, 100.0))  # how far requests overtake others
            todo.sort(key=lambda own: own[1] + ahead * draw.random())
        promises: dict[tuple[int, int], str] = {}
        for number, seq, (kind, step, rows) in todo:
            wish, model = tenants[number].steps[step], models[number]
            if kind == "rows":
                promises[number, seq] = talk.forward_backward(model, rows, wish.loss, seq=seq)
            else:
                promises[number, seq] = talk.step(model, seq=seq, eps=1e-3, grad_clip_norm=wish.clip, weight_decay=0.1)
            talk.seqs[model] = max(seq, talk.seqs.get(model, 0))
            for _ in range(0 if draw is None else draw.choice((0, 0, 1, 3))):
                talk.service.turn()
        talk.run()
        return [found_of(talk, wish, models[n], n, promises) for n, wish in enumerate(tenants)]
    finally:
        leave(talk.service)


def found_of(talk: Talk, wish: Wish, model: str, number: int, promises: dict[tuple[int, int], str]) -> Found:
    found = Found(talk.tensors(model), [], [0.0] * len(wish.steps), [])
    parts: list[list[np.ndarray]] = [[] for _ in wish.steps]
    mine = [promise for (own, _), promise in sorted(promises.items()) if own == number]
    for promise, (kind, step, _) in zip(mine, wish.calls(), strict=True):
        result = talk.result(promise)
        if kind == "step":
            found.norms.append(result["metrics"]["grad_norm"])
        else:
            found.losses[step] += result[0]["loss:sum"]
            parts[step].append(result[1])
    found.logprobs = [np.concatenate(own) for own in parts]
    return found


@pytest.fixture(scope="module")
def exact(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Host:
    return host_of(tiny_base("llama"), tmp_path_factory.mktemp("serve"), "dtype=float64", budget=BUDGET)


@pytest.fixture(scope="module")
def narrow(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Host:
    """Its layers have biases, which are added at the end of a sum where an adapter scales it, else at its beginning."""
    return host_of(tiny_base("qwen2"), tmp_path_factory.mktemp("narrow"), "dtype=float32", budget=BUDGET)


@cases(300)
def test_a_tenant_has_the_same_bits_for_the_same_cut_whoever_else_is_there_and_however_requests_arrive(
    narrow: Host, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("bits")
    tenants = some_tenants(draw, dropout=True)
    with pytest.MonkeyPatch.context() as patch:  # the rows of an output layer are cut into chunks of 32, or not
        patch.setitem(CHUNK_BYTES, "cpu", draw.choice((1, CHUNK_BYTES["cpu"])))
        mixed = life(narrow, tenants, folder / "mixed", draw)
        alone = [life(narrow, [wish], folder / f"alone {number}")[0] for number, wish in enumerate(tenants)]
    for wish, got, want in zip(tenants, mixed, alone, strict=True):
        assert got.norms == want.norms and got.losses == want.losses and min(want.norms) > 0
        assert all(map(np.array_equal, got.logprobs, want.logprobs))
        assert got.tensors.keys() == want.tensors.keys()
        assert all(torch.equal(got.tensors[name], want.tensors[name]) for name in want.tensors), wish.adapter


@cases(300)
def test_a_tenant_has_the_same_numbers_for_any_cut_whoever_else_is_there_and_however_requests_arrive(
    exact: Host, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    draw, folder = random.Random(seed), tmp_path_factory.mktemp("numbers")
    tenants = some_tenants(draw)
    mixed = life(exact, tenants, folder / "mixed", draw)
    for number, (wish, got) in enumerate(zip(tenants, mixed, strict=True)):
        wish.cuts = [[len(step.rows)] for step in wish.steps]
        (want,) = life(exact, [wish], folder / f"alone {number}")
        np.testing.assert_allclose(got.norms, want.norms, rtol=1e-10)
        np.testing.assert_allclose(got.losses, want.losses, rtol=1e-10, atol=1e-10)
        for own, other in zip(got.logprobs, want.logprobs, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-6)  # float32 on the wire
        for name, tensor in want.tensors.items():
            torch.testing.assert_close(got.tensors[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def test_a_tenant_has_its_bits_beside_one_whose_outputs_are_scaled_also_where_layers_have_biases(
    narrow: Host, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scaled, own = {"rank": 4, "use_dora": True}, {"rank": 2, "use_rslora": True}
    found = []
    for number, adapters in enumerate(([own], [own, scaled])):
        talk = Talk(Service({NAME: narrow}, tmp_path_factory.mktemp(f"beside {number}")))
        session = talk.session()
        models = [talk.model(session, at, init_lora_weights=False, **one) for at, one in enumerate(adapters)]
        for at, model in enumerate(models):
            talk.forward_backward(model, [datum(at, 9)])
        talk.run()
        state = talk.service.tenants[models[0]].state
        assert state is not None and state.gradient is not None
        found.append(state.gradient.clone())
        leave(talk.service)
    assert found[0].count_nonzero() > 0 and torch.equal(*found)
