"""Tenants that share microbatches: each has what it has alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from seeds import SOAK
from serving import Talk, datum, host, host_of, leave
from transformers import AutoModelForCausalLM

from packlora.engine.adapters import AdapterState
from packlora.ops.cross_entropy.linear_cross_entropy import CHUNK_BYTES
from packlora.serve import service as service_module
from packlora.serve.host import Host
from packlora.serve.service import Service
from packlora.serve.tenant import Tenant

__all__ = ["host"]

TENANTS: list[dict[str, Any]] = [
    {"rank": 8, "seed": 3},
    {"rank": 3, "seed": 4, "use_dora": True, "target_modules": ["q_proj", "down_proj"], "lora_alpha": 6},
    {"rank": 5, "seed": 5, "use_rslora": True, "lora_dropout": 0.3},
    {"rank": 2, "seed": 6, "target_modules": ["q_proj", "down_proj"]},
    {"rank": 4, "seed": 8, "use_dora": True},
    {"rank": 2, "seed": 6, "target_modules": ["v_proj", "lm_head"]},
    {"rank": 4, "seed": 7, "target_modules": ["v_proj", "lm_head"], "use_dora": True},
]
LOSSES = {5: "ppo", 6: "gspo"}
"""Tenants whose loss is no cross entropy: gradients of an output layer are weighed by row for one, by sample for the other."""


@pytest.fixture(scope="module")
def exact(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Host:
    return host_of(tiny_base("llama"), tmp_path_factory.mktemp("serve"), "dtype=float64", budget=64)


def rows(tenant: int, step: int) -> list[Any]:
    values = np.random.default_rng([tenant, step])
    lengths = values.integers(4, 30, 5)
    if tenant in LOSSES:
        policy = [{"logprobs": -5 + values.normal(size=n) / 9, "advantages": values.normal(size=n)} for n in lengths]
        return [datum(100 * tenant + 10 * step + n, int(lengths[n]), **own) for n, own in enumerate(policy)]
    return [
        datum(100 * tenant + 10 * step + n, int(length), weights=np.linspace(-0.5, 1, length))
        for n, length in enumerate(lengths)
    ]


def loss_of(tenant: int) -> str:
    return LOSSES.get(tenant, "cross_entropy")


def train(talk: Talk, tenants: list[int], order: np.random.Generator | None = None) -> dict[int, Any]:
    """Three steps of each tenant, sent in any order; its tensors and all of its results."""
    session = talk.session(f"session {tenants}")
    models = {own: talk.model(session, number, **TENANTS[own]) for number, own in enumerate(tenants)}
    todo = [(own, step) for step in range(3) for own in tenants]
    promises: dict[int, list[str]] = {own: [] for own in tenants}
    if order is not None:
        todo = [todo[n] for n in np.argsort(order.random(len(todo)) * 2 + [step for _, step in todo])]
    steps = dict.fromkeys(tenants, 0)
    for own, _ in todo:
        model, step = models[own], steps[own]
        steps[own] += 1
        seq = talk.seqs.get(model, 0)
        talk.seqs[model] = seq + 3
        own_rows = rows(own, step)
        sent = [
            lambda m=model, s=seq, r=own_rows, n=own: talk.forward_backward(m, r[:3], loss_of(n), seq=s + 1),
            lambda m=model, s=seq, r=own_rows, n=own: talk.forward_backward(m, r[3:], loss_of(n), seq=s + 2),
            lambda m=model, s=seq: talk.step(m, seq=s + 3, weight_decay=0.1, grad_clip_norm=0.5),
        ]
        if order is not None:
            order.shuffle(sent)
        promises[own] += sorted((call() for call in sent), key=lambda _: 0)
        if order is not None and order.random() < 0.5:
            talk.service.turn()
    talk.run()
    return {own: (talk.tensors(models[own]), models[own], promises[own]) for own in tenants}


def test_any_mix_and_order_gives_each_tenant_the_bits_that_it_has_alone(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the rows of an output layer are cut into chunks."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 1)
    alone = {}
    for own in range(len(TENANTS)):
        talk = Talk(Service({host.facts.name: host}, folder(tmp_path, f"alone {own}")))
        alone[own] = train(talk, [own])[own][0]
        leave(talk.service)
    shared = 0
    for seed in range(3 if SOAK else 2):
        service = Service({host.facts.name: host}, folder(tmp_path, f"mixed {seed}"))
        talk = Talk(service)
        found = train(talk, [*range(len(TENANTS))], np.random.default_rng(seed) if seed else None)
        for own, (tensors, *_) in found.items():
            assert tensors.keys() == alone[own].keys()
            assert all(torch.equal(tensors[name], alone[own][name]) for name in tensors), (seed, own)
        shared += shared_by(service)
        leave(service)
    assert shared > 10, "microbatches were shared"


def test_two_tenants_equal_plain_loops_with_peft(
    exact: Host, tiny_base: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's model of each alone, autograd, clipping and torch's AdamW in float64. The two adapt different modules, in one
    microbatch, as on a GPU."""
    monkeypatch.setattr(Tenant, "kind", None)
    talk = Talk(Service({exact.facts.name: exact}, folder(tmp_path, "state")))
    session = talk.session()
    models = [talk.model(session, number, **TENANTS[number]) for number in range(2)]
    base = AutoModelForCausalLM.from_pretrained(tiny_base("llama"), dtype=torch.float64)
    peft: list[Any] = []
    for model in models:
        torch.set_default_dtype(torch.float64)
        own: Any = PeftModel.from_pretrained(
            copy.deepcopy(base), str(talk.folder(model, "start")), is_trainable=True, autocast_adapter_dtype=False
        )
        torch.set_default_dtype(torch.float32)
        own.set_attn_implementation("sdpa")
        peft.append(own)
    for step in range(3):
        promises = []
        for number, model in enumerate(models):
            promises.append(talk.forward_backward(model, rows(number, step)))
            talk.step(model, weight_decay=0.1, grad_clip_norm=0.5)
        talk.run()
        for number, (model, promise) in enumerate(zip(peft, promises, strict=True)):
            parameters = [one for one in model.parameters() if one.requires_grad]
            if step == 0:
                model.optimizer = torch.optim.AdamW(parameters, 1e-2, (0.9, 0.95), 1e-12, weight_decay=0.1)
            total, logprobs = 0.0, []
            for row in rows(number, step):
                ids, targets = (torch.from_numpy(np.array(x, np.int64)) for x in (row.ids, row.inputs["target_tokens"]))
                logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
                logp = logp.gather(1, targets[:, None])[:, 0]
                loss = -(torch.from_numpy(row.inputs["weights"].astype(np.float32)).double() * logp).sum()
                loss.backward()
                total += loss.item()
                logprobs.append(logp.detach().numpy())
            metrics, found = talk.result(promise)
            np.testing.assert_allclose(found, np.concatenate(logprobs), rtol=1e-6, atol=1e-6)
            assert metrics["loss:sum"] == pytest.approx(total, rel=1e-10)
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            model.optimizer.step()
            model.optimizer.zero_grad()
    assert shared_by(talk.service) >= 2, "microbatches were shared"
    for own, model in zip(peft, models, strict=True):
        theirs = {
            name.replace(".default", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector.weight"): tensor
            for name, tensor in own.named_parameters()
            if tensor.requires_grad
        }
        tensors = talk.tensors(model)
        assert len(theirs) == len(tensors)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, theirs[name].detach().view_as(tensor), rtol=1e-10, atol=1e-12)
    leave(talk.service)


