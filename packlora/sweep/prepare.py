"""Preparation of jobs that join a run."""

from __future__ import annotations

from packlora.base.device import choose_device
from packlora.config import JobConfig
from packlora.data.reader import Reader
from packlora.engine.optimizer import check_optim
from packlora.errors import InputError
from packlora.plans.ask import Ask
from packlora.runtime.prepare import adapter_config, adapter_spec, check_spec, doubts_of_starts, layer_asks
from packlora.runtime.prepared_job import PreparedJob
from packlora.runtime.prepared_run import PreparedRun
from packlora.terminal import silent


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
    reader, out, notes = Reader(), [], doubts_of_starts(run, jobs)
    for job in jobs:
        spec = adapter_spec(job, configs[job.name], encoder.skeleton)
        check_spec(run, job, spec, encoder.skeleton)
        if prepared.form is not None:
            from packlora.runtime.wholeness import copied_alone

            if found := copied_alone(spec, encoder.skeleton):
                raise InputError(f"job {job.name!r}: {found}, which {prepared.form.key} does not take; leave one out")
        one, doubts = encoder.job(job, spec, reader.rows(job), reader.held_out(job), budget, silent)
        out.append(one)
        notes += spec.notes + doubts
    return out, notes


def asks_of_more(prepared: PreparedRun, jobs: list[PreparedJob]) -> dict[str, Ask]:
    """How the layers of jobs that join are to be computed, by module path."""
    assert prepared.encoder is not None
    return layer_asks(prepared.run, prepared.encoder.skeleton, {job.config.name: job.spec for job in jobs}, True)
