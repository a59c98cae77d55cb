"""Everything that can be wrong with a run is found here, before any training: data, tokenizer, targets, output folder."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import PreTrainedModel

import packlora
from packlora.activity import Told, silent
from packlora.adapters.files import base_note, check_start, continued_config
from packlora.adapters.spec import AdapterSpec, peft_config, resolve
from packlora.base.demo_model import base_path
from packlora.base.fingerprint import Fingerprint
from packlora.base.liger import check_liger
from packlora.base.model import choose_device, load_skeleton, load_tokenizer
from packlora.config import JobConfig, Run
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded, encode_rows
from packlora.data.readers import is_file_name, read_rows
from packlora.errors import InputError
from packlora.files import LOCK, TEMPORARY
from packlora.runtime.job import learning_rates

AUTO_BUDGET = {"cpu": 2048, "cuda": 8192}
"""Tokens of a microbatch for max_tokens_per_microbatch: auto, by device, where no sample is longer and nothing better is
known (profiler.py)."""
LEFT_OUT = "is left out, the others go on"
FREE_TO_CHANGE = {
    "output_dir", "save_every", "save_total_limit", "eval_every", "gradient_checkpointing", "device",
    "max_tokens_per_microbatch", "schedule", "liger", "keep_outputs",
}  # fmt: skip
"""Keys of the run file that may differ when a run is resumed; of a job also how long it trains."""


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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What time and memory of a base model depend on.

    parameters: of the model; linear_parameters: of its linear layers without the output layer. attention, key_value: widths of
    queries and of keys. inner: width inside the MLP.
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

    @staticmethod
    def of(model: PreTrainedModel) -> ModelShape:
        config = model.config.get_text_config()
        hidden = _number(config, "hidden_size", 1)
        heads = _number(config, "num_attention_heads", 1)
        head_dim = _number(config, "head_dim", hidden // heads)
        head = model.get_output_embeddings()
        linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
        return ModelShape(
            model.config.model_type,
            sum(parameter.numel() for parameter in model.parameters()),
            sum(module.weight.numel() for module in linear),
            _number(config, "num_hidden_layers", 1),
            hidden,
            heads * head_dim,
            _number(config, "num_key_value_heads", heads) * head_dim,
            _number(config, "intermediate_size", _number(config, "ffn_dim", 4 * hidden)),
            model.get_input_embeddings().weight.shape[0],
        )


def _number(config: Any, name: str, otherwise: int) -> int:
    """Of a configuration; the mean where layers differ: as a list (Gemma 3n), or in configurations of their own (Gemma 4)."""
    values = [getattr(layer, name, None) for layer in getattr(config, "per_layer_config", None) or [config]]
    numbers = [n for value in values for n in (value if isinstance(value, list | tuple) else [value]) if n]
    return round(sum(numbers) / len(numbers)) if numbers else otherwise


@dataclass(slots=True)
class Prepared:
    """A checked run.

    budget: tokens of a microbatch, for auto the usual one of the device. left_out: jobs of a resumed run whose data is gone,
    with the reason; `jobs` are the others.
    """

    run: Run
    tokenizer: Any
    budget: int
    shape: ModelShape
    jobs: list[PreparedJob]
    warnings: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, also of those held out."""
        return max(self.longest_by_job.values())

    @property
    def longest_by_job(self) -> dict[str, int]:
        """Tokens of the longest sample of each job."""
        return {
            job.config.name: max(s.num_tokens for s in job.encoded.samples + job.eval_encoded.samples)
            for job in self.jobs
        }

    @property
    def trainable(self) -> int:
        """Trainable parameters of all jobs."""
        return sum(job.trainable for job in self.jobs)