def test_gradients_add_up_and_a_forward_alone_touches_nothing(exact: Host, tmp_path: Path) -> None:
    talk = Talk(Service({exact.facts.name: exact}, folder(tmp_path, "state")))
    session = talk.session()
    once, twice = (talk.model(session, number, **TENANTS[2]) for number in range(2))
    norms = {}
    for model, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            talk.forward_backward(model, [datum(7, 9)], only=True)
            promise = talk.forward_backward(model, [datum(1, 12)])
        step = talk.step(model, 0.0)
        talk.run()
        norms[model] = talk.result(step)["metrics"]["grad_norm"]
    assert norms[once] > 0 and norms[twice] != norms[once], "each forward_backward drops out elements of its own"
    assert talk.result(promise)[0]["tokens:sum"] == 12
    plain = talk.model(session, 2, rank=4)
    talk.forward_backward(plain, [datum(1, 12)])
    first = talk.step(plain, 0.0)
    for _ in range(2):
        talk.forward_backward(plain, [datum(7, 9)], only=True)
        talk.forward_backward(plain, [datum(1, 12)])
    second, nothing = talk.step(plain, 0.0), talk.step(plain)
    talk.run()
    both = [talk.result(promise)["metrics"]["grad_norm"] for promise in (first, second, nothing)]
    assert both[1] == pytest.approx(2 * both[0], rel=1e-12) and both[2] == 0
    leave(talk.service)


