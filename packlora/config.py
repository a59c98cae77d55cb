"""The run file: pydantic models, strict, with errors that name the job and the nearest known key.

Owns the shape and the defaults of a run (names follow PEFT's LoraConfig and transformers' TrainingArguments). What needs
the model, the tokenizer or the data to be checked is checked by whoever loads them.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from packlora.errors import InputError, quoted, shown

JOB_NAME = re.compile(r"[A-Za-z0-9._-]+")
RESERVED_NAMES = {
    ".", "..", ".lock", "run.json", "metrics.jsonl", "evals.jsonl", "microbatches.jsonl", "windows.jsonl", "report.html"
}  # fmt: skip
"""Not for jobs: a job's folder stands beside these files of the run."""
TEMPORARY = ".tmp-"  # as in files.py, which needs torch

MOST_TOKENS = 2**31 - 1
MOST_STEPS = 10**9
MOST_RANK = 2**16
LEAST_ALPHA, MOST_ALPHA = 1e-6, 1e6
"""Far beyond what is of use; so no scaling leaves float32, where it would end the run of the other jobs as well."""
MOST_PATTERNS, MOST_CHARACTERS = 10_000, 10_000
"""Names or patterns of an adapter, and characters of a regular expression."""
MOST_BYTES = 8 * 2**20
"""Of a run file; PyYAML reads about 100 kB a second."""
MOST_NESTED = 100
"""Brackets in brackets of a run file, and folders in folders of a path."""
MOST_PROBLEMS = 20
"""Lines of a refusal."""
_BATCH = "a job's train.global_batch_size is its samples per optimizer step; the run's max_tokens_per_microbatch decides memory"
_RANK, _EPOCHS, _LENGTH = "see a job's adapter.r", "see a job's train.num_train_epochs", "see a job's data.max_length"
_QUANTISED = "quantised base models are not there in this version"
OTHER_TOOLS = {
    "rank": _RANK, "lora_r": _RANK, "lora_rank": _RANK,
    "alpha": "see a job's adapter.lora_alpha", "dropout": "see a job's adapter.lora_dropout",
    "lora_target_modules": "see a job's adapter.target_modules",
    "lr": "see a job's train.learning_rate", "epochs": _EPOCHS, "num_epochs": _EPOCHS,
    "lr_scheduler": "see a job's train.lr_scheduler_type",
    "batch_size": _BATCH, "micro_batch_size": _BATCH, "per_device_train_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "warmup_ratio": "see a job's train.warmup_steps, in optimizer steps",
    "optim": "the optimizer is AdamW", "optimizer": "the optimizer is AdamW",
    "logging_steps": "every optimizer step is logged",
    "packing": "samples are always packed", "sample_packing": "samples are always packed",
    "sequence_len": _LENGTH, "max_seq_length": _LENGTH, "max_seq_len": _LENGTH,
    "bf16": "see the run's dtype: bfloat16", "fp16": "see the run's dtype: float16",
    "load_in_4bit": _QUANTISED, "load_in_8bit": _QUANTISED, "quantization_config": _QUANTISED,
    "save_steps": "see the run's save_every", "eval_steps": "see the run's eval_every",
    "datasets": "see a job's data.path", "dataset": "see a job's data.path", "model_name_or_path": "see the run's base_model",
}  # fmt: skip
"""Keys of other tools, with what stands for them here; the nearest known key would often mean something else."""


def _path_text(path: str) -> str:
    """A path or a hub id, with ~ as the home folder; what no file system can have as a name is refused."""
    if not path.strip():
        raise ValueError("is empty")
    if odd := next((char for char in path if unicodedata.category(char) in {"Cc", "Cs"}), None):
        raise ValueError(f"has the character {odd!r}, which is taken neither in paths nor in names")
    path = os.path.expanduser(path)
    if len(path.encode()) > 4095 or max(len(part.encode()) for part in path.split("/")) > 255:
        raise ValueError(f"is {quoted(path, 40)}, {len(path)} characters long; no file system has such a path")
    if path.count("/") > MOST_NESTED:
        raise ValueError(
            f"is {quoted(path, 40)}, {path.count('/')} folders in one another; at most {MOST_NESTED} are taken"
        )
    return path


