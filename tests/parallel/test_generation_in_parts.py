"""sample_prompts of a base model that several processes hold together: the texts of one device at every evaluation; no hang."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import rows_into
from ranks import Ranks
from test_replicas import on_ranks
from test_sample_prompts import adapters, lines, texts, trees

import packlora
from packlora.events import Event, Sampled, Stop
from packlora.runtime.sampling import Sampler

Groups = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def tree(tiny_base: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("generation")
    return trees(tiny_base("llama"), rows_into(folder), folder)("whole")


@pytest.fixture(scope="module")
def whole(tree: dict[str, Any]) -> Path:
    """The run on one device."""
    packlora.train(tree)
    return Path(tree["output_dir"])


def soak(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.soak)


def stopped_at_a_text(rank: int, tree: dict[str, Any], options: dict[str, Any]) -> str:
    """A run that is asked to end while a job's texts are generated; the asking comes from the first process alone."""

    def stop(event: Event) -> Stop | None:
        return Stop() if isinstance(event, Sampled) and event.step == 2 else None

    return packlora.train(tree, subscribers=[stop], **options).status


@pytest.mark.parametrize(
    ("processes", "parallel"),
    [
        (2, {"pipeline": 2}),
        soak(2, {"tensor": 2, "sequence_parallel": True}),
        soak(2, {"shard_base": True}),
    ],
    ids=str,
)
def test_texts_are_those_of_one_device_also_of_a_run_that_was_stopped(
    processes: int, parallel: dict[str, Any], tree: dict[str, Any], whole: Path, ranks: Groups, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = {**tree, "output_dir": str(out), "parallel": parallel}
    assert set(ranks(processes).run(stopped_at_a_text, asked, {})) == {"interrupted"}
    assert 0 < len(texts(out)) < len(texts(whole))
    assert {status for status, *_ in ranks(processes).run(on_ranks, asked, {"resume": True})} == {"done"}
    assert texts(out) == texts(whole)
    assert texts(whole)["lora", 3] != texts(whole)["lora", 0]
    losses = [
        {(line["job"], line["step"]): line["eval_loss"] for line in lines(of, "evals.jsonl")} for of in (out, whole)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    ours, theirs = adapters(out), adapters(whole)
    assert all(
        torch.allclose(ours[key], theirs[key], rtol=1e-7, atol=1e-10) for key in theirs if "adapter_model" in key
    )


def failing(rank: int, tree: dict[str, Any], error: type[Exception]) -> str:
    """A run in which the second process fails while a text is generated."""
    original, count = Sampler._next, 0

    def _next(self: Sampler, *args: Any) -> list[int]:
        nonlocal count
        count += 1
        if rank == 1 and count == 3:
            raise error("a fault")
        return original(self, *args)

    with mock.patch.object(Sampler, "_next", _next):
        try:
            return packlora.train(tree).status
        except Exception as found:
            return f"{type(found).__name__}: {found}"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("parallel", "error", "said"),
    [
        ({"shard_base": True}, ValueError, "ValueError: a fault"),
        soak({"tensor": 2}, torch.OutOfMemoryError, "MemoryError: out of memory on cpu in the samples of job 'lora'"),
    ],
)
def test_a_process_that_fails_while_it_generates_ends_the_run_on_all(
    parallel: dict[str, Any], error: type[Exception], said: str, tree: dict[str, Any], tmp_path: Path
) -> None:
    asked = {**tree, "output_dir": str(tmp_path / "out"), "parallel": parallel | {"timeout_s": 5}}
    group = Ranks(2)
    try:
        first, second = group.run(failing, asked, error)
    finally:
        group.close()
    assert second.startswith(said)
    assert first.startswith(f"ProcessError: process 1 of 2 failed: {said}")
