"""Continuing a run: what its run.json says, whether the run file and the base model still are what they were, and the
checkpoints that jobs go on from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from packlora.base.fingerprint import Fingerprint
from packlora.changes import new_jobs, plugin, whole_run
from packlora.config import BASE, Run
from packlora.data.dataset import configured_steps
from packlora.errors import InputError, quoted
from packlora.files import content_of, put_back
from packlora.form import chosen
from packlora.report.follow import Line
from packlora.report.journal import JOURNAL, DamagedLine, fold, lines_since
from packlora.runtime import checkpoint
from packlora.runtime.profiles import MEASURES

FREE_TO_CHANGE = {
    "output_dir", "base_model", "revision", "save_every", "save_total_limit", "eval_every", "device", *MEASURES,
    "max_tokens_per_microbatch", "schedule", "liger", "keep_outputs", "cuda_graphs", "plans", "parallel",
    "trackers", "sample_prompts", "sample_max_new_tokens", "fit",
}  # fmt: skip
"""Keys of the run file that may differ when a run is resumed; of a job also how long it trains, less in a sweep, and where its
data are (_changes). Base models and data are compared by what they hold."""


class SavedJob(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    data_hash: str
    samples: int
    eval_samples: int
    seed: int
    start_hash: str | None = None
    reference_hash: str | None = None
    objective_hash: str | None = None


class _SavedSchedule(BaseModel):
    budget: int = Field(ge=1, le=2**31, strict=True)
    head_in_layers: float | None = Field(None, gt=0, lt=1e6)


class _SavedModel(BaseModel):
    fingerprint: Fingerprint


OF_WHOLE_MODELS = ("offload_embedding", "activation_offloading")
"""Keys of MEASURES that a base model in parts has not."""


class _SavedFit(BaseModel):
    """Choices of `fit`, before and while the run trained; None: none was made. More keys: of the base's form (form.py)."""

    model_config = ConfigDict(strict=True, extra="allow")

    max_tokens_per_microbatch: int | None = Field(None, ge=1, le=2**31)
    gradient_checkpointing: bool | None = None
    offload_embedding: bool | None = None
    activation_offloading: bool | None = None
    predicted_bytes: int | None = None

    def keys(self, run: Run) -> dict[str, Any]:
        """Values of the keys of a run that are more than the size of microbatches. What lies on the host beside a whole base
        model is not there where the run now asks for one in parts, nor are checkpoints that the run now has none of."""
        parts = run.parallel.in_parts is not None or run.parallel.is_sharded
        kept = [key for key in MEASURES if not (parts and key in OF_WHOLE_MODELS)]
        out: dict[str, Any] = {key: getattr(self, key) for key in kept}
        if not (run.gradient_checkpointing or (self.gradient_checkpointing and run.leaves("gradient_checkpointing"))):
            out.pop("activation_offloading", None)
        return {key: value for key, value in out.items() if value is not None} | chosen(self.model_extra or {})

    @model_validator(mode="after")
    def _known_form(self) -> _SavedFit:
        chosen(self.model_extra or {})
        return self


class SavedRun(BaseModel):
    """Content that a run.json must have for its run to be continued. clock: see moment_of. saved: of each job its newest step.
    edition: see report/journal.py. changes: sweep/changes.py, Change."""

    model_config = ConfigDict(strict=True)

    edition: int = Field(0, ge=0, le=2**53)
    id: str
    created: str
    clock: datetime | None = None
    config: Run
    versions: dict[str, str]
    warnings: list[str]
    jobs: dict[str, SavedJob]
    schedule: _SavedSchedule
    model: _SavedModel
    saved: dict[str, int]
    changes: list[Any] = Field(default_factory=list)
    fit: _SavedFit = Field(default_factory=_SavedFit)

    @property
    def began(self) -> datetime:
        return moment_of(self.clock, self.created)


def moment_of(clock: datetime | None, created: str) -> datetime:
    """When a run began, by its run.json, in the time of the place where it began.

    Args:
        clock: earlier versions do not say it.
        created: the same in UTC.
    """
    if clock is not None:
        return clock
    try:
        return datetime.fromisoformat(created).astimezone().replace(tzinfo=None)
    except ValueError:  # somebody wrote it by hand
        return datetime.now()