PathText = Annotated[str, Field(min_length=1), AfterValidator(_path_text)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, validate_assignment=True, allow_inf_nan=False)


class DataConfig(_Strict):
    """Where a job's samples come from and how long they may be."""

    path: PathText
    """A .jsonl, .json or .parquet file, or a Hugging Face dataset id."""
    eval_path: PathText | None = None
    """Held-out samples in the same format; their loss is measured before and after training."""
    max_length: int = Field(2048, ge=2, le=MOST_TOKENS)
    """Longest sample in tokens."""
    truncate: Literal["error", "drop", "right"] = "error"
    """What to do with a longer sample."""


class AdapterConfig(_Strict):
    """The adapter of a job; the meaning of every key is PEFT's."""

    r: int = Field(16, ge=1, le=MOST_RANK)
    lora_alpha: float = Field(32, ge=LEAST_ALPHA, le=MOST_ALPHA)
    lora_dropout: float = Field(0.05, ge=0.0, lt=1.0)
    target_modules: str | list[str] = "all-linear"
    use_rslora: bool = False
    use_dora: bool = False
    dora_dropout: Literal["peft", "low_rank"] = "peft"
    """What lora_dropout drops in a DoRA adapter: as PEFT has it the base product that the magnitude scales as well, which costs
    a second base product; low_rank: the low-rank branch alone, as in LoRA."""
    bias: Literal["none", "all", "lora_only"] = "none"
    rank_pattern: dict[str, int] = Field(default_factory=dict)
    alpha_pattern: dict[str, float] = Field(default_factory=dict)
    init_from: PathText | None = None
    """A PEFT adapter folder to continue from; its adapter_config.json then gives the keys that are not set here."""

    @field_validator("target_modules")
    @classmethod
    def _some_target(cls, value: str | list[str]) -> str | list[str]:
        if not value or (isinstance(value, list) and not all(value)):
            raise ValueError("is empty; give all-linear, a list of module names or a regular expression")
        if isinstance(value, str):
            _check_regex(value, value)
        elif len(value) > MOST_PATTERNS:
            raise ValueError(f"has {len(value)} names; at most {MOST_PATTERNS} are taken")
        return value

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _values_in_range(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        least, most = (1, MOST_RANK) if info.field_name == "rank_pattern" else (LEAST_ALPHA, MOST_ALPHA)
        if len(value) > MOST_PATTERNS:
            raise ValueError(f"has {len(value)} patterns; at most {MOST_PATTERNS} are taken")
        for pattern, number in value.items():
            _check_regex(pattern, rf"(.*\.)?({pattern})$")  # as PEFT puts it together
            if not least <= number <= most:
                raise ValueError(f"has {number} for {quoted(pattern)}; it must be from {least:g} to {most:g}")
        return value


def _check_regex(pattern: str, used: str) -> None:
    """used: what the pattern becomes part of."""
    if len(pattern) > MOST_CHARACTERS:
        raise ValueError(f"has a pattern of {len(pattern)} characters; at most {MOST_CHARACTERS} are taken")
    try:
        re.compile(used)
    except (re.error, OverflowError, RecursionError) as error:  # the last two: x{99999999999}, ten thousand brackets
        raise ValueError(f"has {quoted(pattern)}, which is not a valid regular expression: {error}") from None


Scheduler = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt"
]


class TrainConfig(_Strict):
    """Optimization of one job (AdamW); the meaning of every key is that of transformers' TrainingArguments."""

    global_batch_size: int = Field(8, ge=1, le=MOST_STEPS)
    """Samples per optimizer step."""
    num_train_epochs: float = Field(1.0, gt=0, le=MOST_STEPS)
    max_steps: int = Field(-1, ge=-1, le=MOST_STEPS)
    """Optimizer steps; -1 lets num_train_epochs decide, a positive number overrides it."""
    learning_rate: float = Field(2e-4, gt=0, le=1e30)
    lr_scheduler_type: Scheduler = "constant"
    warmup_steps: int = Field(0, ge=0, le=MOST_STEPS)
    weight_decay: float = Field(0.0, ge=0, le=1e6)
    max_grad_norm: float = Field(1.0, ge=0, le=1e30)
    """Gradient norm of the job to clip at; 0 does not clip."""
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, ge=1e-30, le=1)
    shuffle: bool = True
    drop_last: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> TrainConfig:
        if self.max_steps == 0:
            raise ValueError("max_steps is 0, so nothing would be trained; give -1 or a positive number")
        if self.warmup_steps and self.lr_scheduler_type == "constant":
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, but the schedule 'constant' has no warm-up; "
                "use lr_scheduler_type: constant_with_warmup, or warmup_steps: 0"
            )
        return self


