"""Everything that can be wrong with a run is found here, before any training: data, tokenizer and targets."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from transformers import PreTrainedModel

from packlora.adapters.expert_layout import is_experts
from packlora.adapters.expert_targets import divided_ranks
from packlora.adapters.experts import shapes_at
from packlora.adapters.files import base_note, check_start, continued_config
from packlora.adapters.kinds import is_linear
from packlora.adapters.sharded import LINEAR
from packlora.adapters.spec import AdapterSpec, peft_config, resolve, try_patterns
from packlora.base.demo_model import base_path
from packlora.base.device import choose_device
from packlora.base.liger import check_liger
from packlora.base.load import load_skeleton, load_tokenizer
from packlora.base.quantized import MADE, check_quantization, check_stored, codes_in
from packlora.base.stored import stored_as
from packlora.base.vision import Vision
from packlora.config import JobConfig, QuantizationConfig, Run
from packlora.data import stream as streams
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded, encode_some
from packlora.data.images import Shown
from packlora.data.mixture import joined, mixed
from packlora.data.preference import encode_for
from packlora.data.prompts import Prompt, encode_prompts
from packlora.data.readers import Read, is_there, read_data
from packlora.data.rows import Row
from packlora.errors import InputError
from packlora.ops.modules import beside_decoder
from packlora.parallel.experts import check_experts
from packlora.parallel.stages import check_stages
from packlora.parallel.tensor import check_cut
from packlora.plans.ask import Ask, asks_of
from packlora.runtime.changes import trained
from packlora.runtime.job import learning_rates
from packlora.runtime.library_optimizer import check_optim
from packlora.runtime.objective import Objective
from packlora.terminal import Told, silent

AUTO_BUDGET = {"cpu": 2048, "cuda": 8192}
"""Tokens of a microbatch for max_tokens_per_microbatch: auto, by device, where no sample is longer and nothing better is
known (profiler.py)."""
LEFT_OUT = "is left out, the others go on"


@dataclass(frozen=True, slots=True)
class Rows:
    """What was read under a path. stamp: of the file before that, None where it is no single file."""

    path: str
    read: Read
    stamp: tuple[int, ...] | None


@dataclass(slots=True)
class PreparedJob:
    """A checked job: its samples in order, its adapter's layers."""

    config: JobConfig
    data: JobData
    encoded: Encoded
    eval_encoded: Encoded
    spec: AdapterSpec
    trainable: int
    """Parameters of its adapter."""
    active: int
    """Those of them that one token meets: of experts, those that it goes to."""
    prompts: list[Prompt] = field(default_factory=list)
    most: int = 0
    """Tokens that a sample of a stream may have."""
    on_experts: int = 0
    """Parameters of its adapter that are on experts."""

    @property
    def active_on_experts(self) -> int:
        """Those of them that one token meets."""
        return self.active - (self.trainable - self.on_experts)

    @property
    def has_images(self) -> bool:
        return any(sample.images is not None for sample in self.encoded.samples + self.eval_encoded.samples)

    @property
    def longest(self) -> int:
        """Tokens of the longest part of a sample, also of those held out."""
        return max([self.most, *(n for s in self.encoded.samples + self.eval_encoded.samples for n in s.part_lengths)])

    @property
    def longest_mismatched(self) -> int:
        """Tokens that a prompt with another sample's completion may have; 0 where no loss takes it."""
        objective = Objective.of(self.config.train)
        if objective is None or not objective.has_divergence:
            return 0
        samples = [s for s in self.encoded.samples + self.eval_encoded.samples if s.preference is not None]
        starts = [int(np.argmax(sample.is_label)) for sample in samples]
        ends = [sample.num_tokens - start for sample, start in zip(samples, starts, strict=True)]
        return min(max(starts) + max(ends), *(s.preference.limit for s in samples if s.preference is not None))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What time and memory of a base model depend on.

    parameters: of the model; linear_parameters: of its linear layers without the output layer. attention, key_value: widths of
    queries and of keys. inner: width inside the MLP. head_norms: queries and keys have norms of their own (Qwen 3). largest,
    outputs: of those linear layers, the most numbers of one and the outputs of all. routed_parameters: of the experts that one
    token goes to, of all layers; routed_width: numbers that go into them and come out of them, by layer. expert_parameters: of
    all experts; experts: how many there are in a layer, those of all layers that differ.
    """

    model_type: str
    parameters: int
    linear_parameters: int
    layers: int
    hidden: int
    attention: int
    key_value: int
    inner: int
    vocabulary: int
    head_norms: bool = False
    largest: int = 0
    outputs: int = 0
    routed_parameters: int = 0
    routed_width: int = 0
    expert_parameters: int = 0
    experts: tuple[int, ...] = ()

    @staticmethod
    def of(model: PreTrainedModel) -> ModelShape:
        config = model.config.get_text_config()
        hidden = _number(config, "hidden_size", 1)
        heads = _number(config, "num_attention_heads", 1)
        head_dim = _number(config, "head_dim", hidden // heads)
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
        layers = _number(config, "num_hidden_layers", 1)
        weights = [p for module in model.modules() if is_experts(module) for p in module.parameters() if p.ndim == 3]
        top_k = _number(config, "num_experts_per_tok", 1)
        return ModelShape(
            model.config.model_type,
            sum(parameter.numel() for parameter in model.parameters()),
            sum(module.weight.numel() for module in linear),
            layers,
            hidden,
            heads * head_dim,
            _number(config, "num_key_value_heads", heads) * head_dim,
            _number(config, "intermediate_size", _number(config, "ffn_dim", 4 * hidden)),
            model.get_input_embeddings().weight.shape[0],
            any(name.endswith("q_norm") for name, _ in model.named_modules()),
            max((module.weight.numel() for module in linear), default=0),
            sum(module.out_features for module in linear),
            sum(weight.numel() // len(weight) for weight in weights) * top_k,
            sum(sum(weight.shape[1:]) for weight in weights) * top_k // layers,
            sum(weight.numel() for weight in weights),
            tuple(sorted({len(weight) for weight in weights})),
        )


def _number(config: Any, name: str, otherwise: int) -> int:
    """Of a configuration; the mean where layers differ: as a list (Gemma 3n), or in configurations of their own (Gemma 4)."""
    values = [getattr(layer, name, None) for layer in getattr(config, "per_layer_config", None) or [config]]
    numbers = [n for value in values for n in (value if isinstance(value, list | tuple) else [value]) if n]
    return round(sum(numbers) / len(numbers)) if numbers else otherwise


@dataclass(slots=True)
class PreparedRun:
    """A checked run.

    budget: tokens of a microbatch, for auto the usual one of the device. left_out: jobs of a resumed run whose data is gone,
    with the reason; `jobs` are the others. asks: how adapted layers are to be computed, by module path. quantization: of the
    base model's linear layers, as the run file asks or as they are saved. in_codes: numbers of these layers, and bytes of their
    codes. encoder: makes samples of data, also those of jobs that join later. vision: what the model is given for images, where
    the data has some.
    """

    run: Run
    tokenizer: Any
    budget: int
    shape: ModelShape
    jobs: list[PreparedJob]
    warnings: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    asks: dict[str, Ask] = field(default_factory=dict)
    quantization: QuantizationConfig | None = None
    encoder: Encoder | None = None
    vision: Vision | None = None
    in_codes: tuple[int, int] = (0, 0)

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
        """Of each job the tokens of the longest sample or answered prompt: the model must be right for as many."""
        prompts = {job.config.name: max((prompt.most for prompt in job.prompts), default=0) for job in self.jobs}
        mixed = {job.config.name: job.longest_mismatched for job in self.jobs}
        return {name: max(most, prompts[name], mixed[name]) for name, most in self.longest_by_job.items()}

    @property
    def trainable(self) -> int:
        """Trainable parameters of all jobs."""
        return sum(job.trainable for job in self.jobs)


@dataclass(slots=True)
class Encoder:
    """Makes samples of the data of jobs. Jobs with the same data share them.

    skeleton: the base model without weights. longest: tokens of a sample that the model takes. shown: what images become; None
    where no row has any.
    """

    run: Run
    skeleton: PreTrainedModel
    tokenizer: Any
    longest: int
    max_steps: int | None = None
    shown: Shown | None = None
    _known: dict[tuple[Any, ...], Encoded] = field(default_factory=dict)

    @staticmethod
    def of(run: Run, skeleton: PreTrainedModel, tokenizer: Any, max_steps: int | None) -> Encoder:
        longest = getattr(skeleton.config.get_text_config(), "max_position_embeddings", None)
        return Encoder(run, skeleton, tokenizer, int(longest or 2**31), max_steps)

    def job(
        self, job: JobConfig, spec: AdapterSpec, rows: list[Rows], eval_rows: list[Rows], budget: int, told: Told
    ) -> tuple[PreparedJob, list[str]]:  # fmt: skip
        """A job whose rows have been read, and what should be known of it."""
        if job.data.streaming:
            return self._streamed(job, spec, eval_rows, budget, told)
        notes = [note for one in rows + eval_rows for note in one.read.notes]
        parts, held_out = ([self._encoded(one, job, budget, told) for one in some] for some in (rows, eval_rows))
        encoded, eval_encoded = mixed(parts, job.data, self.run.seed_of(job), job.name, notes), joined(held_out)
        vocabulary = self.skeleton.get_input_embeddings().weight.shape[0]
        _check_vocabulary(job.name, encoded, eval_encoded, vocabulary)
        data = JobData(job.name, encoded.samples, job.train, self.run.seed_of(job), self.max_steps)
        _check_scheduler(job, data)
        notes += _cut_samples(job.name, encoded, eval_encoded) + _doubts(job, data)
        return PreparedJob(
            job, data, encoded, eval_encoded, spec, *self._counts(spec), self._prompts(job), on_experts=self._on_experts(spec)
        ), notes  # fmt: skip

    def _streamed(
        self, job: JobConfig, spec: AdapterSpec, eval_rows: list[Rows], budget: int, told: Told
    ) -> tuple[PreparedJob, list[str]]:
        """As `job`, of one whose rows are read in training."""
        seed, size, own = self.run.seed_of(job), job.train.global_batch_size, job.data
        vocabulary = self.skeleton.get_input_embeddings().weight.shape[0]

        def encode(rows: Sequence[Row]) -> Encoded:
            return encode_some(rows, self.tokenizer, own, budget, job.name, self.longest, vocabulary=vocabulary)

        buffer = (own.shuffle_buffer_size or streams.BUFFER) * job.train.shuffle
        told(f"job {job.name}: reading the first samples")
        stream = streams.Stream(
            job.name,
            [path for path, _ in own.sources],
            seed,
            buffer,
            encode,
            streams.KEPT_BATCHES * size,
            max(streams.PROBE, size),
        )
        held_out = joined([self._encoded(one, job, budget, told) for one in eval_rows])
        encoded = Encoded(list(stream))
        _check_vocabulary(job.name, encoded, held_out, vocabulary)
        data = streams.StreamData(job.name, stream, job.train, seed, self.max_steps)
        _check_scheduler(job, data)
        notes = [note for one in eval_rows for note in one.read.notes] + _doubts(job, data)
        notes += _cut_samples(job.name, encoded, held_out)
        most, prompts = min(own.max_length, budget, self.longest), self._prompts(job)
        return PreparedJob(
            job, data, encoded, held_out, spec, *self._counts(spec), prompts, most, self._on_experts(spec)
        ), notes  # fmt: skip

    def _counts(self, spec: AdapterSpec) -> tuple[int, int]:
        """Parameters of an adapter, and those that one token meets."""
        top_k = _number(self.skeleton.config.get_text_config(), "num_experts_per_tok", 1)
        return trainable_parameters(spec, self.skeleton), trainable_parameters(spec, self.skeleton, top_k)

    def _on_experts(self, spec: AdapterSpec) -> int:
        return trainable_parameters(spec, self.skeleton) - trainable_parameters(spec, self.skeleton, 0)

    def _prompts(self, job: JobConfig) -> list[Prompt]:
        texts, new = self.run.prompts_of(job), self.run.sample_max_new_tokens
        return encode_prompts(texts, self.tokenizer, job.data, new, self.longest, job.name)

    def _encoded(self, rows: Rows, job: JobConfig, budget: int, told: Told) -> Encoded:
        settings = job.data.model_dump_json(exclude={"path", "eval_path"})
        if rows.stamp is None:  # it may be something else the next time
            return self._newly_encoded(rows, job, budget, told)
        key = (rows.path, rows.stamp, settings, budget, job.train.trainer)
        if key not in self._known:
            self._known[key] = self._newly_encoded(rows, job, budget, told)
        return self._known[key]

    def _newly_encoded(self, rows: Rows, job: JobConfig, budget: int, told: Told) -> Encoded:
        read = rows.read
        encoded = encode_for(
            job.train.trainer, read.rows, self.tokenizer, job.data, budget, job.name, self.longest, told, self.shown
        )
        encoded.skipped[:0] = read.skipped
        return encoded


def prepare(
    run: Run,
    max_steps: int | None = None,
    resumed: bool = False,
    told: Told = silent,
    gone: Mapping[str, str] | None = None,
    budgets: Mapping[str, int] | None = None,
) -> PreparedRun:
    """Read, encode and match everything. Raises InputError at the first thing that cannot work.

    Args:
        run: the checked run file.
        max_steps: train no job for more optimizer steps than this.
        resumed: leave out jobs whose data is no longer there, as long as one is left.
        told: hears what is being done.
        gone: jobs of a resumed run that take no part any more, and why.
        budgets: of jobs that joined a run whose budget is its own choice, the most tokens of a sample.
    """
    device = choose_device(run.device)
    check_liger(run.liger, device, run.dtype)
    if run.quantization is not None and run.quantization.method in MADE:
        check_quantization(run.quantization, device)
    gone, budgets = gone or {}, budgets or {}
    left_out = _jobs_without_data(run, gone) if resumed else {}
    run_jobs = [job for job in trained(run) if job.name not in left_out and job.name not in gone]
    configs = {job.name: adapter_config(job, run) for job in run_jobs}
    for job in run_jobs:
        check_optim(job, device, run.dtype)
    reader = Reader(told)
    rows = {job.name: reader.rows(job) for job in run_jobs}
    eval_rows = {job.name: reader.held_out(job) for job in run_jobs}
    told(f"laying out {run.base_model}")
    skeleton = load_skeleton(run)
    quantization, in_codes = _quantization(run, skeleton, device)
    _check_router_loss(run, skeleton)
    specs = {job.name: adapter_spec(job, configs[job.name], skeleton) for job in run_jobs}
    for name, spec in specs.items():
        _check_parameters(run, name, spec, quantization)
    asks = _asks(run, skeleton, specs, bool(left_out))
    warnings = (
        [note for spec in specs.values() for note in spec.notes]
        + _doubts_of_starts(run, run_jobs)
        + [
            f"job {name!r} {LEFT_OUT}: {why}; --resume takes it up again when that is back"
            for name, why in left_out.items()
        ]
    )
    tokenizer = load_tokenizer(run)
    auto = run.max_tokens_per_microbatch == "auto"
    budget = 2**31 if auto else int(run.max_tokens_per_microbatch)
    encoder = Encoder.of(run, skeleton, tokenizer, max_steps)
    vision = vision_of(run, skeleton, [one for of_job in (rows, eval_rows) for some in of_job.values() for one in some])
    if vision is not None:
        encoder.shown = Shown(vision)
        tokenizer.chat_template = vision.chat_template or tokenizer.chat_template
    jobs = []
    for job in run_jobs:
        most = budgets.get(job.name, budget) if auto else budget
        one, doubts = encoder.job(job, specs[job.name], rows[job.name], eval_rows[job.name], most, told)
        jobs.append(one)
        warnings += doubts
    left_out |= gone
    prepared = PreparedRun(
        run, tokenizer, budget, ModelShape.of(skeleton), jobs, warnings, left_out, asks, quantization, encoder, vision,
        in_codes,
    )  # fmt: skip
    _check_parallel(prepared, skeleton)
    if auto:
        prepared.budget = max(AUTO_BUDGET[device.type], prepared.longest)
    return prepared


def vision_of(run: Run, skeleton: PreTrainedModel, rows: Sequence[Rows]) -> Vision | None:
    """What the base model is given for images, where rows have some. Raises InputError where it reads none here."""
    if not any(row.images for some in rows for row in some.read.rows):
        return None
    return Vision.of(base_path(run.base_model), run.revision, skeleton.config)


def _quantization(
    run: Run, skeleton: PreTrainedModel, device: torch.device
) -> tuple[QuantizationConfig | None, tuple[int, int]]:
    """How the base model is to be quantised, or is, and what its codes take. Raises InputError where that cannot be, or not
    with other settings."""
    path = base_path(run.base_model)
    found = check_stored(run.quantization, skeleton.config, path)
    saved = stored_as(skeleton.config, path) is not None
    if found is not None and (run.quantization is None or found.method not in MADE or saved):
        check_quantization(found, device, f"base_model {path!r}")
        try:
            run.check_quantized(f"base_model {path!r} is saved as {found.described}")
        except ValueError as error:
            raise InputError(str(error)) from None
    return found, (0, 0) if found is None else codes_in(skeleton, found, path, getattr(torch, run.dtype))


def _check_router_loss(run: Run, skeleton: PreTrainedModel) -> None:
    """Raises InputError where the configuration of a model asks for a loss of its routers, which is of whole microbatches."""
    config = skeleton.config.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", None)
    if getattr(config, "output_router_logits", False) and weight:
        raise InputError(
            f"base_model {base_path(run.base_model)!r}: its config.json has output_router_logits: true, so transformers adds "
            f"{weight:g} (router_aux_loss_coef) times a load-balancing loss over all tokens that are computed together, with "
            "which jobs would change each other; set output_router_logits to false there"
        )


def _check_parameters(run: Run, job: str, spec: AdapterSpec, quantization: QuantizationConfig | None) -> None:
    """Raises InputError where experts or routers are adapted together with what does not serve them."""
    if spec.parameter is None:
        return
    parallel = run.parallel
    asked = {
        f"parallel.tensor: {parallel.tensor}": parallel.tensor > 1,
        f"parallel.pipeline: {parallel.pipeline}": parallel.stages > 1,
        f"parallel.shard_base: {str(parallel.shard_base).lower()}": parallel.is_sharded,
        "cuda_graphs: true": run.cuda_graphs is True,
        "quantised base weights": quantization is not None,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise InputError(
                f"job {job!r} adapts {spec.parameter}, experts or a router, which {what} does not serve in this version; leave "
                "that out, or name linear layers alone in target_modules"
            )


def _check_parallel(prepared: PreparedRun, skeleton: PreTrainedModel) -> None:
    """Raises InputError where the model cannot be divided as the run file asks."""
    parallel, layers = prepared.run.parallel, prepared.shape.layers
    asked = {
        "parallel.tensor": parallel.tensor > 1, "parallel.pipeline": parallel.stages > 1,
        "parallel.shard_base": parallel.is_sharded, "parallel.expert": parallel.expert > 1,
        "quantization": prepared.quantization is not None,
    }  # fmt: skip
    for key in (key for key, is_asked in asked.items() if is_asked):
        for job in prepared.jobs:
            found = whole_alone(job.spec, skeleton, quantized=key == "quantization")
            if found and key != "parallel.expert":
                raise InputError(f"job {job.config.name!r}: {found}, which {key} does not take; leave one of them out")
            if key != "quantization" and job.has_images:
                raise InputError(
                    f"job {job.config.name!r}: its data has images, which {key} does not take in this version; leave it out"
                )
            if key not in ("quantization", "parallel.expert") and (trainer := job.config.train.trainer) != "sft":
                raise InputError(
                    f"job {job.config.name!r}: train.trainer is {trainer}, which this version trains on devices that hold the "
                    f"whole base model; leave {key} out, or let the jobs have trainer sft"
                )
    if parallel.offload_base and choose_device(prepared.run.device).type == "cpu":
        prepared.warnings.append(
            "parallel.offload_base changes nothing here: on a CPU weights are on the host as it is"
        )
    if parallel.tensor > 1:
        check_cut(skeleton, parallel.tensor)
    if parallel.expert > 1:
        check_experts(skeleton, parallel.expert)
    if parallel.stages > layers:
        raise InputError(
            f"parallel.pipeline is {parallel.stages}, but the model has {layers} layers; give at most {layers}"
        )
    if parallel.stages > 1:
        check_stages(skeleton, layers, prepared.adapted)


def whole_alone(spec: AdapterSpec, skeleton: PreTrainedModel, quantized: bool = False) -> str | None:
    """What a job trains that needs a base model in one piece, or one of floats; None where it is linear layers of layers."""
    head = skeleton.get_output_embeddings()
    if spec.parameter is not None:
        return f"{spec.parameter} is adapted, experts or a router"
    for path, own in spec.modules.items():
        module = skeleton.get_submodule(path)
        if is_linear(module) and type(module) not in LINEAR:
            return f"{path} is adapted, of type {type(module).__name__}"
        if not quantized and (own.kind != "linear" or module is head):
            return f"{path} is trained, outside of the linear layers inside of the model"
        if quantized and own.kind in ("copy", "tokens") and is_linear(module) and module is not head:
            return f"a copy of {path} is trained"
    return None


def needs_whole_base(prepared: PreparedRun, staged: bool = False) -> bool:
    """Whether a job takes the whole base model on every device. staged: or all of its layers."""
    return any(needs_whole(job, prepared, staged) is not None for job in prepared.jobs)


def needs_whole(job: PreparedJob, prepared: PreparedRun, staged: bool = False) -> str | None:
    """What of a job takes the whole base model on every device; None where a part does. staged: a part that is some layers."""
    if job.prompts and staged:
        return "it has sample_prompts"
    if job.has_images:
        return "its data has images"
    if (trainer := job.config.train.trainer) != "sft":
        return f"train.trainer is {trainer}"
    return None if prepared.encoder is None else whole_alone(job.spec, prepared.encoder.skeleton)


class Reader:
    """Reads the rows of jobs, those of several jobs with one path once."""

    def __init__(self, told: Told = silent) -> None:
        self.told = told
        self._known: dict[tuple[str, str], Rows] = {}

    def rows(self, job: JobConfig) -> list[Rows]:
        """Of each of a job's sources; none of those that are read in training."""
        return [] if job.data.streaming else [self._rows(path, job) for path, _ in job.data.sources]

    def held_out(self, job: JobConfig) -> list[Rows]:
        return [self._rows(path, job) for path in job.data.eval_paths]

    def _rows(self, path: str, job: JobConfig) -> Rows:
        key = path, job.data.on_bad_row
        if key not in self._known:
            stamp = None
            with contextlib.suppress(OSError):  # read_data says what is wrong
                found = os.stat(path)
                stamp = (found.st_mtime_ns, found.st_size, found.st_ino) if os.path.isfile(path) else None
            self._known[key] = Rows(path, read_data(path, job.name, self.told, job.data.on_bad_row), stamp)
        return self._known[key]


