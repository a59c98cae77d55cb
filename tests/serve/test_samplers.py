"""Samplers: refused where their adapter is not their trainer's, run in turns of owners, removed when they are over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from serving import NAME, Talk, datum, host, host_of, leave

from packlora.engine.drift import drift_of
from packlora.serve import samplers
from packlora.serve.errors import Refused
from packlora.serve.host import Host, run_of
from packlora.serve.limits import Limits
from packlora.serve.proof import Scored
from packlora.serve.service import Service
from packlora.serve.values import Values

__all__ = ["host"]


def sampler_of(talk: Talk, model: str, **more: Any) -> str:
    promise = talk.call(model, "save_weights_for_sampler", sampling_session_seq_id=0, **more)
    talk.run()
    return str(talk.result(promise)["sampling_session_id"])


def sampled(talk: Talk, sampler: str, seq: int = 0) -> Any:
    body = {
        "sampling_session_id": sampler, "seq_id": seq, "prompt": {"chunks": [{"tokens": [60, 61], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 3, "seed": 1},
    }  # fmt: skip
    promise, _ = talk.desk.asample(talk.owner, body)
    talk.run()
    return talk.result(promise)


def trained(talk: Talk, count: int = 2, **more: Any) -> list[str]:
    session = talk.session()
    models = [talk.model(session, number, use_dora=bool(number), **more) for number in range(count)]
    for model in models:
        for step in range(2):
            talk.forward_backward(model, [datum(step, 90)])
            talk.step(model, 3e-2)
    talk.run()
    return models


def test_a_wrong_sampler_is_refused_and_its_neighbour_is_not(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    bad, good = trained(talk)
    first, second = sampler_of(talk, bad), sampler_of(talk, good)
    original, spoilt = (
        samplers.read_folder,
        talk.service.journal.one("select folder from samplers where id = ?", first),
    )
    assert spoilt is not None

    def read(folder: Path, adapter: Any, optimizer: bool) -> Values:
        found = original(folder, adapter, optimizer)
        wrong = 1.5 if folder.name == spoilt["folder"] else 1.0
        return Values({name: own * wrong for name, own in found.parameters.items()})

    monkeypatch.setattr(samplers, "read_folder", read)
    for seq in range(2):
        found = sampled(talk, first, seq)
        assert "sampler and the trainer differ by" in found["error"] and found["category"] == "server"
        assert len(sampled(talk, second, seq).sequences[0].tokens) == 3 * 4
    talk.step(bad)
    promise = talk.forward_backward(bad, [datum(5, 20)], only=True)
    talk.run()
    assert talk.result(promise)[0]["tokens:sum"] == 20, "its training goes on"
    monkeypatch.undo()
    again = sampler_of(talk, bad)
    assert len(sampled(talk, again).sequences[0].tokens) == 3 * 4
    leave(talk.service)


def test_a_file_that_was_changed_on_the_disk_is_refused_after_a_restart(host: Host, tmp_path: Path) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    (model,) = trained(talk, 1)
    right, wrong = sampler_of(talk, model), sampler_of(talk, model)
    row = talk.service.journal.one("select folder from samplers where id = ?", wrong)
    assert row is not None
    leave(talk.service)
    talk.service.journal.close()
    file = tmp_path / "samplers" / row["folder"] / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(own for own in tensors if own.endswith("lora_B.weight"))
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, file)
    talk = Talk(Service({NAME: host}, tmp_path))
    assert "which is more than rounding" in sampled(talk, wrong)["error"]
    assert len(sampled(talk, right).sequences[0].tokens) == 3 * 4
    leave(talk.service)


def test_snapshots_pass_whatever_their_model_has_become(host: Host, tmp_path: Path) -> None:
    """Before any row, after rows of one token, with a gradient that has not stepped, and behind later steps."""
    talk = Talk(Service({NAME: host}, tmp_path))
    fresh = talk.model(talk.session(), init_lora_weights=False)
    found = [sampler_of(talk, fresh)]
    talk.forward_backward(fresh, [datum(1, 1)])
    talk.forward_backward(fresh, [datum(1, 200)])
    found.append(sampler_of(talk, fresh))
    talk.step(fresh, 0.1)
    talk.run()
    assert all("error" not in str(sampled(talk, sampler)) for sampler in found)
    leave(talk.service)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_on_a_gpu_rounding_passes_and_a_missing_adapter_does_not(
    tmp_path: Path, tokenizer: Any, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=512, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run = run_of(str(tmp_path / "base"), ["device=cuda", f"dtype={dtype}"], None, tmp_path)
    (tmp_path / "state").mkdir()
    talk = Talk(Service({NAME: Host(NAME, run, 512)}, tmp_path / "state"))
    drifts, original = list[float](), Scored.why_apart

    def why_apart(own: Scored, sampler: Any, kind: torch.dtype) -> str | None:
        drifts.append(drift_of(own.logprobs, sampler))
        return original(own, sampler, kind)

    monkeypatch.setattr(Scored, "why_apart", why_apart)
    models = trained(talk, init_lora_weights=False)  # the first steps of float16 may be skipped
    for model in [*models, talk.model(talk.session("fresh"), use_dora=True)]:
        assert "error" not in str(sampled(talk, sampler_of(talk, model)))
    monkeypatch.setattr(Host, "take", lambda *values: None)
    for model in models:
        assert "which is more than rounding" in sampled(talk, sampler_of(talk, model))["error"]
    print(f"mean differences of log-probabilities, {dtype}: {', '.join(f'{own:.3g}' for own in drifts)}")
    leave(talk.service)


def test_samples_that_fail_are_refused_and_the_next_ones_are_drawn(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that finds no memory, for the proof of a snapshot or for samples: the service goes on."""
    talk = Talk(Service({NAME: host}, tmp_path))
    (model,) = trained(talk, 1)
    sampler = sampler_of(talk, model)
    original, fails = host.sampling.step, [True]

    def step() -> Any:
        if fails.pop():
            raise torch.OutOfMemoryError("for this test")
        return original()

    monkeypatch.setattr(host.sampling, "step", step)
    assert "for this test" in sampled(talk, sampler)["error"], "in the proof"
    fails[:] = [True, False]
    assert "for this test" in sampled(talk, sampler, 1)["error"], "in the samples"
    monkeypatch.undo()
    assert len(sampled(talk, sampler, 2).sequences[0].tokens) == 3 * 4
    leave(talk.service)


