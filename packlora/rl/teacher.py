"""Teachers of on-policy distillation: log-probabilities of what an adapter has drawn, by a model that it is to resemble.

A teacher is the base model without an adapter, which takes no memory; or the model of a folder or hub id, or an adapter of PEFT
on its own base, which are loaded beside the base model and need its vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from packlora.base.load import read_config, read_model, read_tokenizer
from packlora.base.model import Base
from packlora.config import JobConfig
from packlora.data.encode import Sample
from packlora.errors import InputError
from packlora.runtime.prepared_job import PreparedJob

BASE = "base"
"""Name of the base model as a teacher."""
ADAPTER = "adapter_config.json"


def check_teacher(source: str, tokenizer: Any, job: str) -> None:
    """Raises InputError where a teacher is not there, or has another vocabulary than the tokenizer of the base model."""
    if source != BASE:
        with _named(source, job):
            base = _base_of(source)
            read_config(base, None)
            if read_tokenizer(base, None).get_vocab() != tokenizer.get_vocab():
                raise InputError("its tokens are not those of base_model; take a teacher of the same family")


class Teacher:
    """A model that is loaded for its log-probabilities.

    Args:
        source: folder or hub id of a model, or folder of an adapter; it has been checked.
        dtype, device: of the base model that is trained.
        job: name, for errors.

    Raises:
        InputError: it cannot be loaded.
    """

    def __init__(self, source: str, dtype: torch.dtype, device: torch.device, job: str) -> None:
        with _named(source, job):
            base = _base_of(source)
            model: Any = read_model(base, None, dtype)
            if base != source:
                from peft import PeftModel

                model = PeftModel.from_pretrained(model, source)
        self._model, self._device = model.to(device).eval(), device

    @torch.no_grad()
    def logps(self, samples: Sequence[Sample], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probabilities [l] float64 of the labels of each sample, which is run by itself; of logits over a temperature."""
        out = []
        for sample in samples:
            ids_1T = torch.from_numpy(sample.ids.astype(np.int64))[None].to(self._device)
            logits_TV = self._model(input_ids=ids_1T, use_cache=False).logits[0]
            places = torch.from_numpy(np.flatnonzero(sample.is_label)).to(self._device)
            logp_lV = (logits_TV[places - 1].float() / temperature).log_softmax(-1)
            out.append(logp_lV.gather(-1, ids_1T[0, places, None])[:, 0].cpu().double().numpy())
        return out


def load_teachers(jobs: Sequence[PreparedJob], base: Base) -> dict[str, Teacher]:
    """Load the teachers of jobs beside the base model, by source, before anything is written. Raises InputError."""
    found: dict[str, Teacher] = {}
    for job in jobs:
        load_teacher(job.config, base, found)
    return found


def load_teacher(job: JobConfig, base: Base, teachers: dict[str, Teacher]) -> None:
    """Load the teacher of a job, if it has one which is not among the teachers yet. Raises InputError."""
    source = None if job.rollout is None else job.rollout.teacher
    if source is not None and source not in (BASE, *teachers):
        teachers[source] = Teacher(source, base.model.dtype, base.device, job.name)


@contextmanager
def _named(source: str, job: str) -> Iterator[None]:
    try:
        yield
    except (InputError, ValueError, OSError, RuntimeError) as error:
        raise InputError(f"job {job!r}: rollout.teacher {source!r}: {error}") from None


def _base_of(source: str) -> str:
    """The model of a teacher: its own folder, or the base that an adapter's configuration names."""
    file = Path(source) / ADAPTER
    if not file.is_file():
        return source
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise InputError(f"{ADAPTER} names no base model")
    return base