def prepare_more(prepared: PreparedRun, jobs: list[JobConfig], budget: int) -> tuple[list[PreparedJob], list[str]]:
    """Prepare jobs that join a run that trains. Nothing of the run changes.

    Args:
        budget: tokens of a microbatch by now.

    Returns:
        They, and what should be known of them.

    Raises:
        InputError: as prepare.
    """
    run, encoder = prepared.run, prepared.encoder
    assert encoder is not None
    configs = {job.name: adapter_config(job, run) for job in jobs}
    for job in jobs:
        check_optim(job, choose_device(run.device), run.dtype)
    reader, out, notes = Reader(), [], _doubts_of_starts(run, jobs)
    for job in jobs:
        spec = adapter_spec(job, configs[job.name], encoder.skeleton)
        _check_parameters(run, job.name, spec, prepared.quantization)
        if prepared.quantization is not None and (found := whole_alone(spec, encoder.skeleton, quantized=True)):
            raise InputError(f"job {job.name!r}: {found}, which quantization does not take; leave one of them out")
        one, doubts = encoder.job(job, spec, reader.rows(job), reader.held_out(job), budget, silent)
        out.append(one)
        notes += spec.notes + doubts
    return out, notes


def asks_of_more(prepared: PreparedRun, jobs: list[PreparedJob]) -> dict[str, Ask]:
    """How the layers of jobs that join are to be computed, by module path."""
    assert prepared.encoder is not None
    return _asks(prepared.run, prepared.encoder.skeleton, {job.config.name: job.spec for job in jobs}, True)


