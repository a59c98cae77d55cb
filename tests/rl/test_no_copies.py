"""The sampler and the trainer of a run that learns from rewards have the same weights in the same places."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from test_rollouts import files, job, tree
from test_training import steps, train

from benchmarks.unmoved import Unmoved, watched
from packlora.engine.generate import sampler_for
from packlora.rl.changes import RolloutChanges
from packlora.rl.drawing import Drawing

assert callable(files)  # a fixture


def seen_of(base: str, out: Path, *jobs: dict[str, Any]) -> Unmoved:
    """A run, watched."""
    with watched() as seen:
        train(tree(base, out, *jobs))
    return seen


def test_no_weights_are_copied_merged_or_loaded_between_trainer_and_sampler(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path
) -> None:
    jobs = job("brief", files, max_steps=2), job("foxes", files, "later", 2, beta=0.1, max_staleness=1, max_steps=2)
    seen = seen_of(tiny_base("llama"), tmp_path / "out", *jobs)
    assert seen.moved == [] and seen.samplers == 1 and seen.looks >= 2 * 2 + 1
    assert len(steps(tmp_path / "out")) == 4


def merge(changes: RolloutChanges) -> None:
    weight = next(iter(changes.base.model.parameters()))
    weight.data = weight.data + 0.1


def add_and_subtract(changes: RolloutChanges) -> None:
    """As merging and unmerging in place, unseen by versions."""
    next(iter(changes.base.model.parameters())).data.add_(0.1).sub_(0.1)


def copy_adapter(changes: RolloutChanges) -> None:
    changes.jobs[0].adapter.flat = changes.jobs[0].adapter.flat.clone()


def replace_in_layer(changes: RolloutChanges) -> None:
    adapter, layers = changes.jobs[0].adapter, dict(changes.base.model.named_modules())
    path = next(iter(adapter.weights))
    layers[path].adapters[adapter.number] = copy.copy(adapter.weights[path])  # type: ignore[index, operator]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (merge, "base model.embed_tokens.weight is elsewhere or was written"),
        (add_and_subtract, "model.embed_tokens.weight has other bits"),
        (copy_adapter, "brief is elsewhere or was written"),
        (replace_in_layer, "q_proj is not the trainer's"),
        (None, "LlamaForCausalLM was loaded beside the base model"),
    ],
)
def test_weights_that_move_are_seen(
    fault: Callable[[RolloutChanges], None] | None, said: str, files: tuple[str, str], tiny_base: Callable[..., str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    base, run, kept = tiny_base("llama"), RolloutChanges._run, list[Any]()

    def faulty(self: RolloutChanges, *args: Any, **more: Any) -> None:
        run(self, *args, **more)
        if fault is None:
            kept.append(transformers.AutoModelForCausalLM.from_pretrained(base))
        elif self.jobs:
            fault(self)

    monkeypatch.setattr(RolloutChanges, "_run", faulty)
    seen = seen_of(base, tmp_path / "out", job("brief", files, max_steps=1))
    assert any(one.endswith(said) for one in seen.moved), seen.moved


def test_a_sampler_of_another_model_is_seen(
    files: tuple[str, str], tiny_base: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(self: Drawing) -> Any:
        model = copy.copy(self.base.model)
        return sampler_for(model, self.single.attached, self.base.tokenizer)[0]

    monkeypatch.setattr(Drawing, "sampler", other)
    seen = seen_of(tiny_base("llama"), tmp_path / "out", job("brief", files, max_steps=1))
    assert "the sampler's model is not the trainer's" in seen.moved