class JobConfig(_Strict):
    """One adapter to train: its data, its shape, its optimization."""

    name: str
    data: DataConfig
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    seed: int | None = Field(None, ge=0, lt=2**63)
    """Of its initial adapter, sample order and dropout; null: the run's. Equal seeds draw equally, whatever the names."""

    @field_validator("name")
    @classmethod
    def _safe_name(cls, name: str) -> str:
        if not JOB_NAME.fullmatch(name) or name in {".", ".."} or len(name) > 100:
            raise ValueError(
                f"is {quoted(name)}, which cannot be a folder name; use 1 to 100 of the characters A-Z a-z 0-9 . _ -"
            )
        if name.lower() in RESERVED_NAMES or name.lower().startswith(TEMPORARY):
            raise ValueError(f"is {name!r}, which packlora itself uses in output_dir; choose another name")
        return name


class ParallelConfig(_Strict):
    pipeline: int = Field(1, ge=1)
    tensor: int = Field(1, ge=1)
    expert: int = Field(1, ge=1)
    sequence_parallel: bool = False
    shard_base: bool = False

    @model_validator(mode="after")
    def _one_device(self) -> ParallelConfig:
        if self != ParallelConfig.model_construct():
            raise ValueError("this version trains on one device; leave parallel out or at its defaults")
        return self


class ScheduleConfig(_Strict):
    """How samples are shared out to microbatches; decides speed, not results."""

    method: Literal["auto", "greedy", "milp", "solo"] = "auto"
    """solo: jobs never share a microbatch. greedy: best fit. milp: integer programs. auto: these where greedy may be beaten."""
    padding_multiple: int = Field(1, ge=1, le=MOST_TOKENS)
    """Of a job's tokens in a microbatch, as some kernels need it; only `packlora plan` takes another than 1, to compare."""
    time_limit_s: float = Field(10, gt=0, le=1e6)
    """Emergency stop of an integer program; it normally ends earlier, at a number of nodes."""


class Run(_Strict):
    """A whole run: one frozen base model and the jobs that share it."""

    base_model: PathText
    """A local folder, a Hugging Face model id, or smollm2-135m for the packaged demo model."""
    revision: PathText | None = None
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Of the base model and the activations; adapters and optimizer state are float32 (float64 is for verification)."""
    device: str = Field("auto", max_length=100)
    """auto takes the GPU if there is one; cpu, cuda or cuda:1 insist."""
    output_dir: PathText
    seed: int = Field(0, ge=0, lt=2**63)
    max_tokens_per_microbatch: int | Literal["auto"] = 4096
    gradient_checkpointing: bool = False
    save_every: int = Field(50, ge=0)
    """Optimizer steps of a job between its checkpoints; 0 only at the end."""
    save_total_limit: int | None = Field(2, ge=1)
    """Checkpoints of a job to keep, the newest ones; null keeps all."""
    eval_every: int = Field(0, ge=0)
    """Optimizer steps of a job between evaluations of its eval_path; 0 only before and after training."""
    trust_remote_code: bool = False
    liger: bool | Literal["auto"] = "auto"
    """liger-kernel's norms, rotary embedding and gated activations; auto takes what is installed and fits, on a GPU."""
    keep_outputs: bool = False
    """DoRA layers keep their outputs in the place of a product as large. Not for models with kernels, other than liger's, that
    write into the outputs of linear layers behind autograd's back."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    jobs: list[JobConfig] = Field(min_length=1)

    def seed_of(self, job: JobConfig) -> int:
        """The seed that a job draws from: its own or the run's."""
        return self.seed if job.seed is None else job.seed

    @field_validator("max_tokens_per_microbatch")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 2 <= value <= MOST_TOKENS:
            raise ValueError(f"is {value}; give auto or a number of tokens, at least 2 and at most {MOST_TOKENS}")
        return value

    @model_validator(mode="after")
    def _unique_names(self) -> Run:
        seen: dict[str, str] = {}
        for job in self.jobs:  # case-insensitive file systems would mix two such folders
            if job.name.lower() in seen:
                raise ValueError(
                    f"jobs: the name {job.name!r} is used twice (also as {seen[job.name.lower()]!r}); "
                    "job names become folders and must be unique, ignoring case"
                )
            seen[job.name.lower()] = job.name
        return self