def _asks(run: Run, skeleton: PreTrainedModel, specs: dict[str, AdapterSpec], partly: bool) -> dict[str, Ask]:
    """How adapted layers are to be computed. partly: a pattern may be for the layers of a job that is left out."""
    adapted = {path for spec in specs.values() for path, own in spec.modules.items() if own.kind == "linear"}
    linear = [name for name, module in skeleton.named_modules() if partly or name in adapted]
    linear += sorted({path for spec in specs.values() for path, own in spec.modules.items() if own.kind == "router"})
    plan = run.plans.plan
    if isinstance(plan, dict):
        try_patterns(plan, linear, "plans", "plan")
    try:
        return asks_of(plan, run.plans.lossy, run.plans.prefer, linear)
    except ValueError as error:
        raise InputError(f"plans: {error}") from None


def _doubts_of_starts(run: Run, jobs: list[JobConfig]) -> list[str]:
    """Adapters that jobs begin with and that are of another base model, as far as one can tell."""
    out = []
    for job in jobs:
        if job.adapter.init_from is not None:
            note = base_note(job.adapter.init_from, base_path(run.base_model))
            out += [f"job {job.name!r}: {note}"] if note else []
    return out


def _cut_samples(job: str, encoded: Encoded, eval_encoded: Encoded) -> list[str]:
    """What was cut or left out of a job's data."""
    out = []
    for what, part in (("training", encoded), ("held-out", eval_encoded)):
        if part.truncated:
            out.append(f"job {job!r}: {part.truncated} {what} samples were cut to max_length")
        if part.dropped:
            out.append(f"job {job!r}: {part.dropped} {what} samples were dropped as too long")
        if part.skipped:
            out.append(
                f"job {job!r}: {len(part.skipped)} {what} rows are no samples and were left out, the first: {part.skipped[0]}"
            )
    return out


