"""Estimates of what stages of a pipeline have of the layers, and so of time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from packlora.config import Run
from packlora.pipeline.balance import balance
from packlora.runtime import estimate
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.schedule.cost import CostModel


def staged(known: Profile, run: Run, prepared: PreparedRun, stages: int) -> Profile:
    """Profile of a pipeline of so many devices like the known one: memory is that of one of them, with as many microbatches in
    flight."""
    cost = on_stages(known.cost, run, prepared, stages)
    return replace(known, cost=cost, kept_bytes=known.kept_bytes * largest_stage(run, prepared, stages))


def on_stages(cost: CostModel, run: Run, prepared: PreparedRun, stages: int) -> CostModel:
    """Cost of a microbatch on each stage. cost: of one on a device that has all layers."""
    return replace(
        cost, stage_shares=_shares(run, prepared, stages, [active for _, active in prepared.shape.layer_numbers])
    )


def planning_cost(run: Run, prepared: PreparedRun, stages: int) -> CostModel:
    """Cost of a microbatch on each stage, for the planner; see estimate.planning_cost."""
    return on_stages(estimate.planning_cost(run, prepared), run, prepared, stages)


def stage_layers(run: Run, prepared: PreparedRun, stages: int) -> tuple[int, ...]:
    """Layers of each stage of a pipeline, so that the slowest one is as fast as it can be; the last one has the output layer
    and the loss too, by what was measured of them (head_cost.py), else by their operations. A layer costs by the weights that a
    token meets there, of experts those that it goes to."""
    shape = prepared.shape
    mean = sum(active for _, active in shape.layer_numbers) / max(1, len(shape.layer_numbers))
    costs = [active / mean for _, active in shape.layer_numbers] if mean else []
    return balance(stages, shape.layers, head_in_layers(run, prepared), costs)


def head_in_layers(run: Run, prepared: PreparedRun) -> float:
    """How many layers of the run, adapters included, the output layer and the loss take as long as."""
    forward, backward, head = estimate.operations(run, prepared)
    return 2 * head / ((forward + backward) / prepared.shape.layers)


def largest_stage(run: Run, prepared: PreparedRun, stages: int) -> float:
    """Share of the layers' parameters, all experts included, on the stage that has the most."""
    return max(_shares(run, prepared, stages, [held for held, _ in prepared.shape.layer_numbers]))


def _shares(run: Run, prepared: PreparedRun, stages: int, numbers: Sequence[int]) -> tuple[float, ...]:
    """The part that each stage has of numbers that belong to the layers; where these are not known, all layers are alike."""
    until = [0, *accumulate(numbers if any(numbers) else [1] * prepared.shape.layers)]
    ends = [0, *accumulate(stage_layers(run, prepared, stages))]
    return tuple((until[end] - until[start]) / until[-1] for start, end in pairwise(ends))
