"""Continuing a job from its checkpoints: reading what checkpoint.py writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from packlora.adapters.files import CONFIG, config_dict, keyed
from packlora.adapters.reading import load_adapter, read_start
from packlora.base.fingerprint import Fingerprint
from packlora.engine.optimizer import MOMENTS, FlatAdamW
from packlora.errors import InputError
from packlora.files import remove_folder, remove_leftovers
from packlora.lora_config import is_doubled
from packlora.runtime import checkpoint, history
from packlora.runtime.checkpoint import (
    BEST,
    DISCARDED,
    EARLIER,
    LAST_GOOD,
    MANIFEST,
    OPTIMIZER,
    PREFIX,
    STATE,
    Damaged,
    Manifest,
    check,
    is_whole,
    steps,
)
from packlora.runtime.hashes import folder_hash, objective_hash
from packlora.runtime.history import Pieces
from packlora.runtime.job import Job
from packlora.runtime.resume import SavedJob, SavedRun

SETTINGS = ("lora_alpha", "lora_dropout", "use_rslora", "alpha_pattern")
"""Keys of an adapter that no tensor's shape depends on, and its numbers do."""


def restore(
    folder: Path, job: Job, run: str, reached: int, start: int | None = None, is_judged: bool = False
) -> str | None:
    """Continue a job from its newest checkpoint in <folder>, if there is one; recognise a job that has ended.

    Args:
        folder: of the job; need not exist.
        job: fresh; takes the state.
        run: id of the run.
        reached: step of the newest checkpoint that the run has written of this job, 0 for none.
        start: continue from the checkpoint of this step instead; 0 begins anew.
        is_judged: whether its evaluations decide something, so that all of its log history must be there.

    Returns:
        What the user should know.

    Raises:
        InputError: the checkpoint is damaged or not of this job, or all are gone; the message says what is whole.
    """
    remedy = f"--resume --from {job.name}="
    has_ended = (folder / MANIFEST).exists()
    note = None
    if start is None and has_ended:
        try:
            if _ended(folder, job, run):
                return None
        except Damaged as error:
            note = str(error)
    found = steps(folder)
    step = start if start is not None else max(found, default=0)
    if step == 0:
        if start is None and (reached > 0 or has_ended):
            was = f"it had a checkpoint at step {reached}" if reached else "it has ended"
            raise InputError(
                f"job {job.name!r}: {folder} has no checkpoint, but {was}; going on would begin at step 1 and overwrite its "
                f"adapter. Put the checkpoints back, take another output_dir, or begin again with {remedy}0"
                + (f" ({note})" if note else "")
            )
        return None
    path = folder / f"{PREFIX}{step}"
    try:
        manifest = check(path, job.name, run, step)
        lost = _read_checkpoint(path, job, manifest, sent_back=start is not None, is_judged=is_judged)
    except Damaged as error:
        older = [own for own in reversed(found) if own < step]
        whole = next((own for own in older if is_whole(folder / f"{PREFIX}{own}", job.name, run)), 0)
        says = f"checkpoint-{whole} is whole: go on from it with {remedy}{whole}"
        if not whole:
            says = f"no older checkpoint is whole; begin this job again with {remedy}0"
        raise InputError(f"job {job.name!r}: {error}; {says}") from None
    told = [lost] if lost else []
    if note is not None:
        how = "is written again" if step >= job.data.num_steps else "is no longer used, and training goes on"
        told.append(f"{note}; the finished adapter {how} from {path.name}")
    elif start is None and step < reached:
        told.append(
            f"its newest checkpoint, {folder / PREFIX}{reached}, is gone; it goes on from {path.name}, and takes the steps "
            "since then again"
        )
    return f"job {job.name!r}: {'; '.join(told)}" if told else None


def standing(folder: Path, job: str, run: str, num_steps: int) -> tuple[str, int, str | None]:
    """How a job of so many steps stands that is not trained now: (done, failed or stopped; its step; why it failed)."""
    try:
        check(folder, job, run)
    except Damaged:
        return "stopped", max(steps(folder), default=0), None
    state = _read_state(folder / STATE)
    status, step = state["status"], state["global_step"]
    goes_on = status == "done" and step < num_steps and state.get("stopped") is None
    return "stopped" if goes_on else status, step, state["failure"]


def _ended(folder: Path, job: Job, run: str) -> bool:
    """Take the state of a job that has nothing left to do, from its finished files. False where it has.

    Raises:
        Damaged: they are not what was written.
    """
    check(folder, job.name, run)
    state = _read_state(folder / STATE)
    if state["status"] == "failed" or state["global_step"] >= job.data.num_steps or state.get("stopped") is not None:
        load_adapter(folder, job.adapter)
        _take_state(job, state)
        return True
    return False


