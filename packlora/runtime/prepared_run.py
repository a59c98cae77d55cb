"""A run that has been checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packlora.config import Run
from packlora.plans.ask import Ask
from packlora.runtime.encoder import Encoder
from packlora.runtime.prepared_job import ModelShape, PreparedJob

if TYPE_CHECKING:
    from packlora.modality import Modality
    from packlora.weight_form import WeightForm


@dataclass(slots=True)
class PreparedRun:
    """A checked run.

    budget: tokens of a microbatch, for auto the usual one of the device. left_out: jobs of a resumed run whose data is gone,
    with the reason; `jobs` are the others. asks: how adapted layers are to be computed, by module path. form: of the base
    model's linear layers, as the run file asks or as they are saved; None of floats. encoder: makes samples of data, also those
    of jobs that join later. modality: what the model reads beside texts, where the data has some of it.
    head_in_layers: HeadCost.in_layers of the base model, None where that was not measured. fit: what `fit` chose, by key, and
    the bytes that it predicts. recompute: outputs of norms and gated products are computed again in the backward, not kept.
    """

    run: Run
    tokenizer: Any
    budget: int
    shape: ModelShape
    jobs: list[PreparedJob]
    warnings: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    form: WeightForm | None = None
    encoder: Encoder | None = None
    modality: Modality | None = None
    head_in_layers: float | None = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    recompute: bool = True

    @property
    def in_codes(self) -> tuple[int, int]:
        """Numbers of the linear layers that are not held as floats, and the bytes that they take."""
        return (0, 0) if self.form is None else self.form.held

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, also of those held out."""
        samples = [s for job in self.jobs for s in job.encoded.samples + job.eval_encoded.samples]
        return max([*(job.most for job in self.jobs), *(s.num_tokens for s in samples)])

    @property
    def longest_by_job(self) -> dict[str, int]:
        """Tokens of the longest part of a sample of each job, none of which sees another."""
        return {job.config.name: job.longest for job in self.jobs}

    @property
    def adapted(self) -> dict[str, list[str]]:
        """Paths of the modules with adapters of each job."""
        return {job.config.name: list(job.spec.modules) for job in self.jobs}

    @property
    def longest_run(self) -> dict[str, int]:
        """Tokens of the longest sample or answered prompt of each job: the model must be right for as many."""
        prompts = {job.config.name: max((prompt.most for prompt in job.prompts), default=0) for job in self.jobs}
        mixed = {job.config.name: job.longest_estimated for job in self.jobs}
        return {name: max(most, prompts[name], mixed[name]) for name, most in self.longest_by_job.items()}

    @property
    def trainable(self) -> int:
        """Trainable parameters of all jobs."""
        return sum(job.trainable for job in self.jobs)
