"""The public Tinker client, unchanged, against a service on a thread of this process."""

from __future__ import annotations

import runpy
import sys
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from serving import NAME, host_of, served
from transformers import AutoModelForCausalLM

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

IDS = list(range(60, 72))
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture(scope="module")
def client(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("serve")
    patch = pytest.MonkeyPatch()
    patch.setenv("TINKER_TELEMETRY", "0")
    with warnings.catch_warnings(), served(host_of(tiny_base("llama"), folder), folder / "state") as (url, _):
        warnings.simplefilter("ignore")
        with tinker.ServiceClient(base_url=url, api_key="tml-local") as found:
            yield found
    patch.undo()


def model(client: Any, **more: Any) -> Any:
    return client.create_lora_training_client(**({"base_model": NAME, "rank": 4, "seed": 1} | more)).result()


def datum(ids: list[int] = IDS, **inputs: Any) -> Any:
    own = {"target_tokens": ids[1:], **(inputs or {"weights": [1.0] * (len(ids) - 1)})}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=own)


def test_a_model_learns_is_saved_loaded_downloaded_and_sampled(
    client: Any, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    own = model(client)
    futures = []
    for _ in range(6):
        futures += [own.forward_backward([datum(), datum()], "cross_entropy"), own.optim_step(ADAM)]
    losses = [future.result().metrics["loss:sum"] for future in futures[::2]]
    assert losses[-1] < 0.2 * losses[0] and futures[-1].result().metrics["step"] == 6
    saved = own.save_state("first").result().path
    with pytest.raises(tinker.RequestFailedError, match="already"):
        own.save_state("first").result()
    before = own.forward([datum()], "cross_entropy").result().metrics["loss:sum"]
    again = client.create_training_client_from_state_with_optimizer(saved).result()
    assert again.forward([datum()], "cross_entropy").result().metrics["loss:sum"] == before
    for each in (own, again):
        each.forward_backward([datum()], "cross_entropy")
        each.optim_step(ADAM)
    after = [each.forward([datum()], "cross_entropy").result().metrics for each in (own, again)]
    assert after[0] == after[1]
    own.load_state(saved).result()
    assert own.forward([datum()], "cross_entropy").result().metrics["loss:sum"] == before

    rest = client.create_rest_client()
    external = own.save_weights_external("out").result().path
    urls = rest.get_external_weights_urls(external).result().urls
    assert len(urls) == 2
    for file, url in urls.items():
        (tmp_path / file).write_bytes(urllib.request.urlopen(url).read())
    sampler = own.save_weights_and_get_sampling_client("now")
    found = sampler.compute_logprobs(types.ModelInput.from_ints(IDS)).result()
    assert found[0] is None and -sum(found[1:]) == pytest.approx(before, rel=1e-4)
    params = types.SamplingParams(max_tokens=8, temperature=0.0)
    out = sampler.sample(prompt=types.ModelInput.from_ints(IDS[:3]), num_samples=2, sampling_params=params).result()
    assert [one.tokens for one in out.sequences] == [IDS[3:11]] * 2, "it has learnt them"
    base = AutoModelForCausalLM.from_pretrained(tiny_base("llama"))
    theirs = PeftModel.from_pretrained(base, str(tmp_path))
    with torch.no_grad():
        logp = theirs(input_ids=torch.tensor([IDS[:-1]])).logits[0].log_softmax(-1)
    assert -logp.gather(1, torch.tensor(IDS[1:])[:, None]).sum() == pytest.approx(before, rel=1e-4)
    listed = [one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints]
    assert saved in listed


def test_losses_of_the_protocol_have_the_values_of_their_formulas(client: Any) -> None:
    own, n = model(client), len(IDS) - 1
    logp = np.array(own.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data, np.float64)
    sampled, gains = logp + np.linspace(-0.5, 0.5, n), np.linspace(-1, 1, n)
    ratio = np.exp(logp - sampled)
    clipped = ratio.clip(0.9, 1.1)
    rows = [datum(logprobs=sampled.tolist(), advantages=gains.tolist())]
    bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    want = {
        "importance_sampling": (None, -(ratio * gains).sum()),
        "ppo": (bounds, -np.minimum(ratio * gains, clipped * gains).sum()),
        "cispo": (bounds, -(clipped * logp * gains).sum()),
        "dro": ({"beta": 0.1}, -(logp * gains - 0.05 * (logp - sampled) ** 2).sum()),
    }
    for name, (config, value) in want.items():
        found = own.forward_backward(rows, name, config).result().metrics["loss:sum"]
        assert found == pytest.approx(value, rel=1e-4), name
    soft = types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.tile([5, 6, 7], (n, 1))),
            "weights": types.TensorData.from_numpy(np.full((n, 3), 1 / 3, np.float32)),
        },
    )
    result = own.forward_backward([soft, soft], "cross_entropy").result()
    assert result.loss_fn_outputs[1]["logprobs"].shape == [n, 3]
    assert result.metrics["loss:sum"] == pytest.approx(
        -2 / 3 * sum(result.loss_fn_outputs[0]["logprobs"].data), rel=1e-5
    )
    assert own.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_custom_loss_runs_by_signed_weights(client: Any) -> None:
    def squares(data: Any, logprobs: Any) -> Any:
        return sum((own**2).sum() for own in logprobs), {"mine": 3.0}

    own = model(client)
    result = own.forward_backward_custom([datum(), datum()], squares).result()
    assert result.metrics["mine"] == 3.0
    assert own.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_what_is_not_served_is_refused_in_words_and_the_client_goes_on(client: Any) -> None:
    own = model(client)
    refused, step = own.forward_backward([datum()], "stable_reinforce"), own.optim_step(ADAM)
    with pytest.raises(tinker.RequestFailedError, match="importance_sampling") as error:
        refused.result()
    assert error.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="forward_backward 1 before it failed"):
        step.result()
    assert own.forward([datum()], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="vocabulary"):
        own.forward_backward([datum([70, 71, 4000, 5])], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="served are"):
        model(client, base_model="no/such")
    with pytest.raises(tinker.BadRequestError, match="rank"):
        model(client, rank=100000)