def _check_vocabulary(job: str, encoded: Encoded, eval_encoded: Encoded, vocabulary: int) -> None:
    largest = max(int(sample.ids.max()) for sample in encoded.samples + eval_encoded.samples)
    if largest >= vocabulary:
        raise InputError(f"job {job!r}: its data has token {largest}, the model has embeddings for {vocabulary}")


def _check_scheduler(job: JobConfig, data: JobData) -> None:
    try:
        learning_rates(job.train, data.configured_steps)
    except ValueError as error:
        raise InputError(f"job {job.name!r}: train.lr_scheduler_type {job.train.lr_scheduler_type}: {error}") from None


def _jobs_without_data(run: Run, gone: Collection[str]) -> dict[str, str]:
    """Jobs of which a file has gone since the run began, with the name of the file; none where it is so of all jobs.

    What never was a file here, a data set of the hub, is not looked for.
    """
    lost, jobs = {}, [job for job in trained(run) if job.name not in gone]
    for job in jobs:
        paths = [*(path for path, _ in job.data.sources), *job.data.eval_paths]
        start = job.adapter.init_from
        missing = [path for path in paths if not is_there(path)] + [start] * (
            start is not None and not Path(start).exists()
        )
        if missing:
            lost[job.name] = f"{missing[-1]} does not exist"
    return lost if len(lost) < len(jobs) else {}


