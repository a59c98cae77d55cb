"""Checkpoints that are loaded into a model: what would be another function there is refused, what may be read is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import NAME, Talk, datum, host, host_of, leave

from packlora.serve.errors import Refused
from packlora.serve.host import Host
from packlora.serve.service import Service

__all__ = ["host"]
OTHER = "another"
ROWS = [datum(1, 30)]


@pytest.fixture
def talk(host: Host, tiny_base: Callable[[str], str], tmp_path: Path) -> Iterator[Talk]:
    hosts = {NAME: host, OTHER: host_of(tiny_base("mistral"), tmp_path, name=OTHER, budget=64)}
    found = Talk(Service(hosts, tmp_path))
    yield found
    leave(found.service)


def saved(talk: Talk) -> tuple[str, np.ndarray]:
    """A checkpoint of a model that was trained, and its log-probabilities."""
    model = talk.model(talk.session("source"))
    for _ in range(3):
        talk.forward_backward(model, ROWS)
        talk.step(model, 3e-2)
    scored, promise = talk.forward_backward(model, ROWS, only=True), talk.call(model, "save_weights", path="source")
    talk.run()
    return talk.result(promise)["path"], talk.result(scored)[1]


def loaded(talk: Talk, model: str, path: str) -> Any:
    """Log-probabilities of a model that has loaded a checkpoint."""
    promise = talk.call(model, "load_weights", path=path, optimizer=True)
    scored = talk.forward_backward(model, ROWS, only=True)
    talk.run()
    assert talk.result(promise)["path"] == path
    return talk.result(scored)[1]


def on(talk: Talk, base: str, number: int) -> str:
    """A model on a base."""
    body = {
        "session_id": talk.session(), "model_seq_id": number, "base_model": base,
        "lora_config": {"rank": 4, "seed": 1, "train_unembed": False},
    }  # fmt: skip
    return str(talk.result(talk.desk.create_model(talk.owner, body))["model_id"])


def test_a_checkpoint_of_another_scaling_or_base_is_refused_and_one_of_the_same_function_is_not(talk: Talk) -> None:
    path, before = saved(talk)
    session = talk.session()
    for number, (words, own) in enumerate(
        {
            "by 8, and the model by 4": {"lora_alpha": 16},
            "by 8, and the model by 16": {"use_rslora": True},
            "q_proj by 8, and the model by 0.5": {"alpha_pattern": {"q_proj": 2}},
        }.items()
    ):
        with pytest.raises(Refused, match=f"path: the checkpoint scales .*{words}.*create_training_client_from_state"):
            loaded(talk, talk.model(session, number, **own), path)
    with pytest.raises(Refused, match=f"path: the checkpoint is of {NAME}, and the model of {OTHER}"):
        loaded(talk, on(talk, OTHER, 10), path)
    for number, same in enumerate(({}, {"lora_dropout": 0.5}, {"use_rslora": True, "lora_alpha": 16}), 20):
        np.testing.assert_array_equal(loaded(talk, talk.model(session, number, **same), path), before)


def test_a_model_begins_with_a_checkpoint_that_save_state_has_made_and_with_no_other(talk: Talk) -> None:
    model = talk.model(talk.session())
    for call, kind in (("save_weights_for_sampler", "sampler_weights"), ("save_weights_external", "external_weights")):
        promise = talk.call(model, call, path="one")
        talk.run()
        body = {"session_id": talk.session(), "model_seq_id": 1, "path": talk.result(promise)["path"]}
        with pytest.raises(Refused, match=f"is of {kind}; load a checkpoint of weights"):
            talk.desk.load_as_new(talk.owner, body)


def test_a_public_checkpoint_is_loaded_by_another_owner_and_a_private_one_is_not(talk: Talk) -> None:
    path, before = saved(talk)
    other = Talk(talk.service, "another owner")
    model = other.model(other.session("their"))
    with pytest.raises(Refused, match="there is no checkpoint"):
        loaded(other, model, path)
    with talk.service.journal.write() as db:
        db.execute("update checkpoints set public = 1")
    np.testing.assert_array_equal(loaded(other, model, path), before)
