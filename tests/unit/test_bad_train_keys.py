"""Values of train.optim, logging_steps, neftune_noise_alpha, label_smoothing_factor and of streams that are refused, with the
place, what was found and what is accepted."""

from __future__ import annotations

from typing import Any

import pytest
from test_config import refusal, tree

NAN = float("nan")
STREAM = {"path": "a.jsonl", "streaming": True, "truncate": "drop", "on_bad_row": "skip"}
STEPS = {"max_steps": 5}


def train(**keys: Any) -> Any:
    return tree({"train": keys})


def data(keys: Any, **more: Any) -> Any:
    return tree({"data": {"path": "a.jsonl"} | keys, "train": more})


def streamed(*without: str, train: Any = None, **keys: Any) -> Any:
    kept = {key: value for key, value in STREAM.items() if key not in without}
    return tree({"data": kept | keys, "train": STEPS if train is None else train})


def cut(key: str, optim: str) -> Any:
    return tree({"train": {"optim": optim}}, parallel={key: 2})


CASES: list[tuple[Any, str, str]] = [
    (
        train(trainer="dpo", label_smoothing_factor=0.1),
        "label_smoothing_factor",
        "of preferences it is label_smoothing",
    ),
    (train(trainer="dpo", loss_type=[]), "loss_type", "is []; dpo takes at least one loss"),
    (train(trainer="dpo", loss_type=["ipo", "ipo"]), "loss_type", "takes at least one loss, each once"),
    (train(trainer="orpo", loss_type="dpo"), "loss_type is dpo and trainer is 'orpo'", "leave one of them out"),
    (train(trainer="sft", loss_type="kto"), "loss_type is kto and trainer is 'sft'", "leave one of them out"),
    (train(trainer="dpo", loss_type="kto"), "loss_type is kto and trainer is 'dpo'", "leave one of them out"),
    (
        train(loss_type="sigmoid"),
        "loss_type is for trainer dpo and kto",
        "'sigmoid'; sft, dpo, kto, orpo, grpo, distillation",
    ),
    (train(loss_type="sigmoid"), "loss_type", "dapo, dr_grpo, bnpo, cispo, gspo, dro, ppo, importance_sampling set it"),
    (train(trainer="orpo", neftune_noise_alpha=5), "neftune_noise_alpha", "this job's trainer is orpo"),
    (streamed(train=STEPS | {"trainer": "dpo"}), "data.streaming", "for trainer sft"),
    (
        train(warmup_steps=0.03, lr_scheduler_type="cosine"),
        "train.warmup_steps",
        "found 0.03; a share of all steps is warmup_ratio",
    ),
    (train(warmup_steps="3"), "train.warmup_steps", "found '3'"),
    (train(optim="adam"), "train.optim", "'adam'"),
    (train(optim="adamw"), "train.optim", "adamw_torch"),
    (train(optim="lion"), "train.optim", "lion_32bit"),
    (train(optimizer="sgd"), "train.optimizer", "train.optim"),
    (train(optim_args="momentum=0.9"), "train.optim_args", "unknown key"),
    (train(optim="sgd", adam_beta1=0.8), "adam_beta1 is 0.8", "which the optimizer 'sgd' does not have"),
    (train(optim="sgd", adam_beta2=0.99), "adam_beta2", "leave it out"),
    (train(optim="adafactor", adam_epsilon=1e-6), "adam_epsilon is 1e-06", "'adafactor' does not have"),
    (train(optim="paged_lion_8bit", adam_epsilon=1e-6), "adam_epsilon", "'paged_lion_8bit' does not have"),
    (cut("tensor", "adafactor"), "job 'first'", "parallel.tensor does not take"),
    (cut("pipeline", "adafactor"), "job 'first'", "parallel.pipeline does not take"),
    (cut("pipeline", "paged_lion_8bit"), "train.optim: paged_lion_8bit", "parallel.pipeline"),
    (train(logging_steps=0), "train.logging_steps", "0"),
    (train(logging_steps=10**10), "train.logging_steps", "10000000000"),
    (tree(logging_steps=5), "logging_steps", "unknown key"),
    (train(neftune_noise_alpha=0), "train.neftune_noise_alpha", "0"),
    (train(neftune_noise_alpha=NAN), "train.neftune_noise_alpha", "nan"),
    (train(neftune_noise_alpha=1e7), "train.neftune_noise_alpha", "1000000"),
    (train(label_smoothing_factor=1), "train.label_smoothing_factor", "less than 1"),
    (train(label_smoothing_factor=-0.1), "train.label_smoothing_factor", "-0.1"),
    (train(label_smoothing=0.1), "label_smoothing is for trainer dpo", "it is label_smoothing_factor"),
    (data({"streaming": "yes"}), "data.streaming", "'yes'"),
    (data({"stream": True}), "data.stream", "'streaming'"),
    (data({"shuffle_buffer_size": 5}), "data", "goes with streaming: true"),
    (streamed(shuffle_buffer_size=0), "data.shuffle_buffer_size", "0"),
    (streamed(shuffle_buffer_size=10**9), "data.shuffle_buffer_size", "1000000000"),
    (streamed("truncate"), "data", "set truncate to drop or right"),
    (streamed("on_bad_row"), "data", "on_bad_row: skip"),
    (streamed(train={}), "job 'first'", "set train.max_steps"),
    (streamed(train={"num_train_epochs": 3}), "job 'first'", "num_train_epochs says nothing"),
    (streamed(train=STEPS | {"drop_last": True}), "job 'first'", "train.drop_last says nothing of a stream"),
    (streamed(path=[{"path": "a", "weight": 1.0}, {"path": "b", "weight": 2.0}]), "data", "streaming takes no weights"),
]


@pytest.mark.parametrize(("value", "where", "said"), CASES, ids=[str(number) for number in range(len(CASES))])
def test_a_value_that_is_not_accepted_is_refused_with_its_place(value: Any, where: str, said: str) -> None:
    message = refusal(value)
    assert where in message
    assert said in message
    assert "Traceback" not in message and len(message) < 2500