def _doubts(job: JobConfig, data: JobData) -> list[str]:
    """What can be trained, but is hardly meant."""
    train, out = job.train, []
    if (warmup := train.warmup_of(data.configured_steps)) >= data.configured_steps and train.warmup_steps:
        out.append(
            f"warmup_steps {warmup} is no less than its {data.configured_steps} optimizer steps, so the learning "
            f"rate never comes to {train.learning_rate:g}"
        )
    if train.global_batch_size > data.num_samples:
        out.append(
            f"global_batch_size {train.global_batch_size} is more than its {data.num_samples} samples, so every optimizer "
            "step takes all of them"
        )
    if {os.path.realpath(path) for path in job.data.eval_paths} & {
        os.path.realpath(path) for path, _ in job.data.sources
    }:
        out.append("eval_path is the training data itself, so the held-out loss does not tell what was learnt")
    return [f"job {job.name!r}: {text}" for text in out]


def trainable_parameters(spec: AdapterSpec, model: torch.nn.Module, top_k: int | None = None) -> int:
    """Number of parameters of an adapter on the model, which may be without weights. top_k: of so many experts of a layer."""
    total = 0
    for path, module in spec.modules.items():
        own = sum(math.prod(shape) for shape in shapes_at(model, path, module).values())
        if module.kind == "experts" and top_k is not None:
            experts: Any = model.get_submodule(path.rpartition(".")[0])
            own = own * top_k // experts.num_experts
        total += own
    return total


