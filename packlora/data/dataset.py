"""A job's samples in training order: epochs, shuffling and global batches.

The order is a pure function of (seed, job name, epoch), so it is the same whatever else is trained beside the job and
however often the run is interrupted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from packlora.config import TrainConfig
from packlora.data.encode import Sample
from packlora.errors import InputError
from packlora.seeding import stable_hash


@dataclass(slots=True)
class JobData:
    """The samples of a job and the order in which they are taken."""

    name: str
    samples: list[Sample]
    config: TrainConfig
    seed: int
    step_limit: int | None = None
    """Stop after this many steps, whatever the configuration says; learning rates stay those of the configured steps."""
    _last_order: tuple[int, np.ndarray] | None = None

    def __post_init__(self) -> None:
        if self.batches_per_epoch == 0:
            raise InputError(
                f"job {self.name!r}: {len(self.samples)} samples do not fill one global batch of "
                f"{self.config.global_batch_size}, and drop_last is set; nothing would be trained"
            )

    @property
    def batches_per_epoch(self) -> int:
        size = self.config.global_batch_size
        return len(self.samples) // size if self.config.drop_last else math.ceil(len(self.samples) / size)

    @property
    def configured_steps(self) -> int:
        """Optimizer steps that the run file asks for."""
        if self.config.max_steps > 0:
            return self.config.max_steps
        return max(1, math.ceil(self.config.num_train_epochs * self.batches_per_epoch))

    @property
    def num_steps(self) -> int:
        """Optimizer steps that are taken."""
        return self.configured_steps if self.step_limit is None else min(self.configured_steps, self.step_limit)

    def order(self, epoch: int) -> np.ndarray:
        """Sample numbers of one epoch, in training order."""
        if not self.config.shuffle:
            return np.arange(len(self.samples))
        if self._last_order is None or self._last_order[0] != epoch:
            generator = np.random.Generator(np.random.Philox(stable_hash(self.seed, self.name, epoch)))
            self._last_order = (epoch, generator.permutation(len(self.samples)))
        return self._last_order[1]

    def last_batch(self) -> list[Sample]:
        """Samples of the last optimizer step."""
        return [self.samples[number] for number in self.global_batch(self.num_steps - 1)]

    def global_batch(self, step: int) -> list[int]:
        """Sample numbers of optimizer step `step`, counted from 0."""
        epoch, batch = divmod(step, self.batches_per_epoch)
        size = self.config.global_batch_size
        return [int(number) for number in self.order(epoch)[batch * size : (batch + 1) * size]]
