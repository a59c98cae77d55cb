"""Learning rates and early ends are those of transformers, and what a schedule does not take is refused."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState

from packlora.config import TrainConfig
from packlora.errors import InputError
from packlora.run_file import run_from
from packlora.runtime.job import judged, learning_rates

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("constant", {}), ("constant_with_warmup", {}), ("linear", {}), ("cosine", {}), ("cosine", {"num_cycles": 1.5}),
    ("cosine_with_restarts", {"num_cycles": 3}), ("polynomial", {}), ("polynomial", {"lr_end": 1e-3, "power": 2}),
    ("inverse_sqrt", {}), ("inverse_sqrt", {"timescale": 7}), ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.3, "num_cycles": 0.25}), ("warmup_stable_decay", {"num_decay_steps": 5}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 3, "min_lr_ratio": 0.1, "warmup_type": "1-sqrt",
                             "decay_type": "linear"}),
]  # fmt: skip
STEPS = 17


@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 4}, {"warmup_ratio": 0.2}], ids=["none", "steps", "ratio"])
@pytest.mark.parametrize(("kind", "kwargs"), KINDS)
def test_learning_rates_are_transformers_s_step_by_step(
    kind: str, kwargs: dict[str, Any], warmup: dict[str, Any]
) -> None:
    if kind == "constant" and warmup:
        pytest.skip("refused")
    config = TrainConfig(lr_scheduler_type=kind, lr_scheduler_kwargs=kwargs, learning_rate=0.02, **warmup)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rates = learning_rates(config, STEPS)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    steps = {"warmup_steps": 4, "warmup_ratio": math.ceil(0.2 * STEPS)}.get(next(iter(warmup), ""), 0)
    schedule = transformers.get_scheduler(kind, optimizer, steps, STEPS, kwargs)
    for step in range(STEPS):
        assert rates(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-18)
        optimizer.step()
        schedule.step()
    assert rates(3) == rates(3), "a pure function of the step"


def test_a_warm_up_by_share_is_rounded_up_as_by_transformers(tmp_path: Any) -> None:
    for ratio in (0.0, 0.03, 0.1, 0.5, 0.99):
        ours = TrainConfig(warmup_ratio=ratio, lr_scheduler_type="linear")
        theirs = transformers.TrainingArguments(output_dir=str(tmp_path), warmup_steps=ratio)
        assert all(ours.warmup_of(steps) == theirs.get_warmup_steps(steps) for steps in range(1, 200))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"num_cycles": 1}},
         "lr_scheduler_kwargs has num_cycles: 1, which the schedule 'linear' does not take; its keys: none"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"powr": 1}}, "its keys: lr_end, power"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 0}}, "power: 0; it is a number from 1e-06"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "2"}}, "power: '2'; it is a number from"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": math.nan}}, "power: nan; it is a number"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": True}}, "power: True; it is a number"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}, "lr_end: 1, which is over the learning"),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 1.5}}, "it is a whole number"),
        ({"lr_scheduler_type": "inverse_sqrt", "lr_scheduler_kwargs": {"timescale": -1}}, "it is a whole number from 1"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "needs one of min_lr and min_lr_rate"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 0.0, "min_lr_rate": 0.0}}, "needs one"),
        ({"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 1.5}}, "a number from 0 to 1"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "needs num_decay_steps"),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 1, "decay_type": "cube"}},
         "decay_type: 'cube'; it is one of linear, cosine, 1-sqrt"),
        ({"lr_scheduler_type": "linear", "warmup_steps": 1, "warmup_ratio": 0.1}, "give one of them"),
        ({"warmup_ratio": 0.1}, "warmup_ratio is 0.1, but the schedule 'constant' has no warm-up"),
        ({"early_stopping_threshold": 0.1}, "goes with early_stopping_patience"),
    ],
)  # fmt: skip
def test_what_a_schedule_does_not_take_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TrainConfig(**keys)
    assert said in str(caught.value)


@pytest.mark.parametrize("key", [{"load_best_model_at_end": True}, {"early_stopping_patience": 1}])
def test_what_held_out_losses_decide_needs_them(key: dict[str, Any]) -> None:
    def refusal(data: dict[str, Any], train: dict[str, Any], **run: Any) -> str:
        job = {"name": "a", "data": {"path": "d.jsonl"} | data, "train": key | train}
        with pytest.raises(InputError) as caught:
            run_from({"base_model": "m", "output_dir": "o", "jobs": [job]} | run)
        return str(caught.value)

    name = next(iter(key))
    assert f"job 'a': train.{name} needs held-out samples; set data.eval_path" in refusal({}, {"eval_steps": 1})
    held = {"eval_path": "e.jsonl"}
    assert f"job 'a': train: {name} needs evaluations between steps; set eval_steps" in refusal(held, {}, eval_every=3)
    assert "needs evaluations between steps" in refusal(held, {"eval_steps": 0}, eval_every=3)


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_the_best_evaluation_and_the_end_are_those_of_transformers_callback(threshold: float, tmp_path: Any) -> None:
    """The callback sees a metric before the Trainer takes it as the best, as in Trainer.evaluate."""
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps",
        metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    for patience in (1, 2, 3):
        callback = EarlyStoppingCallback(patience, threshold)
        train = TrainConfig(eval_steps=2, early_stopping_patience=patience, early_stopping_threshold=threshold)
        state, control, ours = TrainerState(), TrainerControl(), []
        for step in range(1, 40):
            loss = float(generator.integers(0, 50)) / 100
            control.should_training_stop = False
            state.global_step = step
            callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
            if state.best_metric is None or loss < state.best_metric:
                state.best_metric, state.best_global_step = loss, step
            ours += [{"step": 2 * step, "eval_loss": loss}, {"step": 2 * step, "loss": 0.0}]
            odd = {"step": 2 * step + 1, "eval_loss": -1.0}  # where a session ended
            found = judged([{"step": 0, "eval_loss": -1.0}, *ours, odd], train, 1000)
            assert (found.loss, found.step) == (state.best_metric, 2 * state.best_global_step)
            assert (found.worse >= patience) == control.should_training_stop