# --- reading -----------------------------------------------------------------------------------------------------------


class _RunFileLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and takes plain words as YAML 1.2 does: 2e-4 is a number; yes, 1:30, 1_000 and
    2026-01-01 are texts. So is 010, which is 8 in YAML 1.1 and 10 in YAML 1.2: a number that is no number to all is refused.
    """

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= MOST_NESTED:  # PyYAML looks back over all open brackets at each one
            raise RecursionError
        super().fetch_flow_collection_start(token)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, _ in node.value:  # as written: merge keys (<<) are not filled in yet
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise InputError(
                    f"{self.name}, line {key_node.start_mark.line + 1}: "
                    f"the key {key_node.value!r} stands here a second time"
                )
            seen.add(key_node.value)
        return node


_RunFileLoader.yaml_implicit_resolvers = {}
for _tag, _words, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+.0123456789")),
    ("merge", r"<<", ["<"]),
):  # fmt: skip
    _RunFileLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_words})\Z"), _first)


def _parse_yaml(text: str, name: str) -> Any:
    try:
        loader = _RunFileLoader(text)
        loader.name = name
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError) as error:  # ValueError: e.g. a number of thousands of digits
        raise InputError(f"{name} is not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(f"{name}: lists or mappings are nested too deep in one another to be read") from None


def load_run(path: str | Path, overrides: list[str] | None = None) -> Run:
    """Read and check a run file.

    Args:
        path: the YAML file.
        overrides: `dotted.key=value` strings, e.g. `jobs.0.train.learning_rate=1e-4`; a job may be named by its number
            or its name.

    Raises:
        InputError: the file cannot be read, or anything in it is unknown, misspelt, of the wrong type or out of range.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        text = raw.decode()
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that cannot be
        raise InputError(f"cannot read the run file {path}: {error}") from None
    if len(raw) > MOST_BYTES:
        raise InputError(f"the run file {path} is larger than {MOST_BYTES // 2**20} MiB; this is not a run file")
    tree = _parse_yaml(text, str(path))
    if not isinstance(tree, dict):
        raise InputError(f"{path}: a run file is a mapping with base_model, output_dir and jobs; found {_kind(tree)}")
    for override in overrides or []:
        _apply_override(tree, override)
    run = parse_run(tree, str(path))
    for job in run.jobs:  # a relative data path is looked up from the current folder, then from the run file's
        job.data.path = _beside(path, job.data.path)
        if job.data.eval_path is not None:
            job.data.eval_path = _beside(path, job.data.eval_path)
        if job.adapter.init_from is not None:
            job.adapter.init_from = _beside(path, job.adapter.init_from)
    return run


def run_from(tree: Mapping[str, Any], overrides: list[str] | None = None) -> Run:
    """Check a run that is a mapping of the keys of a run file; it is not changed. Overrides and errors as in load_run."""
    own = copy.deepcopy(dict(tree))
    for override in overrides or []:
        _apply_override(own, override)
    return parse_run(own, "the run")


def _beside(run_file: Path, path: str) -> str:
    beside = run_file.parent / path
    return str(beside) if not os.path.exists(path) and os.path.exists(beside) else path