def check_output(run: Run, resume: bool) -> SavedRun | None:
    """Make sure that the output folder holds nothing that would be lost.

    Returns:
        What the run.json of the run to resume says, or None for a fresh run.

    Raises:
        InputError: the folder holds something else, or holds a run that differs from this one.
    """
    folder = Path(run.output_dir)
    content = content_of(folder)
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
    run, new = whole_run(run.with_chosen(saved.fit.keys(run)), saved), new_jobs(run, saved)
    trained = {job.name for job in run.trained}
    changed = _changes(saved.config.model_dump(mode="json"), run.model_dump(mode="json"), len(new), trained)
    if run.compares and run.eval_every != saved.config.eval_every:
        changed["eval_every (candidates of the sweep are compared by it)"] = saved.config.eval_every
    changed |= {} if "seed" in changed else _other_seeds(saved, run)
    of_fit = saved.fit.model_extra or {}
    names = [f"{key} (fit chose {of_fit[key]})" if key in of_fit else key for key in changed]
    if changed:
        raise InputError(
            f"output_dir {folder} holds a run with other settings, which cannot be continued: {', '.join(names)} changed; "
            f"put that back (it was {', '.join(map(quoted, changed.values()))}), or start a new run in another output_dir"
        )
    if missing := sorted(trained - saved.jobs.keys() - set(new)):
        raise InputError(f"output_dir {folder}: run.json cannot be read: jobs: {missing[0]!r} is missing")
    from packlora.runtime.places import check_places

    check_places(saved.config, run)
    for name in trained:
        put_back(folder / name)  # before anybody asks what checkpoints there are
    return saved


def _read_saved(file: Path) -> SavedRun:
    kept = (
        "the checkpoints beside it are as they were: put a copy of run.json back, or continue one of them in a new run by "
        "adapter.init_from"
    )
    try:
        if file.exists() and not file.is_file():  # a pipe would be waited for
            raise InputError(f"output_dir {file.parent}: run.json cannot be read: it is not a plain file; {kept}")
        text = file.read_bytes()
        saved = SavedRun.model_validate_json(text)
        if lines := lines_since(file.parent, saved.edition):
            saved = SavedRun.model_validate_json(_with(text, lines))
        return plugin("changes").with_changes(saved, file.parent) if saved.changes else saved
    except DamagedLine as error:
        raise InputError(
            f"output_dir {file.parent}: {JOURNAL}, {error}: it tells of jobs that joined and of checkpoints since run.json was "
            "written. Remove that line to go on without it"
        ) from None
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


def _with(text: bytes, lines: list[Line]) -> str:
    """A run.json with what its journal says. Raises DamagedLine."""
    record = json.loads(text)
    for number, line in enumerate(lines, 1):
        try:
            fold(record, line)
        except (TypeError, ValueError, LookupError, AttributeError):
            raise DamagedLine(f"line {number} of those that count is damaged") from None
    return json.dumps(record)


def _other_seeds(saved: SavedRun, run: Run) -> dict[str, Any]:
    """Recorded seeds of the jobs whose seed, their own or the run's, is another one now."""
    seeds = {job.name: saved.config.seed_of(job) for job in saved.config.jobs}  # also of one that is not trained itself
    seeds |= {name: job.seed for name, job in saved.jobs.items()}
    now = {job.name: run.seed_of(job) for job in run.jobs}
    return {f"job {name!r} seed": seeds[name] for name in now if seeds.get(name, now[name]) != now[name]}


def _changes(before: dict[str, Any], now: dict[str, Any], new: int, trained: Collection[str]) -> dict[str, Any]:
    """Settings that a run may not change when it is resumed, and has: their values before, by name. new: jobs at the end of the
    list that the run has not had until now. trained: jobs that are trained themselves."""
    kept = now.keys() - {"jobs"} - FREE_TO_CHANGE
    if any(job["rollout"] for job in now["jobs"]):  # generation_config.json says where completions end
        kept |= {"base_model", "revision"}
    changed = {key: before[key] for key in now if key in kept and before[key] != now[key]}
    names = [job["name"] for job in before["jobs"]]
    if names != [job["name"] for job in now["jobs"][: len(now["jobs"]) - new]]:
        return changed | {"jobs (names or order)": names}
    for old, own in zip(before["jobs"], now["jobs"], strict=False):
        changed |= {
            f"job {own['name']!r} rollout.{key}": (old["rollout"] or {}).get(key)
            for key in own["rollout"] or {}
            if key not in FREE_OF_ROLLOUTS
            and not _same_elsewhere(key, (old["rollout"] or {}).get(key), own["rollout"][key])
        }
        for section in ("data", "adapter", "train"):
            free = {"num_train_epochs", "max_steps"} if section == "train" else set()
            scheduled = own["train"]["lr_scheduler_type"] not in ("constant", "constant_with_warmup")
            if section == "train" and (scheduled or own["train"]["warmup_ratio"]):
                free = set()  # the learning rate of every step depends on the number of steps
            if not _is_judged(own["train"]):
                free |= {"eval_steps"}
            if own["name"] not in trained:
                free = set()  # candidates that are yet to come are compared with those that have been
            free |= {"eval_on_start", "logging_steps"}
            if section == "data" and own["name"] in trained:
                same = _without_paths(old["data"]["path"]) == _without_paths(own["data"]["path"])
                free |= {"eval_path", "path"} if same else {"eval_path"}
                if not own["rollout"] and None not in (old[section]["chat_template"], own[section]["chat_template"]):
                    free |= {"chat_template"}  # samples tell
            changed |= {
                f"job {own['name']!r} {section}.{key}": old[section][key]
                for key in own[section]
                if key not in free and old[section][key] != own[section][key]
                if own["name"] not in trained or not _same_elsewhere(key, old[section][key], own[section][key])
            }
    return changed


