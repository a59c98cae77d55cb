"""Devices that hold the experts of a model together: which layouts have them, and what such a device takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from packlora.errors import InputError
from packlora.experts.cut import check_experts
from packlora.parallel import layouts
from packlora.parallel.layout import Layout
from packlora.runtime.estimate import TRAINABLE_BYTES, analytic_cost, speed
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile


def candidates(prepared: PreparedRun, devices: int, work: Mapping[str, float]) -> list[Layout]:
    """Layouts whose devices hold the experts together, where the run file does not ask for it but the model could be shared out
    so: of each number, in both ways, the one whose jobs share the fewest devices and leave none without a job.

    Args:
        work: by job, what it is predicted to take.
    """
    parallel, encoder = prepared.run.parallel, prepared.encoder
    asked = parallel.divided or parallel.package
    if asked or prepared.form is not None or encoder is None:
        return []
    out = []
    for degree in range(2, devices + 1):
        if devices % degree or any(count % degree for count in prepared.shape.experts) or not prepared.shape.experts:
            continue
        try:
            check_experts(encoder.skeleton, degree)
        except InputError:
            continue
        for exchange in (False, True):
            every = layouts.layouts(work, devices, expert=degree, exchange=exchange)
            out += layouts.fewest(every, parallel.devices_per_job)
    return out


def profile(known: Profile, prepared: PreparedRun, layout: Layout) -> Profile:
    """Profile of one of the devices of a layout, each like the known one, where they hold the experts together. They run the
    same microbatches, or, exchanging tokens, their own; then each computes as much as it has. Messages are not counted."""
    if layout.expert == 1:
        return known
    run = prepared.run
    whole, shared = (analytic_cost(run, prepared, *speed(run), experts_on=count) for count in (1, layout.experts_on))
    cost = replace(
        known.cost,
        per_token=known.cost.per_token * shared.per_token / whole.per_token,
        backward_ratio=known.cost.backward_ratio * shared.backward_ratio / whole.backward_ratio,
    )
    shape, width, less = prepared.shape, getattr(torch, run.dtype).itemsize, 1 - 1 / layout.expert
    layers = 1 if run.gradient_checkpointing else shape.layers
    spared = 0 if layout.experts_on == 1 else less * width * shape.routed_width * layers
    return replace(
        known,
        cost=cost,
        kept_bytes=known.kept_bytes
        - less * (width * shape.expert_parameters + TRAINABLE_BYTES * sum(job.on_experts for job in prepared.jobs)),
        bytes_per_token=known.bytes_per_token - spared,
    )
