"""run.json: everything that is needed to repeat a run or to continue it, and how it ended."""

from __future__ import annotations

import contextlib
import math
import platform
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import packlora
from packlora.adapters.files import config_dict
from packlora.base.model import Base
from packlora.config import JobConfig, Run
from packlora.data.template import clock_of
from packlora.events import (
    CheckpointSaved,
    Event,
    JobFailed,
    MemoryRanOut,
    Note,
    RunEnded,
    SavePointReached,
)
from packlora.files import write_json
from packlora.given import given
from packlora.parallel.layout import Layout
from packlora.plans.identity import has_kernels, processor_name
from packlora.report.journal import EDITION, JOURNAL, RECORD, Journal, copied, fold, merged
from packlora.report.metrics import BestEffort, told_in
from packlora.result import JobResult
from packlora.runtime.hashes import folder_hash, objective_hash
from packlora.runtime.job import Job, idle_since
from packlora.runtime.prepared_job import LEFT_OUT, PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile

if TYPE_CHECKING:
    from packlora.runtime.resume import SavedRun

PAID = 2**15
"""Bytes of run.json that a change pays for: a small one is written whole at every checkpoint, a large one as seldom as this
says, and its journal meanwhile."""
MOST_SKIPPED = 1000
"""Rows that are no samples that run.json lists of a job; it counts all of them."""


def described_job(job: PreparedJob) -> dict[str, Any]:
    """Description of a job in run.json."""
    held_out, start, peft = job.eval_encoded.samples, job.config.adapter.init_from, job.spec.peft
    lengths = [sample.num_tokens for sample in job.data.samples]
    counts, edges = np.histogram(lengths, bins=min(24, max(1, max(lengths) - min(lengths))))
    return {
        "seed": job.data.seed,
        "start_hash": folder_hash(start),
        "reference_hash": folder_hash(job.config.reference_adapter),
        "objective_hash": objective_hash(job.config.train.objective),
        "samples": job.data.num_samples,
        "eval_samples": len(held_out),
        "tokens": round(sum(lengths) / len(lengths) * job.data.num_samples),
        "label_tokens": round(int(job.data.num_learnt.sum()) / len(lengths) * job.data.num_samples),
        "data_hash": job.data.fingerprint(held_out),
        "steps": job.data.num_steps,
        "trainable_parameters": job.trainable,
        "adapted_modules": len(job.spec.modules),
        "truncated": job.encoded.truncated + job.eval_encoded.truncated,
        "dropped": job.encoded.dropped + job.eval_encoded.dropped,
        "skipped": len(job.encoded.skipped) + len(job.eval_encoded.skipped),
        "skipped_rows": (job.encoded.skipped + job.eval_encoded.skipped)[:MOST_SKIPPED],
        "length_histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        **({"given": given_rows} if (given_rows := _given_rows(job.config)) else {}),
        **({"adapter": {**config_dict(peft), "lora_dropout": peft.lora_dropout}} if start else {}),  # the folder says
    }


def _given_rows(job: JobConfig) -> dict[str, Any]:
    """Description of the rows that a Python program has handed over, by data path; nothing of files."""
    paths, rows = [*(path for path, _ in job.data.sources), *job.data.eval_paths], given().rows
    found = {path: rows[path] for path in paths if path in rows}
    return {path: {"kind": own.kind, "rows": len(own.values), "sha256": own.digest} for path, own in found.items()}


def _kernels(device: torch.device) -> dict[str, Any]:
    """Sizes of kernels that are not the usual ones."""
    if not has_kernels(device):
        return {}
    from packlora.plans.kernel_sizes import tuned

    return {name: dict(fields) for name, fields in tuned(device).items()}