def prepare(run: Run, max_steps: int | None = None, resumed: bool = False, told: Told = silent) -> Prepared:
    """Read, encode and match everything. Raises InputError at the first thing that cannot work.

    Args:
        run: the checked run file.
        max_steps: train no job for more optimizer steps than this.
        resumed: leave out jobs whose data is no longer there, as long as one is left.
        told: hears what is being done.
    """
    device = choose_device(run.device)
    check_liger(run.liger, device, run.dtype)
    left_out = _jobs_without_data(run) if resumed else {}
    run_jobs = [job for job in run.jobs if job.name not in left_out]
    configs = {job.name: adapter_config(job, run) for job in run_jobs}
    rows = {job.name: read_rows(job.data.path, job.name, told) for job in run_jobs}
    eval_rows = {job.name: read_rows(job.data.eval_path, job.name, told) for job in run_jobs if job.data.eval_path}
    told(f"laying out {run.base_model}")
    skeleton = load_skeleton(run)
    specs = {job.name: adapter_spec(job, configs[job.name], skeleton) for job in run_jobs}
    warnings = []
    for job in run_jobs:
        if job.adapter.init_from is not None:
            note = base_note(job.adapter.init_from, base_path(run.base_model))
            warnings += [f"job {job.name!r}: {note}"] if note else []
    tokenizer = load_tokenizer(run)
    auto = run.max_tokens_per_microbatch == "auto"
    budget = 2**31 if auto else int(run.max_tokens_per_microbatch)
    context = int(getattr(skeleton.config.get_text_config(), "max_position_embeddings", None) or 2**31)
    jobs = []
    warnings += [
        f"job {name!r} {LEFT_OUT}: {why}; --resume takes it up again when that is back"
        for name, why in left_out.items()
    ]
    for job in run_jobs:
        encoded = encode_rows(rows[job.name], tokenizer, job.data, budget, job.name, context, told)
        eval_encoded = Encoded([])
        if job.name in eval_rows:
            eval_encoded = encode_rows(eval_rows[job.name], tokenizer, job.data, budget, job.name, context, told)
        for what, part in (("training", encoded), ("held-out", eval_encoded)):
            if part.truncated:
                warnings.append(f"job {job.name!r}: {part.truncated} {what} samples were cut to max_length")
            if part.dropped:
                warnings.append(f"job {job.name!r}: {part.dropped} {what} samples were dropped as too long")
        vocabulary = skeleton.get_input_embeddings().weight.shape[0]
        largest = max(int(sample.ids.max()) for sample in encoded.samples + eval_encoded.samples)
        if largest >= vocabulary:
            raise InputError(
                f"job {job.name!r}: the tokenizer gives token {largest}, the model has embeddings for {vocabulary}"
            )
        data = JobData(job.name, encoded.samples, job.train, run.seed_of(job), max_steps)
        try:
            learning_rates(job.train, data.configured_steps)
        except ValueError as error:
            raise InputError(
                f"job {job.name!r}: train.lr_scheduler_type {job.train.lr_scheduler_type}: {error}"
            ) from None
        warnings += _doubts(job, data)
        trainable = trainable_parameters(specs[job.name], skeleton)
        jobs.append(PreparedJob(job, data, encoded, eval_encoded, specs[job.name], trainable))
    prepared = Prepared(run, tokenizer, budget, ModelShape.of(skeleton), jobs, warnings, left_out)
    if auto:
        prepared.budget = max(AUTO_BUDGET[device.type], prepared.longest)
    return prepared


def _jobs_without_data(run: Run) -> dict[str, str]:
    """Jobs of which a file has gone since the run began, with the name of the file; none where it is so of all jobs.

    What never was a file here, a data set of the hub, is not looked for.
    """
    gone = {}
    for job in run.jobs:
        files = [path for path in (job.data.path, job.data.eval_path) if path and is_file_name(path)]
        for path in [*files, job.adapter.init_from]:
            if path is not None and not Path(path).exists():
                gone[job.name] = f"{path} does not exist"
    return gone if len(gone) < len(run.jobs) else {}


def _doubts(job: JobConfig, data: JobData) -> list[str]:
    """What can be trained, but is hardly meant."""
    train, out = job.train, []
    if train.warmup_steps >= data.configured_steps:
        out.append(
            f"warmup_steps {train.warmup_steps} is no less than its {data.configured_steps} optimizer steps, so the learning "
            f"rate never comes to {train.learning_rate:g}"
        )
    if train.global_batch_size > len(data.samples):
        out.append(
            f"global_batch_size {train.global_batch_size} is more than its {len(data.samples)} samples, so every optimizer "
            "step takes all of them"
        )
    if job.data.eval_path is not None and os.path.realpath(job.data.eval_path) == os.path.realpath(job.data.path):
        out.append("eval_path is the training data itself, so the held-out loss does not tell what was learnt")
    return [f"job {job.name!r}: {text}" for text in out]


def trainable_parameters(spec: AdapterSpec, model: torch.nn.Module) -> int:
    """Number of parameters of an adapter on the model, which may be without weights."""
    total = 0
    for path, module in spec.modules.items():
        rows, cols = model.get_submodule(path).weight.shape  # type: ignore[misc]
        total += module.rank * (rows + cols) + (rows if module.use_dora else 0) + (rows if module.train_bias else 0)
    return total


def adapter_config(job: JobConfig, run: Run) -> LoraConfig:
    """What a job's adapter is, in PEFT's terms: as the run file says, or the folder that it begins with."""
    path = base_path(run.base_model)
    if job.adapter.init_from is not None:
        return continued_config(job.adapter, path, run.revision, job.name)
    return peft_config(job.adapter, path, run.revision)


def adapter_spec(job: JobConfig, config: LoraConfig, skeleton: PreTrainedModel) -> AdapterSpec:
    """The layers that a job adapts, held against the adapter that it begins with. config: from adapter_config."""
    spec = resolve(config, skeleton, job.name, job.adapter.dora_dropout == "peft")
    if job.adapter.init_from is not None:
        check_start(job.adapter, spec, skeleton, job.name)
    return spec


# --- output folder -----------------------------------------------------------------------------------------------------


