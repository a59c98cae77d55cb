"""A job's samples and how many optimizer steps they are trained for; their order is order.py's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packlora.config import TrainConfig
from packlora.data.encode import Sample, samples_hash
from packlora.data.order import SampleOrder, count_batches
from packlora.errors import InputError, counted


@dataclass(slots=True)
class JobData:
    """The samples of a job and the order in which they are taken."""

    name: str
    samples: Sequence[Sample]
    config: TrainConfig
    seed: int
    step_limit: int | None = None
    """Stop after this many steps, whatever the configuration says; learning rates stay those of the configured steps."""
    planned: SampleOrder = field(init=False)
    """Order of all configured global batches: microbatches are planned over these, so that a limit on steps changes no batch
    before it."""
    label_share: float = field(init=False)
    """Labels over tokens, of all samples."""
    num_labels: np.ndarray = field(init=False)
    """Labels of every sample; of soft targets each."""
    num_learnt: np.ndarray = field(init=False)
    """Tokens of every sample that are learnt."""

    def __post_init__(self) -> None:
        if self.batches_per_epoch == 0:
            raise InputError(
                f"job {self.name!r}: {counted(len(self.samples), 'sample', 'do not fill one global batch of')} "
                f"{self.config.global_batch_size}, and drop_last is set; nothing would be trained"
            )
        lengths = np.array([sample.num_tokens for sample in self.samples], np.int32)
        self.num_labels = np.array([sample.num_labels for sample in self.samples])
        self.num_learnt = np.array([sample.num_learnt for sample in self.samples])
        self.label_share = int(self.num_labels.sum()) / int(lengths.sum())
        size, seed = self.config.global_batch_size, self.seed
        self.planned = SampleOrder(
            self.name, lengths, size, seed, self.configured_steps, self.config.shuffle, self.config.drop_last
        )

    @property
    def num_samples(self) -> int:
        return len(self.samples)

    @property
    def batches_per_epoch(self) -> int:
        return count_batches(len(self.samples), self.config.global_batch_size, self.config.drop_last)

    @property
    def configured_steps(self) -> int:
        """Optimizer steps that the run file asks for."""
        return configured_steps(self.config, len(self.samples))

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are taken."""
        return self.configured_steps if self.step_limit is None else min(self.configured_steps, self.step_limit)

    @property
    def tokens(self) -> int:
        """Number of tokens of all steps that are taken, see `total`."""
        return round(self.total(self.planned.lengths))

    def total(self, values: np.ndarray) -> float:
        """The sum over all steps that are taken of a value of each sample. What drop_last leaves out is taken to be of mean
        value."""
        epochs, rest = divmod(self.num_steps, self.batches_per_epoch)
        size = self.planned.global_batch_size
        taken = min(self.batches_per_epoch * size, len(values)) / len(values)
        last = values[self.planned.epoch(epochs)[: rest * size]]
        return epochs * taken * float(values.sum(dtype=np.float64)) + float(last.sum(dtype=np.float64))

    def label_tokens(self, step: int) -> int:
        """Number of label tokens in the global batch of a step, counted from 0."""
        return int(self.num_learnt[self.planned.samples(step)].sum())

    def fingerprint(self, held_out: Sequence[Sample]) -> str:
        """Hash of the samples, including the held-out ones; it tells whether the data has changed."""
        return samples_hash([*self.samples, *held_out])

    def objective(self) -> Any:
        """Objective that the data bring with them; None: that of the keys of `train`."""
        return None

    def notes(self) -> list[str]:
        """Notes about the samples that became known during training."""
        return []

    def last_batch(self) -> list[Sample]:
        """Samples of the last optimizer step."""
        return [self.samples[number] for number in self.global_batch(self.num_steps - 1)]

    def global_batch(self, step: int) -> list[int]:
        """Sample numbers of optimizer step `step`, counted from 0."""
        numbers: list[int] = self.planned.samples(step).tolist()
        return numbers


def configured_steps(config: TrainConfig, samples: int) -> int:
    """Optimizer steps that a job with so many samples is to take."""
    if config.max_steps > 0:
        return config.max_steps
    return max(
        1, math.ceil(config.num_train_epochs * count_batches(samples, config.global_batch_size, config.drop_last))
    )