def _read_checkpoint(path: Path, job: Job, manifest: Manifest, sent_back: bool, is_judged: bool) -> str | None:
    """Restore a job from files that have been checked. sent_back: a job that was asked to end goes on all the same.

    Returns:
        What the user should know.

    Raises:
        Damaged: a piece of the log history is not what was written, and is_judged.
    """
    state = _read_state(path / STATE)
    lines, lost = history.read(path.parent, state.get(EARLIER))
    if lost is not None and is_judged:
        raise Damaged(f"{lost} is not what was written, and evaluations that it holds decide how the job goes on")
    load_adapter(path, job.adapter)
    _take_state(job, {**state, "stopped": None} if sent_back else state)
    job.log_history = lines + job.log_history
    job.pieces = Pieces(len(lines), state.get(EARLIER), int(lost.name.partition("-")[0]) if lost is not None else 0)
    _restore_optimizer(path / OPTIMIZER, job)
    if LAST_GOOD in manifest.files:
        job.state.last_good = _flat(path / LAST_GOOD, job)
    if BEST in manifest.files:
        job.best = _flat(path / BEST, job)
    job.status = "running"
    if lost is None:
        return None
    upto = job.pieces.lost
    return f"{lost} is not what was written: the log history lacks the steps up to {upto}, which no number depends on"


def _check_settings(path: Path, job: Job, before: SavedJob | None) -> None:
    """Raises InputError where a job's adapter computes or learns otherwise than its checkpoint did: by what the folder of
    init_from says, or a key beside it that is the default in run.json whether it was written or not. The dropout of such a job
    is in run.json, for the checkpoint of an adapter of experts says 0 in any case (adapters/files.py)."""
    was, peft = json.loads((path / CONFIG).read_text(encoding="utf-8")), job.adapter.spec.peft
    known = ((before.model_extra or {}) if before is not None else {}).get("adapter") or {}
    now = config_dict(peft)
    if "lora_dropout" in known:
        was["lora_dropout"], now["lora_dropout"] = known["lora_dropout"], peft.lora_dropout
    pairs = {key: (was.get(key), now[key]) for key in SETTINGS}
    start = peft.init_lora_weights
    pairs["init_lora_weights"] = (read_start(path) or True, start if is_doubled(start) else True)
    for key, (earlier, own) in pairs.items():
        if earlier != own:
            raise InputError(
                f"job {job.name!r}: {path} was trained with {key} {earlier}, and the run file and "
                f"{job.config.adapter.init_from} now say {own}; put back what was changed there, or start a new run in "
                "another output_dir"
            )


def _flat(file: Path, job: Job) -> torch.Tensor:
    """Other values of an adapter, like adapter.flat."""
    names, tensors = {name: name for name in job.adapter.whole_shapes}, _load_tensors(file, job)
    whole = {name: tensors[key] for key, name in keyed(job.adapter, names).items()}
    flat = torch.zeros_like(job.adapter.flat)
    views = job.adapter.layout.views(flat)
    for name, own in job.adapter.own_of(whole).items():
        views[name].copy_(own)
    return flat


def go_back(folder: Path, step: int) -> list[str]:
    """Put checkpoints beyond `step` aside, under another name, and forget that the job has ended: it was sent back to `step`.

    Returns:
        The new names.
    """
    for name in (MANIFEST, STATE):
        (folder / name).unlink(missing_ok=True)
    put = []
    for later in steps(folder):
        if later > step:
            path = folder / f"{PREFIX}{later}"
            aside = folder / f"{DISCARDED}{path.name}"
            if aside.exists():
                remove_folder(aside)
            os.replace(path, aside)
            put.append(aside.name)
    return put


def _load_tensors(file: Path, job: Job) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
        return tensors
    except (OSError, SafetensorError) as error:
        raise InputError(f"job {job.name!r}: cannot read {file}: {error}") from None


def _restore_optimizer(file: Path, job: Job) -> None:
    """Every parameter must have its state, of its shape, and nothing else may be there."""
    state: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in _load_tensors(file, job).items():
        name, _, leaf = key.rpartition("/")
        state.setdefault(name, {})[leaf] = value
    shapes = job.adapter.whole_shapes
    if state.keys() != shapes.keys() - job.state.untrained:
        odd = sorted(state.keys() ^ (shapes.keys() - job.state.untrained))[0]
        raise InputError(f"job {job.name!r}: {file} does not fit the adapter: {odd} is in only one of them")
    if isinstance(job.state.optimizer, FlatAdamW):
        _take_slices(file, job, state)
    try:
        job.state.optimizer.load(state)
    except ValueError as error:
        raise InputError(f"job {job.name!r}: {file}: {error}") from None
    job.state.untrained &= job.state.parameters.keys()