def adapter_config(job: JobConfig, run: Run) -> LoraConfig:
    """What a job's adapter is, in PEFT's terms: as the run file says, or the folder that it begins with."""
    path = base_path(run.base_model)
    if job.adapter.init_from is not None:
        return continued_config(job.adapter, path, run.revision, job.name)
    return peft_config(job.adapter, path, run.revision)


def adapter_spec(job: JobConfig, config: LoraConfig, skeleton: PreTrainedModel) -> AdapterSpec:
    """The layers that a job adapts, held against the adapter that it begins with. config: from adapter_config."""
    if job.adapter.expert_rank != "r":
        config = divided_ranks(config, skeleton, job.name)
    spec = resolve(config, skeleton, job.name, job.adapter.dora_dropout == "peft")
    embedding = next((path for path, own in spec.modules.items() if own.kind == "embedding"), None)
    if embedding is not None and job.train.loraplus_lr_ratio is not None:
        raise InputError(
            f"job {job.name!r}: loraplus_lr_ratio does not go with an adapter of {embedding}, for which LoRA+ has a learning "
            "rate of its own; leave one of them out"
        )
    of_images = beside_decoder(skeleton)
    for path, own in spec.modules.items():
        if own.kind != "linear" and path in of_images:
            raise InputError(
                f"job {job.name!r}: {path} is part of the vision tower, of which linear layers alone are adapted in this "
                "version; leave it out of modules_to_save and target_modules, or name whole paths in the language model"
            )
    if job.adapter.init_from is not None:
        check_start(job.adapter, spec, skeleton, job.name)
    return spec
