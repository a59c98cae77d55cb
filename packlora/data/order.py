"""Assignment of a job's samples to its optimizer steps; a scheduler needs nothing else of a job.

The order of an epoch is a pure function of (the job's seed, epoch). It does not depend on the job's name, on the jobs that are
trained beside it, or on interruptions of the run. An order holds lengths and no tensors, and is small enough to be sent to
another process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from packlora.seeding import stable_hash


@dataclass(slots=True)
class SampleOrder:
    """The global batches of one job. lengths: tokens of every sample; num_batches: global batches that are planned."""

    name: str
    lengths: np.ndarray
    global_batch_size: int
    seed: int
    num_batches: int
    shuffle: bool = True
    drop_last: bool = False
    _last: tuple[int, np.ndarray] | None = field(default=None, repr=False, compare=False)

    @property
    def batches_per_epoch(self) -> int:
        return count_batches(len(self.lengths), self.global_batch_size, self.drop_last)

    def epoch(self, number: int) -> np.ndarray:
        """Sample numbers of one epoch, in training order."""
        if not self.shuffle:
            return np.arange(len(self.lengths))
        if self._last is None or self._last[0] != number:
            generator = np.random.Generator(np.random.Philox(stable_hash("order", self.seed, number)))
            self._last = (number, generator.permutation(len(self.lengths)))
        return self._last[1]

    def samples(self, number: int) -> np.ndarray:
        """Sample numbers of global batch `number`, counted from 0."""
        epoch, batch = divmod(number, self.batches_per_epoch)
        size = self.global_batch_size
        return self.epoch(epoch)[batch * size : (batch + 1) * size]

    def batch(self, n: int) -> list[tuple[int, int]]:
        """(sample number, length) of global batch n."""
        samples = self.samples(n)
        return list(zip(samples.tolist(), self.lengths[samples].tolist(), strict=True))


def count_batches(samples: int, size: int, drop_last: bool) -> int:
    """Global batches of an epoch."""
    return samples // size if drop_last else math.ceil(samples / size)