def parse_run(tree: dict[str, Any], source: str) -> Run:
    """Validate a parsed run file. Raises InputError that lists every problem, one a line, with the job's name."""
    try:
        return Run.model_validate(tree)
    except ValidationError as error:
        errors = error.errors()
        lines = [shown(_explain(item, tree), 1000) for item in errors[:MOST_PROBLEMS]]
        if len(errors) > MOST_PROBLEMS:
            lines.append(f"and {len(errors) - MOST_PROBLEMS} more")
        raise InputError(f"{source}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, sign, value = override.partition("=")
    parts = key.strip().split(".")
    if not sign or not all(parts):
        raise InputError(f"--set {override!r}: write it as dotted.key=value, e.g. jobs.0.train.learning_rate=1e-4")
    node: Any = tree
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth]) or "the run file"
        last = depth == len(parts) - 1
        if isinstance(node, list):
            node_key: Any = _job_index(node, part, override)
        elif isinstance(node, dict):
            node_key = part
            if not last:
                node.setdefault(part, {})
        else:
            raise InputError(f"--set {override!r}: {here} is {_kind(node)} and has no key {part!r}")
        if last:
            node[node_key] = _parse_yaml(value, f"--set {key}")
        else:
            node = node[node_key]


def _job_index(jobs: list[Any], part: str, override: str) -> int:
    names = [job.get("name") if isinstance(job, dict) else None for job in jobs]
    if part in names:
        return names.index(part)
    if part.isdecimal() and int(part) < len(jobs):
        return int(part)
    raise InputError(f"--set {override!r}: there is no item {part!r}; there are {len(jobs)}, counted from 0")


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    names = {dict: "a mapping", list: "a list", str: "a text", bool: "a yes/no", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def _explain(error: Any, tree: Any) -> str:
    """One pydantic error as a sentence: where (job by name), what was found, what is accepted."""
    loc = [part for index, part in enumerate(error["loc"]) if not _is_tag(error["loc"], index)]
    where = _where(loc, tree)
    kind, found = error["type"], error["input"]
    if kind == "extra_forbidden":
        if instead := OTHER_TOOLS.get(str(loc[-1])):
            return f"{where}: unknown key; {instead}"
        known = _known_keys(loc[:-1])
        near = difflib.get_close_matches(str(loc[-1])[:100], known, 1, 0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"{where}: unknown key; {hint}"
    if kind == "missing":
        return f"{where}: is missing"
    if kind == "value_error":
        message = str(error["ctx"]["error"])
        return f"{where}: {message}" if where else message
    message = error["msg"][0].lower() + error["msg"][1:]
    if kind in {"model_type", "dict_type"}:
        message = "input should be a mapping"
    if kind == "bool_type":
        message = "input should be true or false"
    what = _kind(found) if isinstance(found, (dict, list)) else quoted(found)
    return f"{where}: {message}; found {what}"


def _is_tag(loc: tuple[Any, ...], index: int) -> bool:
    """Pydantic names the branch of a union in the location (str, list[str], literal['auto']), and marks bad keys."""
    after_union = index > 0 and loc[index - 1] in {"target_modules", "max_tokens_per_microbatch", "liger"}
    return loc[index] == "[key]" or (after_union and isinstance(loc[index], str))


def _where(loc: list[Any], tree: Any) -> str:
    text, node = "", tree
    for part in loc:
        try:
            node = node[part]
        except (KeyError, IndexError, TypeError):
            node = None
        if isinstance(part, int) and text == "jobs":
            name = node.get("name") if isinstance(node, dict) else None
            text = f"job {quoted(name)}: " if isinstance(name, str) else f"job number {part}: "
        elif isinstance(part, int):
            text += f"[{part}]"
        else:
            text += shown(part) if not text or text.endswith(" ") else f".{shown(part)}"
    return text.removesuffix(": ")


def _known_keys(loc: list[Any]) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "jobs": JobConfig, "data": DataConfig, "adapter": AdapterConfig, "train": TrainConfig,
        "parallel": ParallelConfig, "schedule": ScheduleConfig,
    }  # fmt: skip
    names = [part for part in loc if isinstance(part, str)]
    return list((models[names[-1]] if names else Run).model_fields)
