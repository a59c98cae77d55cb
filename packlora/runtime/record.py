"""run.json: everything that is needed to repeat a run, and what is told of its device."""

from __future__ import annotations

import resource
import secrets
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packlora.adapters.files import WEIGHTS
from packlora.base.model import Base
from packlora.config import JobConfig
from packlora.data.encode import samples_hash
from packlora.files import digest
from packlora.runtime.job import Job
from packlora.runtime.prepare import LEFT_OUT, Prepared, SavedRun, processor_name, source_commit, versions
from packlora.runtime.profiler import Profile


def run_record(
    prepared: Prepared, base: Base, jobs: list[Job], known: Profile, saved: SavedRun | None = None
) -> dict[str, Any]:
    """run.json: everything that is needed to repeat the run, or to continue it; the warnings are those of this session.

    saved: what it has said until now.
    """
    described = {}
    for job, item in zip(jobs, prepared.jobs, strict=True):
        lengths = [sample.num_tokens for sample in job.data.samples]
        counts, edges = np.histogram(lengths, bins=min(24, max(1, max(lengths) - min(lengths))))
        described[job.name] = {
            "seed": job.data.seed,
            "start_hash": (saved and saved.jobs[job.name].start_hash) or start_hash(job.config),
            "samples": len(lengths),
            "eval_samples": len(job.eval_samples),
            "tokens": sum(lengths),
            "label_tokens": sum(sample.num_labels for sample in job.data.samples),
            "data_hash": samples_hash(job.data.samples + job.eval_samples),
            "steps": job.data.num_steps,
            "trainable_parameters": job.adapter.num_parameters,
            "adapted_modules": len(job.adapter.weights),
            "truncated": item.encoded.truncated + item.eval_encoded.truncated,
            "dropped": item.encoded.dropped + item.eval_encoded.dropped,
            "length_histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        }
    warnings, names = prepared.warnings + base.warnings, [job.name for job in prepared.run.jobs]
    if saved is not None:
        described |= {name: saved.jobs[name].model_dump() for name in prepared.left_out}
        warnings += [
            f"resumed with {name} {now}, begun with {saved.versions[name]}"
            for name, now in versions().items()
            if saved.versions.get(name, now) != now
        ]
    return {
        "packlora": versions()["packlora"],
        "id": saved.id if saved else secrets.token_hex(8),
        "created": saved.created if saved else datetime.now(UTC).isoformat(timespec="seconds"),
        "config": prepared.run.model_dump(mode="json"),
        "versions": versions(),
        "device": device_name(base.device),
        "commit": source_commit(),
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
        "schedule": {"budget": prepared.budget, "layout": known.layout.name, "profile": known.describe()},
        "warnings": warnings,
        "result": None,
    }


def earlier_warnings(saved: SavedRun | None, now: list[str]) -> list[str]:
    """What a run has warned of before, where it still holds: not of a job that was left out."""
    return [text for text in saved.warnings if text not in now and LEFT_OUT not in text] if saved else []


def start_hash(job: JobConfig) -> str | None:
    """SHA-256 of the adapter that a job begins with, if it does not begin with one of its own."""
    return digest(Path(job.adapter.init_from) / WEIGHTS) if job.adapter.init_from is not None else None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads ({processor_name()})"


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