def run_record(
    prepared: PreparedRun, described: dict[str, dict[str, Any]], base: Base, known: Profile, saved: SavedRun | None = None,
    layout: Layout | None = None,
) -> dict[str, Any]:  # fmt: skip
    """run.json: everything that is needed to repeat the run, or to continue it; the warnings are those of this session.

    Args:
        described: the jobs, by name, see described_job.
        saved: what it has said until now.
        layout: of several processes.
    """
    for name, own in described.items():
        if saved is not None and name in saved.jobs:
            own["start_hash"] = saved.jobs[name].start_hash or own["start_hash"]
            own["reference_hash"] = saved.jobs[name].reference_hash or own["reference_hash"]
    warnings, names = prepared.warnings + base.warnings, [job.name for job in prepared.run.trained]
    if saved is not None:
        described |= {name: saved.jobs[name].model_dump() for name in prepared.left_out}
        warnings += [
            f"resumed with {name} {now}, begun with {saved.versions[name]}"
            for name, now in versions().items()
            if saved.versions.get(name, now) != now
        ]
    return {
        "packlora": versions()["packlora"],
        EDITION: saved.edition if saved else 0,
        "id": saved.id if saved else secrets.token_hex(8),
        "clock": clock_of(prepared.tokenizer).isoformat(timespec="seconds"),
        "created": saved.created if saved else datetime.now(UTC).isoformat(timespec="seconds"),
        "config": prepared.run.model_dump(mode="json"),
        "versions": versions(),
        "device": device_name(base.device),
        "commit": source_commit(),
        "kernels": _kernels(base.device),
        "model": {
            "path": base.path,
            "parameters": prepared.shape.parameters,
            "type": prepared.shape.model_type,
            "loss": "fused" if base.fused_loss else "logits",
            "liger": base.liger,
            "kept_outputs": base.kept_outputs,
        },
        "jobs": {name: described[name] for name in names},
        "saved": {name: saved.saved.get(name, 0) if saved else 0 for name in names},
        "changes": [],
        "schedule": {
            "budget": prepared.budget,
            "head_in_layers": prepared.head_in_layers,
            "layout": "one device" if layout is None or layout.processes == 1 else asdict(layout),
            "profile": known.describe(),
        },
        "fit": dict(prepared.fit),
        "warnings": warnings,
        "result": None,
    }


def earlier_warnings(saved: SavedRun | None, now: list[str]) -> list[str]:
    """Earlier warnings of a run that still hold: not of a job that was left out."""
    return [text for text in saved.warnings if text not in now and LEFT_OUT not in text] if saved else []


def write_record(output_dir: Path, record: dict[str, Any]) -> int:
    """Write run.json whole; what the journal says is in it then. Returns its bytes."""
    record[EDITION] = record.get(EDITION, 0) + 1
    write_json(output_dir / RECORD, record)
    for _ in range(2):  # what cannot be removed is of an earlier edition, so that it counts for nothing
        with contextlib.suppress(OSError):
            (output_dir / JOURNAL).unlink(missing_ok=True)
            break
    return (output_dir / RECORD).stat().st_size


class RunRecord:
    """Keeps run.json and its journal up to date, a subscriber: warnings, checkpoints, the token budget, plans of layers, the
    result."""

    def __init__(
        self, output_dir: Path, record: dict[str, Any], plans: Callable[[], list[dict[str, Any]]], files: BestEffort
    ) -> None:
        """record: from run_record, as it was written. plans: how layers are computed by now."""
        self.output_dir, self.record, self._plans, self._files = output_dir, record, plans, files
        self._journal = Journal(output_dir / JOURNAL)
        self._news: dict[str, Any] = {}
        """Part of self.record that is on the disk only when it is written the next time."""
        self._size, self._paid = 0, math.inf
        """Bytes of run.json, and those that changes since it was written have paid for."""

    def __call__(self, event: Event) -> None:
        match event:
            case Note() | JobFailed():
                self._add({"warnings": [event.text]})
            case CheckpointSaved(job, step):
                self._add({"saved": {job: step}})
                self._write()  # before anybody can miss it: a job whose checkpoints are gone is not begun again
            case MemoryRanOut():
                self._add({"warnings": [event.text], "budget": event.budget, "fit": _fitted(event)})
                self._write()
            case SavePointReached() if self._news:
                self._write()
            case RunEnded():
                self.record["result"] = result_record(event)
                self._paid = math.inf
                self._write()

    def _add(self, news: Mapping[str, Any]) -> None:
        fold(self.record, news)
        self._news = merged(self._news, news)

    def _write(self) -> None:
        self._files.write(RECORD, lambda: self._put({}))

    def amend(self, news: Mapping[str, Any]) -> None:
        """Record what is about to happen, before it does (report/journal.py). Raises OSError or ValueError where it cannot be
        written; nothing is changed then."""
        self._put(news)
        fold(self.record, news)

    def _put(self, more: Mapping[str, Any]) -> None:
        """Write the news, and more that is not in self.record: whole where changes since the last time pay for it."""
        paid, self._paid = self._paid + PAID, math.inf  # where this fails, the next one must be whole
        if paid < self._size:
            self._journal.append({EDITION: self.record[EDITION], **merged(self._news, more)})
            self._paid = paid
        else:
            self.record["plans"] = self._plans()
            whole = copied(self.record)
            self.record[EDITION] += 1
            fold(whole, more)
            self._size, self._paid = write_record(self.output_dir, whole), 0
        self._news = {}


