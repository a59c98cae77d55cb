"""A base model that is cut over two processes: what models and samples have there they have on one process."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import served_cut
import torch
from forked import Forks
from peft import PeftModel
from ranks import Ranks
from safetensors.torch import load_file
from served_ranks import NAME, Process, client_of, forks_of, story
from serving import Talk, datum, host_of, leave, served
from transformers import AutoModelForCausalLM

import packlora
from packlora.config import Run
from packlora.errors import InputError
from packlora.parallel.alone import ALONE
from packlora.serve.command import listening
from packlora.serve.errors import Refused
from packlora.serve.group.host import GroupHost
from packlora.serve.group.leader import GroupService
from packlora.serve.group.together import together
from packlora.serve.host import run_of
from packlora.serve.ranks.meeting import Place, place_of
from packlora.serve.service import Service

pytest.importorskip("tinker")


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks | None]:
    with forks_of(tmp_path_factory.mktemp("forks"), "packlora.serve.group.leader") as forks:
        yield forks


def test_models_and_samples_of_a_base_that_is_cut_are_those_of_one_process_which_goes_on(
    ranks: Callable[[int], Ranks], tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    base, states = tiny_base("llama"), [tmp_path / name for name in ("one", "two")]
    for state in states:
        state.mkdir()
    one = host_of(base, states[0], "dtype=float64", budget=64)
    talk = Talk(Service({NAME: one}, states[0]))
    want, _ = served_cut.whole(talk)
    end(talk)
    found = ranks(2).run(served_cut.told, 2, base, states[1])[0]
    assert "no memory for another adapter" in found.pop("large")
    said = (
        "user_metadata.packlora.init_lora_weights: olora needs whole weights, and this service has cut its base model "
    )
    assert [text.startswith(said) for text in found.pop("refused")] == [True, True]
    same(found, want)
    after = []
    for state in states:  # one process goes on with what two have left, snapshots and requests since then
        talk = Talk(Service({NAME: one}, state))
        np.testing.assert_allclose(found["scores"], scores_of_peft(base, folder_of(talk, "end")), rtol=1e-6)
        trained = by_train(base, folder_of(talk, "start"), state / "train")
        assert max(float((trained[key] - own).abs().max()) for key, own in found["tensors"][0].items()) < 1e-10
        story = served_cut.Story(talk)
        story.learn(range(4, 5))
        after.append(story.end("after"))
        end(talk)
    same(*after)


def folder_of(talk: Talk, name: str) -> str:
    """Folder of a checkpoint of the first model."""
    path = talk.service.journal.one("select path from checkpoints where name = ? order by model", name)
    assert path is not None
    return str(talk.service.stores.checkpoint(path["path"]))


def by_train(base: str, start: str, out: Path) -> dict[str, torch.Tensor]:
    """The first model as `packlora.train` trains it on one process: four steps on all of its rows."""
    out.mkdir()
    data = out / "rows.jsonl"
    ids = [[int(row.ids[0]), *row.inputs["target_tokens"].tolist()] for row in served_cut.rows(0, 0)]
    data.write_text("".join(json.dumps({"input_ids": own}) + "\n" for own in ids))
    train = {
        "global_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "warmup_ratio": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_epsilon": 1e-12, "weight_decay": 0.1, "max_grad_norm": 0.5,
    }  # fmt: skip
    job = {"name": "alone", "data": {"path": str(data)}, "adapter": {"init_from": start}, "train": train}
    run = {
        "base_model": base, "dtype": "float64", "device": "cpu", "max_tokens_per_microbatch": 64,
        "output_dir": str(out / "run"), "jobs": [job],
    }  # fmt: skip
    packlora.train(Run.model_validate(run))
    return load_file(out / "run" / "alone" / "adapter_model.safetensors")


def scores_of_peft(base: str, folder: str) -> np.ndarray:
    """Log-probabilities of the prompt by an adapter folder, as PEFT loads it."""
    torch.set_default_dtype(torch.float64)
    try:
        model: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64),
            folder, autocast_adapter_dtype=False,
        )  # fmt: skip
        ids = torch.tensor(served_cut.PROMPT)
        logp = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    finally:
        torch.set_default_dtype(torch.float32)
    return logp.detach().numpy()


def test_a_rank_that_runs_out_of_memory_ends_the_service_with_its_reason(
    ranks: Callable[[int], Ranks], tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    said = ranks(2).run(served_cut.failing, tiny_base("llama"), tmp_path)
    ranks(2).close()  # one of them waits for ever
    assert re.fullmatch(
        r"rank 1 \(process \d+, cpu\) has failed: out of memory on cpu in a microbatch of 60 tokens; start again, and .*",
        said[0],
    )
    assert said[1] == "out of memory on cpu in a microbatch of 60 tokens"


def test_an_error_of_rank_0_while_all_compute_ends_the_service(
    tiny_base: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of(tiny_base("llama"), tmp_path, budget=64)
    talk, ends = Talk(GroupService({NAME: host}, tmp_path, [])), list[int]()  # type: ignore[dict-item]
    talk.service.on_failure = lambda: ends.append(1)

    def evaluate(parts: Any) -> None:
        with together():
            raise ValueError("a defect")

    monkeypatch.setattr(host, "evaluate", evaluate)
    promise = talk.forward_backward(talk.model(talk.session()), [datum(1, 9)], only=True)
    talk.service._run()
    said = "rank 0 has failed: ValueError: a defect; start again, and the service goes on"
    assert str(talk.service.failure) == said and ends and talk.service.status()["failure"].endswith(said)
    assert talk.service.stop() == 1 and promise
    leave(talk.service)

    def spec_of(wanted: Any) -> None:
        raise Refused("it needs whole weights")

    monkeypatch.setattr(host, "spec_of", spec_of)
    with pytest.raises(InputError, match="it has a model that cannot go on: it needs whole weights"):
        GroupService({NAME: host}, tmp_path, [])  # type: ignore[dict-item]


def same(found: dict[str, Any], want: dict[str, Any]) -> None:
    assert len(found["results"]) == len(want["results"]) and found["scores"] == pytest.approx(want["scores"], rel=1e-6)
    for own, theirs in zip(found["results"], want["results"], strict=True):
        close(own, theirs)
    for own, theirs in zip(found["tensors"], want["tensors"], strict=True):
        assert own.keys() == theirs.keys()
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-10, atol=1e-12)


def close(found: Any, want: Any) -> None:
    """Numbers are alike to 1e-10, those that the protocol has in float32 to its rounding; all else is the same."""
    if isinstance(want, dict):
        assert found.keys() == want.keys()
        for key, own in want.items():
            close(found[key], own)
    elif isinstance(want, list | tuple):
        assert len(found) == len(want)
        for own, theirs in zip(found, want, strict=True):
            close(own, theirs)
    elif isinstance(want, float):
        in_float32 = float(np.float32(want)) == want
        assert found == pytest.approx(want, rel=1e-6 if in_float32 else 1e-10, abs=1e-12)
    else:
        assert found == want


def end(talk: Talk) -> None:
    leave(talk.service)
    talk.service.journal.close()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("cuda_graphs=true", r"--set cuda_graphs=true is not served with parallel\.tensor"),
        ("offload_embedding=true", r"--set offload_embedding=true does not go with parallel\.tensor"),
        ("quantization=nf4", r"parallel\.tensor does not take quantised layers apart"),
    ],
)
def test_keys_that_a_base_that_is_cut_does_not_take_are_refused(
    setting: str, said: str, tiny_base: Callable[[str], str], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        GroupHost(NAME, run_of(tiny_base("llama"), ["device=cpu", setting], None, tmp_path, 2), 256, ALONE)  # type: ignore[arg-type]


def test_what_is_not_served_of_a_base_that_is_cut_is_refused() -> None:
    two = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    place = place_of(two, ["parallel.tensor=2", "device=cpu"])
    assert place == Place(1, 2, 1, 2) and place.settings(["parallel.tensor=2", "device=cpu"]) == ["device=cpu"]
    assert place_of(two, ["parallel.tensor=1"]).tensor == 1
    with pytest.raises(InputError, match=r"parallel\.tensor=3: 2 processes were started, .* give parallel\.tensor=2"):
        place_of(two, ["parallel.tensor=3"])
    with pytest.raises(InputError, match=r"parallel\.tensor=2: 1 process was started, .* torchrun"):
        place_of({}, ["parallel.tensor=2"])
    with pytest.raises(
        InputError, match=r"parallel\.pipeline=2: parallel\.pipeline is not served; .* parallel\.tensor is"
    ):
        place_of(two, ["parallel.tensor=2", "parallel.pipeline=2"])


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_service_which_goes_on_with_nothing_lost(
    tiny_base: Callable[[str], str], forks: Forks | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    base, state = tiny_base("llama"), tmp_path / "state"
    words = ["--base", f"{NAME}={base}", "--state", str(state), "--set", "device=cpu", "--set", "dtype=float64"]
    cut = [*words, "--set", "parallel.tensor=2"]
    free = listening("127.0.0.1", 0)
    port = free.getsockname()[1]
    free.close()
    two = Process(forks, 2, cut, port, tmp_path / "two")
    running = [two]

    def kill() -> None:
        assert two.status["models"] == 2 and len(two.status["ranks"]) == 2
        two.kill(1)
        assert two.process.wait(60) == 1
        running.append(Process(forks, 2, cut, port, tmp_path / "again"))

    try:
        two.wait()
        with client_of(two.url) as client:
            found = story(client, kill)
    finally:
        for process in running:
            process.end()
    assert "rank 1 (process " in two.said and "has ended without a word, as a process that was killed does" in two.said
    assert "stopped; nothing waits" in running[1].said and "rank 1" not in running[1].said
    with served(host_of(base, tmp_path, "dtype=float64"), tmp_path / "one") as (url, _), client_of(url) as client:
        want = story(client)
    np.testing.assert_allclose(found["losses"], want["losses"], rtol=1e-10)
    for (tokens, logprobs), (own, theirs) in zip(found["sampled"], want["sampled"], strict=True):
        assert tokens == own
        np.testing.assert_allclose(logprobs, theirs, rtol=1e-6)