def test_the_last_tokens_of_a_prompt_are_scored_and_no_others(client: Any) -> None:
    sampler = model(client).save_weights_and_get_sampling_client().result()

    def ask(last: int | None) -> Any:
        params, prompt = types.SamplingParams(max_tokens=1, seed=1), types.ModelInput.from_ints(IDS)
        more = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "prompt_logprobs_last_n": last}
        return sampler.sample(prompt=prompt, num_samples=1, sampling_params=params, **more).result()

    part, whole = ask(3), ask(None)
    none = [None] * (len(IDS) - 3)
    assert part.prompt_logprobs == none + whole.prompt_logprobs[-3:]
    assert (
        part.topk_prompt_logprobs == none + whole.topk_prompt_logprobs[-3:]
        and None not in whole.topk_prompt_logprobs[1:]
    )
    with pytest.raises(tinker.BadRequestError, match="prompt_logprobs_last_n: 12 is no whole number from 1 to 11"):
        ask(len(IDS))


def test_metadata_of_any_kind_is_listed_as_the_client_reads_it(client: Any) -> None:
    with tinker.ServiceClient(
        base_url=client.holder._base_url, api_key="tml-local",
        user_metadata={"run": "exp-7", "seed": 3, "tags": ["a"]},
    ) as other:  # fmt: skip
        own = model(other, user_metadata={"packlora": {"lora_alpha": 8}})
        rest, (session, _, _) = other.create_rest_client(), own.model_id.partition(":")
        assert rest.get_session(session).result().user_metadata == {"run": "exp-7", "seed": "3", "tags": '["a"]'}
        path = own.save_state("first").result().path
        (run,) = (
            one for one in rest.list_training_runs().result().training_runs if one.training_run_id == own.model_id
        )
        assert run.user_metadata == {"packlora": '{"lora_alpha": 8}'} and run.last_checkpoint.tinker_path == path
        assert own.get_info().optimizer_config == rest.get_weights_info_by_tinker_path(path).result().optimizer_config


def test_a_search_finds_the_sessions_that_match_page_by_page(client: Any) -> None:
    address = client.holder._base_url
    ids = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (name, end) in enumerate((("a red one", "success"), ("Red two", "errored"), ("blue", None))):
            own = tinker.ServiceClient(
                base_url=address, api_key="tml-search", display_name=name, user_metadata={"kind": "x", "n": number}
            )
            ids[own.holder.get_session_id()] = name
            if end is not None:
                own.close(end).result()
        rest = tinker.RestClient(base_url=address, api_key="tml-search")

        def names(**query: Any) -> tuple[list[str], Any]:
            page = rest.search_sessions(types.SessionSearchRequest(**query)).result()
            return [ids[one.session_id] for one in page.sessions], page.next_cursor

        assert names() == (["blue", "Red two", "a red one"], None)
        assert names(user_metadata={"kind": "x", "n": "1"})[0] == ["Red two"] and not names(user_metadata={"n": "7"})[0]
        assert names(display_name="RED one")[0] == ["a red one"]
        assert names(display_name="red", session_id=next(iter(ids)))[0] == ["Red two", "a red one"]
        assert names(statuses=[{"type": "active"}])[0] == ["blue"]
        assert names(statuses=[{"type": "client_finished", "reasons": ["success"]}, {"type": "failed"}])[0] == [
            "a red one"
        ]
        first, cursor = names(limit=2)
        assert first == ["blue", "Red two"] and names(limit=2, cursor=cursor) == (["a red one"], None)
        with pytest.raises(tinker.BadRequestError, match="project_ids"):
            names(project_ids=["other"])
        with pytest.raises(tinker.BadRequestError, match="cursor"):
            names(cursor={"last_session_id": "other", "last_created_at": cursor.last_created_at})


def test_the_example_that_learns_from_a_rule_runs(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tinker, "ServiceClient", lambda: client)
    monkeypatch.setattr(sys, "argv", ["tinker_rl.py", NAME, "2"])
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tinker_rl.py"))
    out = capsys.readouterr().out
    assert "2 mean reward" in out and "tinker://" in out
