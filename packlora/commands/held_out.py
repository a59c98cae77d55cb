"""`packlora eval`: the held-out cross entropy of an adapter on any data, computed as trainer sft computes it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from packlora.adapters.attach import attach
from packlora.adapters.reading import load_adapter
from packlora.base.model import load_base
from packlora.base.own_tokenizer import TEMPLATE, own_template
from packlora.commands.adapter_folder import Trained, same_base, trained_by
from packlora.config import DataConfig, DataSource
from packlora.data.reader import Reader
from packlora.data.readers import read_data
from packlora.engine.memory import TokenBudget
from packlora.engine.passes import SingleDevice
from packlora.errors import InputError
from packlora.parallel.alone import ALONE
from packlora.plans.select import PlanChooser
from packlora.run_file import parse_run
from packlora.runtime.continued import start_note
from packlora.runtime.evaluate import Evaluator
from packlora.runtime.events import StopRequest
from packlora.runtime.forwards import Forwards
from packlora.runtime.job import Job
from packlora.runtime.prepare import prepare
from packlora.runtime.team import Team
from packlora.terminal import Activity

JOB = "eval"
"""Name of the job that stands for the adapter and its data, which no message shows."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """loss: mean cross entropy of a label token, in nats. tokens: with those that are no labels."""

    loss: float
    label_tokens: int
    tokens: int
    samples: int
    notes: list[str]


def evaluate_adapter(
    folder: Path, data: str, max_length: int | None = None, truncate: str | None = None, base_model: str | None = None,
    dtype: str = "auto", device: str = "auto",
) -> HeldOut:  # fmt: skip
    """The cross entropy of an adapter, finished or a checkpoint, over all samples of a data path; a note says where the loss
    that it was trained with is another one.

    Args:
        data: as data.path of a run file.
        max_length, truncate, dtype: as in a run file; default, and auto, are those of the run that trained it, else a run
            file's defaults.

    Raises:
        InputError: the adapter, its base or the data cannot be used.
        MemoryError: out of memory.
    """
    try:
        found = _held_out(folder, data, max_length, truncate, base_model, dtype, device)
    except InputError as error:
        raise InputError(_without_job(str(error), folder, data)) from None
    return replace(found, notes=[_without_job(note, folder, data) for note in found.notes])


def _without_job(text: str, folder: Path, data: str) -> str:
    """A message of the job, which names the adapter's folder or its data in the job's place."""
    said = text.removeprefix(prefix := f"job {JOB!r}: ")
    is_named = said == text or data in said or str(folder) in said
    return (said if is_named else f"{data}: {said}").replace(prefix, "")


def _held_out(
    folder: Path, data: str, max_length: int | None, truncate: str | None, base_model: str | None, dtype: str, device: str,
) -> HeldOut:  # fmt: skip
    """See evaluate_adapter."""
    path, revision = same_base([folder], base_model)
    trained = trained_by(folder)
    given = trained.job.data if trained else DataConfig(path="-")
    columns = _columns(data, given)
    rendered = {"system": given.system, "chat_template_kwargs": given.chat_template_kwargs}
    if any(rendered.values()):
        rows = read_data(DataSource(path=data, columns=columns), JOB, on_bad_row=given.on_bad_row).rows
        if any(row.text is not None or row.ids is not None for row in rows):  # texts show none
            rendered = {}
    template = Path(folder) / TEMPLATE
    tree: dict[str, Any] = {
        "base_model": path, "revision": revision, "output_dir": "-", "device": device, "max_tokens_per_microbatch": "auto",
        "dtype": trained.run.dtype if trained and dtype == "auto" else dtype,
        "jobs": [
            {
                "name": JOB, "adapter": {"init_from": str(folder)}, "train": {"global_batch_size": 1},
                "data": {
                    "path": data, "max_length": max_length or _longest(given, trained, truncate),
                    "truncate": truncate or given.truncate,
                    "on_bad_row": given.on_bad_row, "columns": columns, **rendered,
                    "chat_template": str(template) if own_template(folder) is not None else None,
                },
            }
        ],
    }  # fmt: skip
    if trained:  # the base in the form that it had
        tree |= trained.run.model_dump(include={"quantization"}, exclude_none=True)
    run = parse_run(tree, "packlora eval")
    with Activity() as told:
        reader = Reader(lambda text, *done: told(text.removeprefix(f"job {JOB}: "), *done))
        prepared = prepare(run, reader=reader, moment=trained.began if trained else None)
        told(f"loading {path}")
        base = load_base(run, prepared.tokenizer, prepared.longest_by_job, prepared.modality)
    (item,) = prepared.jobs
    example = None if base.modality is None else base.modality.example
    attached, (adapter,) = attach(base.model, {JOB: item.spec}, 0, PlanChooser(base.device), example=example)
    load_adapter(folder, adapter)
    samples = item.encoded.samples
    job = Job(item.config, item.data, samples, adapter)
    budget = TokenBudget(prepared.budget, prepared.longest, True, base.device)
    team = Team(ALONE, StopRequest(), [job])
    forwards = Forwards(base.device, SingleDevice(base, attached), budget, team)
    loss = Evaluator(forwards, [job], 0).evaluate([job])[JOB].loss
    if not np.isfinite(loss):
        raise InputError(f"the loss of {folder} on {data} is {loss:g}")
    labels, tokens = (sum(getattr(sample, what) for sample in samples) for what in ("num_learnt", "num_tokens"))
    of_training = f"job {JOB!r}: {start_note(item.config.adapter)}"
    notes = [note for note in prepared.warnings + base.warnings if note != of_training]
    return HeldOut(loss, labels, tokens, len(samples), [*notes, *_other_losses(folder, trained)])


def _longest(given: DataConfig, trained: Trained | None, truncate: str | None) -> int:
    """Tokens of the longest sample: of a run that leaves out or cuts longer ones, no more than its microbatches hold."""
    most = trained.run.max_tokens_per_microbatch if trained else "auto"
    if truncate is not None or given.truncate == "error" or most == "auto":
        return given.max_length
    return min(given.max_length, int(most))


def _other_losses(folder: Path, trained: Trained | None) -> list[str]:
    """Notes on why the held-out loss of the run that trained an adapter was another one."""
    notes = []
    if trained and (own := trained.job.train.objective or trained.job.train.trainer) != "sft":
        notes.append(f"this is the cross entropy of the labels; {folder} was trained with the loss of {own}")
    if trained and trained.run.compute == "fp8":
        notes.append(
            f"this is the loss on the base's own weights, as programs that serve compute it; {folder} was trained with "
            "compute: fp8, in which the held-out loss of its run is"
        )
    return notes


def _columns(data: str, given: DataConfig) -> dict[str, str]:
    """Names of the columns of a data path, whichever its first row has: those of the adapter's run, the usual ones, or those of
    a source of the run."""
    known = [given.columns, {}, *(source.columns for source in given.train_sources)]
    for columns in known if any(known) else ():
        first = DataSource(path=data, columns=columns, max_samples=1)
        with contextlib.suppress(InputError):
            if read_data(first, JOB, on_bad_row=given.on_bad_row).rows:
                return columns
    return given.columns
