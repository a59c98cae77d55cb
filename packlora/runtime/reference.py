"""What the reference of a job with preferences gives for its samples: the log-probabilities of their completions.

The reference is what the job's `train.reference` says: the frozen base model without an adapter, or with an adapter. By default
it is the adapter that the job continues (`init_from`), as it was, or without one the base. It does not change while the job
trains, so one forward for each sample is enough, before the job's first step: in every session, for no file is written. Jobs
with the same data and the same reference share it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packlora.adapters.files import load_adapter
from packlora.data.encode import Sample
from packlora.runtime.collate import NOBODY
from packlora.runtime.forwards import Forwards
from packlora.runtime.job import Job


class References:
    """Of all jobs of a run."""

    def __init__(self, forwards: Forwards) -> None:
        self.forwards = forwards
        self._known: dict[str | None, dict[int, np.ndarray]] = {}
        """By the adapter of the reference, and by the id of a sample."""
        self._samples: list[Sample] = []
        """Those whose ids are known, so that no other sample gets them."""

    def learn(self, jobs: Sequence[Job]) -> None:
        """Let jobs that need references have them, unless they have, or a stop was asked for meanwhile.

        Raises:
            MemoryError: out of memory, and there is no lower budget to go on with.
        """
        for job in jobs:
            if job.preferences.need_references and not job.preferences.references and job.status == "running":
                known = self._known.setdefault(job.config.reference_adapter, {})
                lacking = list({id(sample): sample for sample in _of(job) if id(sample) not in known}.values())
                if lacking and not self._add(job, lacking, known):
                    return
                job.preferences.references = known

    def _add(self, job: Job, samples: list[Sample], known: dict[int, np.ndarray]) -> bool:
        """Whether all of them are known now."""
        found = self.logps(job, samples)
        if found is None:
            return False
        known.update({id(sample): own for sample, own in zip(samples, found, strict=True)})
        self._samples += samples
        return True

    def logps(self, job: Job, samples: Sequence[Sample]) -> np.ndarray | None:
        """Of samples that need not be the job's [N, 3], see objective.Scores; None where a stop was asked for meanwhile.

        Raises:
            MemoryError: as `learn`.
        """
        folder, flat = job.config.reference_adapter, job.adapter.flat
        owner = NOBODY if folder is None else job.adapter.number
        trained = flat.clone()
        if folder is not None:
            load_adapter(folder, job.adapter)
        try:
            found = self.forwards.over({job.name: samples}, {job.name: owner})
        finally:
            if folder is not None:
                flat.copy_(trained)
        return None if found is None else found[job.name].logps_N3


def _of(job: Job) -> list[Sample]:
    """The samples whose losses a job may take: held-out ones, and those of all its configured steps."""
    data, order = job.data, job.data.planned
    held_out = [*job.eval_samples, *job.preferences.mismatched]
    if data.configured_steps >= data.batches_per_epoch:
        return [*data.samples, *held_out]
    taken = np.unique(np.concatenate([order.samples(step) for step in range(data.configured_steps)]))
    return [*(data.samples[number] for number in taken.tolist()), *held_out]
