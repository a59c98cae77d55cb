"""Memory that runs out in the steps of a slot, in the service: no rows are counted twice, and no half of a step is gone on
with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving import NAME, Talk, datum, host, leave

from packlora.engine import adapters
from packlora.engine.optimizer import FlatAdamW
from packlora.serve.host import Host
from packlora.serve.service import Service

__all__ = ["host"]
PLACES = {"moments": (FlatAdamW, "_made"), "a step": (FlatAdamW, "ready"), "its numbers": (adapters, "widened")}
"""Where memory runs out: before anything of a step has changed, and after."""


class Lack:
    """Memory that runs out in so many calls of a function, after as many as pass."""

    def __init__(self, patched: pytest.MonkeyPatch, owner: Any, name: str, passes: int, lacks: int) -> None:
        self.left = 0
        original, calls = getattr(owner, name), list[int]()

        def call(*args: Any) -> Any:
            calls.append(1)
            if passes < len(calls) <= passes + lacks:
                self.left += 1
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return original(*args)

        patched.setattr(owner, name, call)


def lives(host: Host, folder: Path, models: int, lost: int | None = None) -> tuple[Talk, list[str], list[list[Any]]]:
    """Models that take three steps, each with the rows of the slot before; `lost` is the step that none sends."""
    folder.mkdir()
    talk = Talk(Service({NAME: host}, folder))
    session = talk.session()
    names = [talk.model(session, number, seed=1 + number) for number in range(models)]
    promises: list[list[Any]] = []
    for step in range(3):
        if step == lost:
            continue
        sent = [talk.forward_backward(names[0], [datum(9 * step, 40), datum(9 * step + 1, 40)])]
        for name in names[1:]:
            sent += [talk.forward_backward(name, [datum(9 * step + number, 9)]) for number in (2, 3)]
        promises.append(sent + [talk.step(name) for name in names])
        talk.run()
    return talk, names, promises


def results(talk: Talk, promises: list[Any]) -> list[Any]:
    found = [talk.result(promise) for promise in promises]
    return [own if isinstance(own, dict) else (own[0], own[1].tolist()) for own in found]


@pytest.mark.parametrize("passes", [0, 1, 3])
@pytest.mark.parametrize("place", PLACES)
def test_memory_that_runs_out_twice_in_a_slot_of_several_models_changes_no_bit(
    place: str, passes: int, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, names, sent = lives(host, tmp_path / "whole", 2)
    want = [whole.tensors(name) for name in names], [results(whole, own) for own in sent]
    leave(whole.service)
    with monkeypatch.context() as patched:
        lack = Lack(patched, *PLACES[place], passes, 2)
        talk, names, sent = lives(host, tmp_path / "short", 2)
    assert lack.left == 2
    got = [talk.tensors(name) for name in names], [results(talk, own) for own in sent]
    assert got[1] == want[1]
    for own, other in zip(got[0], want[0], strict=True):
        assert all(torch.equal(own[key], other[key]) for key in other)
    leave(talk.service)


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_finds_no_memory_is_refused_and_leaves_its_model_as_it_was(
    place: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, (name,), _ = lives(host, tmp_path / "whole", 1, lost=0)
    want = whole.tensors(name)
    leave(whole.service)
    with monkeypatch.context() as patched:
        Lack(patched, *PLACES[place], 0, 2)
        talk, (name,), sent = lives(host, tmp_path / "short", 1)
    rows, step = (talk.result(promise) for promise in sent[0])
    assert "out of memory" in rows["error"] and "before it failed" in step["error"], (rows, step)
    got = talk.tensors(name)
    assert all(torch.equal(got[key], want[key]) for key in want)
    leave(talk.service)