FOLDERS, CODE = ("init_from", "reference"), ("objective", "environment_factory", "tools")
"""Keys of a job that name adapters, and functions in files. What is there is compared as it is read, or told."""


def _same_elsewhere(key: str, before: Any, now: Any) -> bool:
    """Whether two values of a key are equal, or may name the same in two places."""
    if key in CODE:
        return [spec.rpartition(":")[2] for spec in _listed(before)] == [
            spec.rpartition(":")[2] for spec in _listed(now)
        ]
    if key in FOLDERS:
        return before == now or not {before, now} & {None, BASE}
    return bool(before == now)


def _listed(specs: str | list[str] | None) -> list[str]:
    return [specs] if isinstance(specs, str) else specs or []


def _without_paths(path: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keys of the sources of data.path beside their places."""
    sources = [{}] if isinstance(path, str) else path
    return [{key: value for key, value in source.items() if key != "path" and value} for source in sources]


FREE_OF_ROLLOUTS = ("reward", "reward_timeout", "log_completions")
"""Keys of a job's rollout that may change; that a reward has changed is told."""


def _is_judged(train: dict[str, Any]) -> bool:
    """Whether a job's held-out losses decide how it ends."""
    return train["load_best_model_at_end"] or train["early_stopping_patience"] is not None


# --- jobs and their checkpoints ------------------------------------------------------------------------------------------


def starting_steps(run: Run, words: list[str], left: Collection[str] = ()) -> dict[str, int]:
    """The checkpoints to go on from, by job; jobs that are not there go on from their newest.

    Args:
        run: its output_dir holds the checkpoints.
        left: jobs that have left the run, which cannot be sent back.
        words: "STEP" goes for every job that has got so far, "JOB=STEP" for one; step 0 begins a job again.

    Raises:
        InputError: a word is neither, or there is no such checkpoint.
    """
    have = {job.name: checkpoint.steps(Path(run.output_dir) / job.name) for job in run.trained if job.name not in left}
    starts: dict[str, int] = {}
    for word in sorted(words, key=lambda word: "=" not in word):  # jobs that are named come first
        name, _, number = word.rpartition("=")
        if not re.fullmatch(r"\d{1,15}", number, re.ASCII):
            raise InputError(f"--from {word!r}: give the step of a checkpoint, or JOB=STEP")
        if name and name not in have:
            why = "job {!r} has left the run, so it cannot be sent back" if name in left else "there is no job {!r}"
            raise InputError(f"--from {word!r}: {why.format(name)}; there are {', '.join(have) or 'none'}")
        step = int(number)
        asked = [name] if name else [other for other in have if other not in starts]
        there = {other for other in asked if step == 0 or step in have[other]}
        for other in asked:
            if other not in there and (name or not there or max(have[other], default=0) > step):
                listed = ", ".join(map(str, have[other])) or "none"
                raise InputError(
                    f"--from {word!r}: job {other!r} has no checkpoint of step {step}; its checkpoints: {listed}"
                )
        starts |= dict.fromkeys(there, step)
    return starts


def check_sent_back(starts: dict[str, int], left_out: dict[str, str]) -> None:
    """Raises InputError where --from names a job whose data is gone."""
    if lost := sorted(starts.keys() & left_out.keys()):
        raise InputError(
            f"--from: job {lost[0]!r} cannot be sent back, since {left_out[lost[0]]}; put that back, or name the "
            "jobs to send back with --from JOB=STEP"
        )


# --- jobs that are left out ------------------------------------------------------------------------------------------------


def left_out_steps(run: Run, name: str, saved: SavedRun, max_steps: int | None) -> int:
    """Optimizer steps that a job is to take whose data is gone."""
    (job,) = (job for job in run.jobs if job.name == name)
    wanted = configured_steps(job.train, saved.jobs[name].samples)
    return min(wanted, max_steps or wanted)