class _SavedJob(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    data_hash: str
    samples: int
    eval_samples: int
    seed: int
    start_hash: str | None = None


class _SavedSchedule(BaseModel):
    budget: int = Field(ge=1, le=2**31, strict=True)


class _SavedModel(BaseModel):
    fingerprint: Fingerprint


class SavedRun(BaseModel):
    """What a run.json must say for its run to be continued. saved: step of each job's newest checkpoint."""

    model_config = ConfigDict(strict=True)

    id: str
    created: str
    config: Run
    versions: dict[str, str]
    warnings: list[str]
    jobs: dict[str, _SavedJob]
    schedule: _SavedSchedule
    model: _SavedModel
    saved: dict[str, int]


def make_output(folder: Path) -> None:
    """Make the output folder, and sure that it can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"{TEMPORARY}probe-{os.getpid()}"
        probe.unlink(missing_ok=True)
        probe.touch(exist_ok=False)  # nor does it follow a link
        probe.unlink(missing_ok=True)  # a run that holds the folder may have tidied up
    except OSError as error:
        raise InputError(f"output_dir {folder}: cannot write there: {error}") from None


def check_output(run: Run, resume: bool) -> SavedRun | None:
    """Make sure that the output folder holds nothing that would be lost.

    Returns:
        What the run.json of the run to resume says, or None for a fresh run.

    Raises:
        InputError: the folder holds something else, or holds a run that differs from this one.
    """
    folder = Path(run.output_dir)
    content = sorted(
        path.name for path in folder.iterdir() if not path.name.startswith(TEMPORARY) and path.name != LOCK
    )
    if not content:
        return None
    if "run.json" not in content:
        raise InputError(
            f"output_dir {folder} is not empty and holds no run (found {content[0]}); choose another folder"
        )
    if not resume:
        raise InputError(
            f"output_dir {folder} already holds a run; continue it with --resume, or choose another folder"
        )
    saved = _read_saved(folder / "run.json")
    changed = _changes(saved.config.model_dump(mode="json"), run.model_dump(mode="json"))
    changed += [] if "seed" in changed else _other_seeds(saved, run)
    if changed:
        raise InputError(
            f"output_dir {folder} holds a run with other settings, which cannot be continued: {', '.join(changed)} changed"
        )
    if missing := sorted({job.name for job in run.jobs} - saved.jobs.keys()):
        raise InputError(f"output_dir {folder}: run.json cannot be read: jobs: {missing[0]!r} is missing")
    return saved


def _read_saved(file: Path) -> SavedRun:
    kept = "the checkpoints beside it are as they were"
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise InputError(f"output_dir {file.parent}: run.json cannot be read: it is not a plain file; {kept}")
        return SavedRun.model_validate_json(file.read_bytes())
    except OSError as error:
        raise InputError(f"output_dir {file.parent}: run.json cannot be read: {error.strerror}; {kept}") from None
    except ValidationError as error:
        found = error.errors()[0]
        where = ".".join(map(str, found["loc"]))
        if found["type"] == "missing" and (where == "id" or where.endswith(".seed")):
            kept = "an earlier packlora wrote it, without checksums and seeds of jobs; continue the run with that one"
        raise InputError(
            f"output_dir {file.parent}: run.json cannot be read: {where}{': ' * bool(where)}{found['msg']}; {kept}"
        ) from None


def _other_seeds(saved: SavedRun, run: Run) -> list[str]:
    """Jobs whose seed, their own or the run's, is not the one that was recorded."""
    return [
        f"job {job.name!r} seed"
        for job in run.jobs
        if job.name in saved.jobs and saved.jobs[job.name].seed != run.seed_of(job)
    ]


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    changed = [key for key in now if key != "jobs" and key not in FREE_TO_CHANGE and before[key] != now[key]]
    if [job["name"] for job in before["jobs"]] != [job["name"] for job in now["jobs"]]:
        return [*changed, "jobs (names or order)"]
    for old, new in zip(before["jobs"], now["jobs"], strict=True):
        for section in ("data", "adapter", "train"):
            free = {"num_train_epochs", "max_steps"} if section == "train" else set()
            if section == "train" and new["train"]["lr_scheduler_type"] not in ("constant", "constant_with_warmup"):
                free = set()  # the learning rate of every step depends on the number of steps
            changed += [
                f"job {new['name']!r} {section}.{key}"
                for key in new[section]
                if key not in free and old[section][key] != new[section][key]
            ]
    return changed


# --- provenance --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Of Python and of the packages that can change a number."""
    out = {"python": platform.python_version(), "packlora": packlora.__version__}
    for package in ("torch", "triton", "transformers", "tokenizers", "peft", "safetensors", "numpy", "liger-kernel"):
        try:
            out[package] = version(package)
        except PackageNotFoundError:
            continue
    return out


def source_commit() -> str | None:
    """The git commit of packlora's own source, when it runs from a checkout."""
    here = Path(packlora.__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    result = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or None


def processor_name() -> str:
    """The CPU's model, as the system names it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
