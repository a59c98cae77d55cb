"""Makes samples of the rows of jobs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from packlora.adapters.spec import AdapterSpec
from packlora.base.shape import context_of
from packlora.config import JobConfig, Run
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded
from packlora.data.prompts import Prompt, encode_prompts
from packlora.data.reader import Rows
from packlora.data.rows import Row
from packlora.data.samples import encode_rows, joined
from packlora.data.tokens import check_vocabulary
from packlora.engine.objective import Objective
from packlora.engine.objectives.configured import objective_of, router_coefficient
from packlora.errors import InputError, counted, plural
from packlora.runtime.job import learning_rates
from packlora.runtime.prepared_job import PreparedJob, number_of, products_kept, trainable_parameters
from packlora.terminal import Told

if TYPE_CHECKING:
    from packlora.modality import ExtrasReader

OF_READING = {"path", "eval_path", "eval_split", "columns", "max_samples", "subset", "split"}
"""Keys of a job's data that say which rows it has. A sample is made of its row by the others."""


@dataclass(slots=True)
class Encoder:
    """Makes samples of the data of jobs. Jobs with the same data share them.

    skeleton: the base model without weights. longest: tokens of a sample that the model takes. reader: of what rows have
    beside texts; None where no row has any. has_template: whether the tokenizer has another chat template than its files.
    """

    run: Run
    skeleton: PreTrainedModel
    tokenizer: Any
    longest: int
    max_steps: int | None = None
    reader: ExtrasReader | None = None
    has_template: bool = False
    _known: dict[tuple[Any, ...], Encoded] = field(default_factory=dict)
    _tokenizers: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(run: Run, skeleton: PreTrainedModel, tokenizer: Any, max_steps: int | None) -> Encoder:
        return Encoder(run, skeleton, tokenizer, context_of(skeleton.config), max_steps)

    def job(
        self, job: JobConfig, spec: AdapterSpec, rows: list[Rows], eval_rows: list[Rows], budget: int, told: Told
    ) -> tuple[PreparedJob, list[str]]:  # fmt: skip
        """A job whose rows have been read, and what should be known of it."""
        if job.data.streaming:
            return self._streamed(job, spec, eval_rows, budget, told)
        if job.rollout is not None:
            return self._rewarded(job, spec, budget, told)
        notes = [note for one in rows + eval_rows for note in one.read.notes]
        parts, held_out = ([self._encoded(one, job, budget, told) for one in some] for some in (rows, eval_rows))
        seed, total = self.run.seed_of(job), sum(len(part.samples) for part in parts)
        if job.data.eval_split is not None:
            from packlora.data.mixture import split_off_held_out

            parts, split_off = split_off_held_out(parts, job.data, seed, job.name)
            held_out = [split_off]
            notes.append(f"job {job.name!r}: eval_split holds out {len(split_off.samples)} of {total} samples")
        encoded, eval_encoded = joined(parts), joined(held_out)
        if job.data.sources[0][1] is not None:
            from packlora.data.mixture import mixed

            encoded = mixed(parts, job.data, seed, job.name, notes)
        vocabulary = self.skeleton.get_input_embeddings().weight.shape[0]
        every = (sample.ids for sample in encoded.samples + eval_encoded.samples)
        check_vocabulary(job.name, every, vocabulary, self.tokenizer)
        objective = objective_of(job.train)
        for what, some in (("training", encoded), ("held-out", eval_encoded)):
            if (why := objective.why_not(some.samples)) is not None:
                raise InputError(f"job {job.name!r}: its {what} data {why}")
        data = JobData(job.name, encoded.samples, job.train, seed, self.max_steps)
        notes += _cut_samples(job.name, encoded, eval_encoded) + _doubts(job, data, objective)
        return self._prepared(job, data, encoded, eval_encoded, spec, 0, notes)

    def _streamed(
        self, job: JobConfig, spec: AdapterSpec, eval_rows: list[Rows], budget: int, told: Told
    ) -> tuple[PreparedJob, list[str]]:
        """Prepare a job whose rows are read in training; see `job`."""
        from packlora.data import stream as streams

        seed, size, own = self.run.seed_of(job), job.train.global_batch_size, job.data
        vocabulary, tokenizer = self.skeleton.get_input_embeddings().weight.shape[0], self.tokenizer_of(job)

        def encode(rows: Sequence[Row]) -> Encoded:
            limits = budget, job.name, self.longest
            known = {"vocabulary": vocabulary, "target_vocabulary": vocabulary}
            return encode_rows(rows, tokenizer, own, *limits, trainer=job.train.trainer, may_be_empty=True, **known)

        buffer = (own.shuffle_buffer_size or streams.BUFFER) * job.train.shuffle
        told(f"job {job.name}: reading the first samples")
        stream = streams.Stream(
            job.name,
            own.train_sources,
            seed,
            buffer,
            encode,
            streams.KEPT_BATCHES * size,
            max(streams.PROBE, size),
        )
        held_out = joined([self._encoded(one, job, budget, told) for one in eval_rows])
        encoded = Encoded(list(stream), notes=dict(stream.counts.notes))
        every = (sample.ids for sample in encoded.samples + held_out.samples)
        check_vocabulary(job.name, every, vocabulary, tokenizer)
        data = streams.StreamData(job.name, stream, job.train, seed, self.max_steps)
        notes = [note for one in eval_rows for note in one.read.notes] + _doubts(job, data, objective_of(job.train))
        notes += _cut_samples(job.name, encoded, held_out)
        return self._prepared(job, data, encoded, held_out, spec, min(own.max_length, budget, self.longest), notes)

    def _rewarded(self, job: JobConfig, spec: AdapterSpec, budget: int, told: Told) -> tuple[PreparedJob, list[str]]:
        """Prepare a job whose samples are generated in training; see `job`."""
        tokenizer, vocabulary = self.tokenizer_of(job), self.skeleton.get_input_embeddings().weight.shape[0]
        data, few, held_out, most, notes = import_module("packlora.rl.prepare").rollout_data(
            self.run, job, spec, tokenizer, vocabulary, budget, self.longest, self.max_steps, told
        )
        return self._prepared(job, data, few, held_out, spec, most, notes)

    def _prepared(
        self, job: JobConfig, data: JobData, encoded: Encoded, held_out: Encoded, spec: AdapterSpec, most: int,
        notes: list[str],
    ) -> tuple[PreparedJob, list[str]]:  # fmt: skip
        """The job of these samples, with what its adapter counts, and what should be known of it."""
        _check_scheduler(job, data)
        coefficient, told_of_it = router_coefficient(self.run, job, self.skeleton)
        top_k = number_of(self.skeleton.config.get_text_config(), "num_experts_per_tok", 1)
        every, active, outside = (trainable_parameters(spec, self.skeleton, count) for count in (None, top_k, 0))
        return PreparedJob(
            job, data, encoded, held_out, spec, every, active, self._prompts(job), most, every - outside, coefficient,
            products_kept(spec, self.skeleton), self._template_of(job),
        ), notes + told_of_it  # fmt: skip

    def _prompts(self, job: JobConfig) -> list[Prompt]:
        texts, new = self.run.prompts_of(job), self.run.sample_max_new_tokens
        return encode_prompts(texts, self.tokenizer_of(job), job.data, new, self.longest, job.name)

    def tokenizer_of(self, job: JobConfig) -> Any:
        """The base model's tokenizer, with the job's own chat template if it has one. Raises InputError where that cannot be
        read."""
        asked = job.data.chat_template
        if asked is None:
            return self.tokenizer
        if asked not in self._tokenizers:
            from packlora.data.chat_templates import with_template

            self._tokenizers[asked] = with_template(self.tokenizer, asked, job.name)
        return self._tokenizers[asked]

    def _template_of(self, job: JobConfig) -> str | None:
        is_other = self.has_template or job.data.chat_template is not None
        return str(self.tokenizer_of(job).chat_template) if is_other else None

    def _encoded(self, rows: Rows, job: JobConfig, budget: int, told: Told) -> Encoded:
        settings = job.data.model_dump_json(exclude=OF_READING)
        if rows.stamp is None:  # it may be something else the next time
            return self._newly_encoded(rows, job, budget, told)
        key = (rows.source, rows.stamp, settings, budget, job.train.trainer, job.train.objective)
        if key not in self._known:
            self._known[key] = self._newly_encoded(rows, job, budget, told)
        return self._known[key]

    def _newly_encoded(self, rows: Rows, job: JobConfig, budget: int, told: Told) -> Encoded:
        read, trainer = rows.read, job.train.trainer
        encoded = encode_rows(
            read.rows, self.tokenizer_of(job), job.data, budget, job.name, self.longest, told, self.reader, trainer=trainer,
            fields=job.train.reads_fields, target_vocabulary=self.skeleton.get_input_embeddings().weight.shape[0],
        )  # fmt: skip
        try:
            objective_of(job.train, encoded.samples, encoded.where)  # tries a user's own
        except InputError as error:
            raise InputError(f"job {job.name!r}: {error}") from None
        encoded.skipped[:0] = read.skipped
        return encoded