def test_a_neighbour_that_fails_changes_no_bit_and_its_own_step_is_refused(host: Host, tmp_path: Path) -> None:
    found = []
    for spoil in (False, True):
        talk = Talk(Service({host.facts.name: host}, folder(tmp_path, f"state {spoil}")))
        session = talk.session()
        model, other = (talk.model(session, number, **TENANTS[number]) for number in range(2))
        own = [(talk.forward_backward(model, rows(0, step)), talk.step(model)) for step in range(2)]
        inputs = {"logprobs": np.full(9, -1e5 if spoil else -1.0), "advantages": np.ones(9)}
        bad = talk.forward_backward(other, [datum(3, 9, **inputs)], "importance_sampling")
        step = talk.step(other)
        again = talk.forward_backward(other, rows(1, 1)), talk.step(other)
        talk.run()
        found.append((talk.tensors(model), talk.tensors(other)))
        assert "error" not in talk.result(own[1][1])
        if spoil:
            assert talk.result(bad)["category"] == "user" and "inf" in talk.result(bad)["error"]
            assert "error" in talk.result(step) and "error" not in talk.result(again[1])
            assert talk.result(again[1])["metrics"]["step"] == 1
        leave(talk.service)
    assert all(torch.equal(own, found[1][0][name]) for name, own in found[0][0].items())
    assert all(tensor.isfinite().all() for tensor in found[1][1].values())


def test_a_slot_that_raises_is_tried_one_by_one(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model whose rows raise is told so; its neighbour trains as alone."""
    talk = Talk(Service({host.facts.name: host}, folder(tmp_path, "state")))
    session = talk.session()
    model, other = (talk.model(session, number, **TENANTS[number]) for number in range(2))
    good, bad = talk.forward_backward(model, rows(0, 0)[:1]), talk.forward_backward(other, [datum(5, 13)])
    steps = talk.step(model), talk.step(other)
    original = service_module.run_slot

    def raises(host_: Host, filled: Any, *more: Any) -> Any:
        if any(request.model == other and request.kind == "forward_backward" for _, request in filled.pieces):
            raise RuntimeError("for this test")
        return original(host_, filled, *more)

    monkeypatch.setattr(service_module, "run_slot", raises)
    talk.run()
    assert "for this test" in talk.result(bad)["error"] and "error" in talk.result(steps[1])
    assert talk.result(good)[0]["loss:sum"] != 0 and talk.result(steps[0])["metrics"]["step"] == 1
    leave(talk.service)


def test_steps_are_begun_before_losses_are_waited_for(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device has nothing to do while the host launches the steps of all tenants."""
    order: list[str] = []

    def on_its_way(losses_L: torch.Tensor) -> Callable[[], torch.Tensor]:
        order.append("copied")
        return lambda: order.append("read") or losses_L  # type: ignore[func-returns-value]

    begin = AdapterState.step
    monkeypatch.setattr("packlora.engine.engine.on_its_way", on_its_way)
    monkeypatch.setattr(AdapterState, "step", lambda *args: order.append("stepped") or begin(*args))
    talk = Talk(Service({host.facts.name: host}, folder(tmp_path, "state")))
    model = talk.model(talk.session())
    done, _ = talk.forward_backward(model, [datum(5, 13)]), talk.step(model)
    talk.run()
    assert order == ["copied", "stepped", "read"] and len(talk.result(done)[1]) == 13
    leave(talk.service)


def shared_by(service: Service) -> int:
    """Microbatches with rows of several models."""
    samples = [sample for metric in service.figures.tenants.collect() for sample in metric.samples]
    counted = {sample.labels["le"]: sample.value for sample in samples if "le" in sample.labels}
    return int(counted["+Inf"] - counted["1.0"])


def folder(path: Path, name: str) -> Path:
    made = path / name
    made.mkdir()
    return made
