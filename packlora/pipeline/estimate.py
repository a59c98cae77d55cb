"""Estimates of what stages of a pipeline have of the layers, and so of time and memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from packlora.base.device import choose_device
from packlora.config import Run
from packlora.ops.gpu import capability
from packlora.runtime import estimate
from packlora.runtime.prepared_run import PreparedRun
from packlora.runtime.profiles import Profile
from packlora.schedule.cost import CostModel
from packlora.schedule.types import ScheduleError

STAGE_SECONDS, LAUNCH_SECONDS, HOPPER_LAUNCH_SECONDS = {"cuda": 2e-4}, {"cuda": 3.5e-3}, 6.5e-3
"""Seconds of a layer's forward: what a microbatch takes beside its tokens, and what it takes at least. Stages have no CUDA
graphs, so with few tokens the host takes longer than the GPU: a stage's host launches a layer's forward and backward in 8.4 ms
beside an H200. Plans count with one speed for all GPUs, and Hopper is 1.5 times as fast: what takes the host 4.2 ms is 6.5 of
theirs. Values were chosen by simulation with the times of layers that were measured (benchmarks/LOG.md)."""


def staged(known: Profile, run: Run, prepared: PreparedRun, stages: int) -> Profile:
    """Profile of a pipeline of so many devices like the known one: memory is that of one of them, with as many microbatches in
    flight."""
    cost = on_stages(known.cost, run, prepared, stages)
    return replace(known, cost=cost, kept_bytes=known.kept_bytes * largest_stage(run, prepared, stages))


def on_stages(cost: CostModel, run: Run, prepared: PreparedRun, stages: int) -> CostModel:
    """Cost of a microbatch on each stage, whose devices are of one kind. cost: of one on a device that has all layers."""
    layers, device = prepared.shape.layers, choose_device(run.device)
    hopper = device.type == "cuda" and capability(device)[0] == 9
    least = HOPPER_LAUNCH_SECONDS if hopper else LAUNCH_SECONDS.get(device.type, 0.0)
    return replace(
        cost,
        stage_shares=_shares(run, prepared, stages, [active for _, active in prepared.shape.layer_numbers]),
        fixed=max(cost.fixed, layers * STAGE_SECONDS.get(device.type, 0.0)),
        least=layers * least,
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


def balance(stages: int, layers: int, head_in_layers: float = 0.0, costs: Sequence[float] = ()) -> tuple[int, ...]:
    """Layers per stage with the shortest slowest stage, the last stage also holding a head that costs so many layers.

    Args:
        costs: of each layer, 1 on average; empty: all cost as much.

    Raises:
        ScheduleError: fewer layers than stages.
    """
    if stages < 1 or layers < stages:
        raise ScheduleError(f"{layers} layers cannot be cut into {stages} stages; each stage needs at least one layer")
    if stages == 1:
        return (layers,)
    if len(set(costs)) > 1:
        return _of_unlike(stages, costs, head_in_layers)
    others = stages - 1

    def slowest(last: int) -> tuple[float, int]:
        return max(-(-(layers - last) // others), last + head_in_layers), -last

    last = min(range(1, layers - others + 1), key=slowest)
    each, more = divmod(layers - last, others)
    return (*(each + (stage < more) for stage in range(others)), last)


def _of_unlike(stages: int, costs: Sequence[float], head: float) -> tuple[int, ...]:
    """Layers per stage with the shortest slowest stage, where layers differ in cost."""
    until = [0.0, *accumulate(costs)]

    def filled(most: float) -> tuple[int, ...] | None:
        """Every stage as full as `most` allows, and one layer left for each of those behind it."""
        ends = [0]
        for stage in range(1, stages):
            last = len(costs) - (stages - stage)
            ends.append(min(bisect_right(until, until[ends[-1]] + most) - 1, last))
            if ends[-1] == ends[-2]:
                return None
        ends.append(len(costs))
        fits = until[-1] - until[ends[-2]] + head <= most
        return tuple(end - start for start, end in pairwise(ends)) if fits else None

    low, high = 0.0, until[-1] + head
    found = filled(high)
    for _ in range(40):
        middle = (low + high) / 2
        tried = filled(middle)
        low, high, found = (middle, high, found) if tried is None else (low, middle, tried)
    assert found is not None
    return found
