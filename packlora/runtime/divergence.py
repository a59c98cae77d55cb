"""How far a job's model is from its reference, as the loss of KTO takes it: estimated with mismatched completions.

TRL's estimate: the prompt of each sample with the completion of the one before, the first one's with that of the last; the mean
over them of the model's log-probability less the reference's, at least 0, and a constant for the gradient. They are mismatched
within a job's global batch in its order, whatever microbatches it is in, and within all held-out samples. So a global
batch's is found before its first microbatch is run, by forwards without a gradient and without dropout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packlora.data.encode import Sample
from packlora.data.preference import mismatched
from packlora.runtime.forwards import Forwards
from packlora.runtime.job import Job
from packlora.runtime.objective import CHOSEN
from packlora.runtime.reference import References


class Divergences:
    """Of all jobs of a run."""

    def __init__(self, forwards: Forwards, references: References) -> None:
        self.forwards, self.references = forwards, references

    def learn(self, due: Sequence[tuple[Job, int]]) -> bool:
        """Let jobs know those of the global batches that are to be run. False where a stop was asked for meanwhile.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        for job, step in due:
            if not job.preferences.lacks_divergence(step):
                continue
            samples = mismatched([job.data.samples[number] for number in job.data.global_batch(step)])
            found = self._of(job, samples, self.references.logps(job, samples))
            if found is None:
                return False
            job.preferences.divergence = step, found
        return True

    def held_out(self, job: Job, samples: Sequence[Sample]) -> float | None:
        """Of the samples of an evaluation: 0 where the loss has none; None where a stop was asked for meanwhile."""
        if not job.preferences.need_divergence:
            return 0.0
        if samples is not job.eval_samples:  # a job's last global batch, once
            pairs = mismatched(samples)
            return self._of(job, pairs, self.references.logps(job, pairs))
        pairs = job.preferences.mismatched
        return self._of(job, pairs, np.stack([job.preferences.reference_of(sample) for sample in pairs]))

    def _of(self, job: Job, samples: Sequence[Sample], reference_N3: np.ndarray | None) -> float | None:
        found = self.forwards.over({job.name: samples}, {job.name: job.adapter.number})
        if found is None or reference_N3 is None:
            return None
        mean = float((found[job.name].logps_N3 - reference_N3)[:, CHOSEN].mean())
        return mean if mean != mean else max(mean, 0.0)