def _take_slices(file: Path, job: Job, state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Cut whole moments by parameter to what is here, in place."""
    shapes = job.adapter.whole_shapes
    for name, moments in state.items():
        for leaf, value in moments.items():
            if leaf != "step" and value.shape != shapes[name]:
                raise InputError(
                    f"job {job.name!r}: {file}: {name}/{leaf} is {tuple(value.shape)}, should be {shapes[name]}"
                )
    for leaf in MOMENTS:
        for name, own in job.adapter.own_of({name: moments[leaf] for name, moments in state.items()}).items():
            state[name][leaf] = own


def _take_state(job: Job, state: dict[str, Any]) -> None:
    job.step, job.status, job.failure = state["global_step"], state["status"], state["failure"]
    job.tokens_seen, job.log_history = state["num_input_tokens_seen"], state["log_history"]
    job.state.untrained = set(state["untrained"])
    if job.scale is not None and "loss_scale" in state:
        job.scale.load(state["loss_scale"])
    if state.get("stopped") is not None:
        job.stop(state["stopped"])


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer_state.json of a job that has ended. Raises InputError."""
    return _read_state(folder / STATE)


def _read_state(file: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {file}: {error}") from None
    return state


# --- all jobs of a run ---------------------------------------------------------------------------------------------------


def restore_jobs(output_dir: Path, jobs: list[Job], saved: SavedRun, starts: dict[str, int]) -> list[str]:
    """Bring every job to where it goes on from. Returns what the user should know.

    Raises:
        InputError: a checkpoint cannot be used; all of them are named, and nothing was changed.
    """
    notes, problems = [], []
    for job in jobs:
        folder, reached = output_dir / job.name, saved.saved.get(job.name, 0)
        try:
            is_judged = job.config.train.needs_evaluations or saved.config.compares
            note = restore(folder, job, saved.id, reached, starts.get(job.name), is_judged)
            notes += [note] if note else []
            if job.status == "running" and job.step > 0:
                _check_settings(folder / f"{PREFIX}{job.step}", job, saved.jobs.get(job.name))
            notes += _further_steps(job, saved)
            problems += _other_files(job, saved.jobs.get(job.name))
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))
    return notes


def _further_steps(job: Job, saved: SavedRun) -> list[str]:
    """A note where the run file gives more steps to a job that was asked to end, which takes none of them."""
    before = next((own.train for own in saved.config.jobs if own.name == job.name), job.config.train)
    now, steps = job.config.train, job.data.configured_steps
    same = (before.max_steps, before.num_train_epochs) == (now.max_steps, now.num_train_epochs)
    if same or job.stopped is None or job.step >= steps:
        return []
    return [
        f"job {job.name!r} stays at step {job.step} of {steps}: it ended there, as asked by {job.stopped}; --resume --from "
        f"{job.name}={job.step} goes on until it is asked again, and changed settings take a new run"
    ]


def _other_files(job: Job, before: SavedJob | None) -> list[str]:
    """Problems of what a restored job reads once more and is not as it was: tensors of adapters, its own objective."""
    if before is None:
        return []
    own = job.config.train.objective
    if before.objective_hash is not None and objective_hash(own) != before.objective_hash:
        return [
            f"job {job.name!r}: the file of train.objective {own} is not the one that the run began with; put that one back, "
            "or start a new run in another output_dir"
        ]
    start, reference = job.config.adapter.init_from, job.config.reference_adapter
    known = {reference: before.reference_hash, start: before.start_hash}
    read = [start] * (job.step == 0) + [reference] * job.learning.objective.has_reference
    return [
        f"job {job.name!r}: {folder} is not the adapter that the run began with; put that one back, or start a new run in "
        "another output_dir"
        for folder in dict.fromkeys(read)
        if known[folder] is not None and folder_hash(folder) != known[folder]
    ]


def put_aside(
    output_dir: Path, jobs: list[str], starts: dict[str, int], run: str, keep: int | None = None
) -> list[str]:
    """Put aside what lies beyond the steps that jobs were sent back to, and remove what a crash has left, in the last rotation
    too.

    Args:
        run: the run's id.
        keep: so many of the newest checkpoints of each job; None keeps all.

    Returns:
        What the user should know.
    """
    notes = []
    for job in jobs:
        folder = output_dir / job
        if job in starts and folder.exists():
            aside = go_back(folder, starts[job])
            became = f"; what lay beyond is now {', '.join(aside)}" if aside else ""
            notes.append(f"job {job!r} goes on from step {starts[job]}, as --from says{became}")
        remove_leftovers(folder)
        remove_leftovers(folder / history.FOLDER)
        note = checkpoint.tidy(folder, job, run, keep) if keep is not None else None
        notes += [note] if note else []
    return notes


def same_base(path: str, before: Fingerprint, now: Fingerprint) -> None:
    """A run goes on only on the base model that it began with."""
    changed = [
        name
        for name, same in (("weights", before.weights == now.weights), ("config.json", before.config == now.config))
        if not same
    ]
    if changed:
        raise InputError(
            f"base_model {path}: this is not the model that the run began with, its {' and '.join(changed)} changed; put that "
            "model back, or start a new run in another output_dir"
        )


def same_data(saved: SavedRun, record: dict[str, Any]) -> None:
    """A run goes on only with the samples that it began with."""
    for name, before in saved.jobs.items():
        now = record["jobs"].get(name) or before.model_dump()
        if before.data_hash != now["data_hash"] or before.eval_samples != now["eval_samples"]:
            raise InputError(
                f"job {name!r}: its data has changed since the run began ({before.samples} training and "
                f"{before.eval_samples} held-out samples then, {now['samples']} and {now['eval_samples']} now); put the "
                "data back, or start a new run in another output_dir"
            )