def _fitted(event: MemoryRanOut) -> dict[str, Any]:
    """Choice that was made while training, see SavedRun.fit."""
    taken = event.gradient_checkpointing
    return {"max_tokens_per_microbatch": event.budget} | ({} if taken is None else {"gradient_checkpointing": taken})


def result_record(event: RunEnded) -> dict[str, Any]:
    """Description in run.json of how a run ended; seconds and tokens are of all its sessions."""
    return {
        "status": event.result.status,
        "seconds": event.seconds,
        "tokens": event.tokens,
        "tokens_per_second": event.tokens / event.seconds,
        "peak_memory_bytes": event.peak_memory,
        "jobs": {
            name: {
                "status": job.status, "step": job.step, "failure": job.failure,
                "eval_before": job.eval_before, "eval_after": job.eval_after, "metrics": job.metrics,
                "idle_since": job.idle_since,
            }
            for name, job in event.result.jobs.items()
        },
    }  # fmt: skip


def job_result(job: Job, folder: Path, began: float) -> JobResult:
    """How a job stands at the end of a session.

    Args:
        began: when training began in this session, on the clock of its log history (`elapsed`).
    """
    best = job.judged.step if job.config.train.load_best_model_at_end and job.status == "done" else None
    own = [line for line in job.log_history if "loss" in line and line["elapsed"] >= began]
    rate = sum(line["tokens"] for line in own) / max(own[-1]["elapsed"] - began, 1e-9) if own else 0.0
    limited = job.status == "done" and job.stopped is None
    left = max(job.data.configured_steps - job.step, 0) if limited else 0  # the file may ask for fewer than were taken
    told = _told(job.log_history, job.step, best)
    return JobResult(job.status, job.step, folder, job.failure, tokens_per_second=rate, steps_left=left, **told)


def left_out_results(
    run: Run, left_out: Mapping[str, str], record: Mapping[str, Any]
) -> tuple[dict[str, JobResult], int]:
    """How the jobs stand that are not trained in this session, and the tokens that those which have ended were trained on.

    Args:
        left_out: why, by job.
        record: what run.json says.
    """
    out, tokens = dict[str, JobResult](), 0
    best = {job.name for job in run.jobs if job.train.load_best_model_at_end}
    for name, why in left_out.items():
        from packlora.runtime import restoring

        folder = Path(run.output_dir) / name
        status, step, failure = restoring.standing(folder, name, record["id"], record["jobs"][name]["steps"])
        if status == "stopped":
            out[name] = JobResult(status, step, folder, why)
            continue
        state = restoring.read_state(folder)
        kept = state.get("best_global_step") if name in best and status == "done" else None
        out[name] = JobResult(status, step, folder, failure, **_told(state["log_history"], step, kept))
        tokens += state["num_input_tokens_seen"]
    return out, tokens


def _told(history: Sequence[Mapping[str, Any]], step: int, best: int | None) -> dict[str, Any]:
    """Part of a result on evaluations and metrics up to a step. best: that of the adapter which is the result, if it is one
    that was evaluated before."""
    known = {line["step"]: line["eval_loss"] for line in history if "eval_loss" in line and line["step"] <= step}
    after = best or max((own for own, loss in known.items() if loss is not None), default=0)
    return {
        "eval_before": known.get(0),
        "eval_after": known[after] if after else None,
        "metrics": _metrics(history, after),
        "idle_since": idle_since([line for line in history if line["step"] <= step]),
        "overflows": sum(line.get("overflow", 0) for line in history if line["step"] <= step),
    }


def _metrics(history: Sequence[Mapping[str, Any]], evaluated: int) -> dict[str, float | None]:
    """Metrics of the evaluation after a step; of the last step where this is 0."""
    if not evaluated:
        return next((told_in(line) for line in reversed(history) if "loss" in line), {})
    (line, *_) = (line for line in history if line["step"] == evaluated and "eval_loss" in line)
    return {key: line[key] for key in line if key.startswith("eval_") and told_in({key.removeprefix("eval_"): 0})}


# --- device and versions -----------------------------------------------------------------------------------------------


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads ({processor_name()})"


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that can change a number."""
    out = {"python": platform.python_version(), "packlora": packlora.__version__}
    known = (
        "torch",
        "triton",
        "transformers",
        "tokenizers",
        "peft",
        "safetensors",
        "numpy",
        "liger-kernel",
        "bitsandbytes",
    )
    return out | {package: found for package in known if (found := installed(package))}


@cache
def installed(package: str) -> str | None:
    """Version of a package, or None. Kept: a look at its metadata takes a millisecond, and a run has thirty."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_commit() -> str | None:
    """The git commit of packlora's own source, when it runs from a checkout."""
    here = Path(packlora.__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    result = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or None