def _cut_samples(job: str, encoded: Encoded, eval_encoded: Encoded) -> list[str]:
    """Notes on what was cut or left out of a job's data, and what else should be known of its rows."""
    out = []
    for what, part in (("", encoded), ("held-out ", eval_encoded)):
        for count, so in ((part.truncated, "were cut as too long"), (part.dropped, "were dropped as too long")):
            out += [f"job {job!r}: {counted(count, f'{what}sample', so)}"] if count else []
        if part.skipped:
            left = counted(len(part.skipped), f"{what}row", "were left out by on_bad_row")
            out.append(f"job {job!r}: {left}, the first: {part.skipped[0]}")
        for so, (rows, where) in part.notes.items():
            out.append(f"job {job!r}: {counted(rows, f'{what}row', so)}, the first: {where}")
    return out


def _check_scheduler(job: JobConfig, data: JobData) -> None:
    try:
        learning_rates(job.train, data.configured_steps)
    except ValueError as error:
        raise InputError(f"job {job.name!r}: train.lr_scheduler_type {job.train.lr_scheduler_type}: {error}") from None


def _doubts(job: JobConfig, data: JobData, objective: Objective) -> list[str]:
    """Doubts about what can be trained, but is hardly meant."""
    train, out = job.train, []
    if (warmup := train.warmup_of(data.configured_steps)) >= data.configured_steps and train.warmup_steps:
        out.append(
            f"warmup_steps {warmup} is no less than its {plural(data.configured_steps, 'optimizer step')}, so the learning "
            f"rate never comes to {train.learning_rate:g}"
        )
    out += objective.doubts(data.num_samples, train)
    if train.global_batch_size > data.num_samples:
        out.append(
            f"global_batch_size {train.global_batch_size} is more than its {plural(data.num_samples, 'sample')}, so every "
            "optimizer step takes all of them"
        )
    if {os.path.realpath(path) for path in job.data.eval_paths} & {
        os.path.realpath(path) for path, _ in job.data.sources
    }:
        out.append("eval_path is the training data itself, so the held-out loss does not tell what was learnt")
    return [f"job {job.name!r}: {text}" for text in out]