def test_a_sampler_of_a_base_that_is_not_served_now_is_refused_in_words(
    host: Host, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    """What waits of it too. It makes room for others as any, and is back with its base."""
    other = host_of(tiny_base("mistral"), tmp_path, name="other", budget=64)
    talk = Talk(Service({NAME: host, "other": other}, tmp_path))
    session = talk.session()
    of_base = talk.desk.create_sampling_session(
        talk.owner, {"session_id": session, "sampling_session_seq_id": 0, "base_model": "other"}
    )
    made = talk.desk.create_model(
        talk.owner, {"session_id": session, "model_seq_id": 9, "base_model": "other", "lora_config": {"rank": 4}}
    )
    gone = talk.result(made)["model_id"]
    old = sampler_of(talk, gone)
    talk.desk.unload(talk.owner, {"model_id": gone})
    talk.run()
    body = {"sampling_session_id": of_base, "seq_id": 0, "prompt": {"chunks": [{"tokens": [60, 61]}]}}
    waiting, _ = talk.desk.asample(talk.owner, body)
    leave(talk.service)
    talk.service.journal.close()

    talk = Talk(Service({NAME: host}, tmp_path, Limits(samplers=1)))
    talk.run()
    assert "its base model is not served now" in talk.result(waiting)["error"]
    for sampler in (of_base, old):
        with pytest.raises(Refused, match=f"base_model: 'other' is not served; served are {NAME}"):
            sampled(talk, sampler, 1)
    own = sampler_of(talk, trained(talk, 1)[0])
    assert sampled(talk, own).sequences
    leave(talk.service)
    talk.service.journal.close()

    talk = Talk(Service({NAME: host, "other": other}, tmp_path))
    assert sampled(talk, of_base, 2).sequences
    with pytest.raises(Refused, match="is over"):
        sampled(talk, old, 2)
    leave(talk.service)


def test_weights_of_samplers_that_are_over_leave_the_disk(host: Host, tmp_path: Path) -> None:
    """The one that was sampled longest ago makes room for a new one; a session's end and a restart leave none."""
    talk = Talk(Service({NAME: host}, tmp_path, Limits(samplers=2)))
    (model,) = trained(talk, 1)
    first, second = sampler_of(talk, model), sampler_of(talk, model)
    assert sampled(talk, first) and sampled(talk, second) and sampled(talk, first, 1)
    third = sampler_of(talk, model)
    assert sampled(talk, first, 2) and sampled(talk, third)
    with pytest.raises(Refused, match="is over"):
        sampled(talk, second, 1)
    folders = [folder.name for folder in (tmp_path / "samplers").iterdir()]
    assert len(folders) == 2 and len(talk.service.samplers._on[NAME].attached) == 2
    (tmp_path / "samplers" / "left").mkdir()
    (tmp_path / "models" / ".tmp-left").mkdir()
    (tmp_path / "checkpoints" / ".tmp-old-kept").mkdir()
    leave(talk.service)
    talk.service.journal.close()
    talk = Talk(Service({NAME: host}, tmp_path))
    assert sorted(folders) == sorted(folder.name for folder in (tmp_path / "samplers").iterdir())
    assert [own.name for own in (tmp_path / "models").iterdir()] == [
        talk.service.tenants[model].folder.name
    ] or not any((tmp_path / "models").iterdir())
    assert (tmp_path / "checkpoints" / "kept").is_dir(), "what a crash left under another name is back"
    assert sampled(talk, third, 1)
    talk.desk.finish_session(talk.owner, talk.session(), "success")
    talk.run()
    assert not list((tmp_path / "samplers").iterdir())
    leave(talk.service)


def test_who_asks_for_one_sample_does_not_wait_behind_hundreds_of_another(host: Host, tmp_path: Path) -> None:
    talks = [Talk(Service({NAME: host}, tmp_path), "busy")]
    talks.append(Talk(talks[0].service, "calm"))
    ended: list[str] = []
    original = samplers._finish

    def promised(talk: Talk, count: int) -> list[str]:
        session = talk.session(talk.owner)
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": NAME}
        sampler = talk.desk.create_sampling_session(talk.owner, opened)
        body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [60, 61], "type": "encoded_text"}]}}
        params = {"max_tokens": 5, "seed": 1, "stop": []}
        return [
            talk.desk.asample(talk.owner, {**body, "seq_id": seq, "sampling_params": params})[0] for seq in range(count)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            samplers, "_finish", lambda core, promise, found: ended.append(promise) or original(core, promise, found)
        )
        busy, (calm,) = promised(talks[0], 220), promised(talks[1], 1)
        talks[0].run()
    assert sorted(ended) == sorted([*busy, calm])
    assert ended.index(calm) < 3 * samplers.ROWS, "it waits for samples that run, and for none of those that wait"
    assert [own for own in ended if own != calm] == busy, "requests of one owner come in their order"
    leave(talks[0].service)


def test_a_refused_request_behind_one_that_has_not_come_keeps_no_sampler_of_its_model_waiting(
    host: Host, tmp_path: Path
) -> None:
    talk = Talk(Service({NAME: host}, tmp_path))
    (model,) = trained(talk, 1)
    sampler = sampler_of(talk, model, kind="inflight")
    with pytest.raises(Refused, match="beta1"):
        talk.step(model, seq=talk.seqs[model] + 2, beta1=2.0)
    body = {"sampling_session_id": sampler, "seq_id": 0, "sampling_params": {"max_tokens": 3}}
    body["prompt"] = {"chunks": [{"tokens": [60, 61], "type": "encoded_text"}]}
    promise, _ = talk.desk.asample(talk.owner, body)
    turns = sum(talk.service.turn() for _ in range(20))
    assert turns < 20 and len(talk.result(promise).sequences[0].tokens) == 3 * 4
    leave(talk.service)
