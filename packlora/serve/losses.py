"""Losses of the protocol: a request's arrays, checked, as samples and an objective of the engine.

Shapes: N places of a sample, K targets of a place, L = N K labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.data.targets import TargetSample
from packlora.engine.objective import Objective, RowsView
from packlora.engine.objectives.policy import (
    ADVANTAGE,
    COUNTED,
    HIGH,
    LOW,
    SAMPLED,
    WEIGHT,
    PolicyObjective,
    WeightedCrossEntropy,
)
from packlora.engine.rows import Row
from packlora.errors import quoted
from packlora.serve.errors import Failed, Refused
from packlora.serve.messages import Datum, ForwardBackward

FACTS: Mapping[str, float] = {"units": 1.0, "samples": 1.0}
"""Facts of a sum of losses, which has no normaliser."""
TARGETS = "target_tokens"
_CLIP = {"clip_low_threshold": LOW, "clip_high_threshold": HIGH}
_POLICY = {"logprobs": SAMPLED, "advantages": ADVANTAGE}
INPUTS: Mapping[str, Mapping[str, str]] = {
    "cross_entropy": {"weights": WEIGHT},
    "importance_sampling": _POLICY,
    "ppo": _POLICY | _CLIP,
    "cispo": _POLICY | _CLIP,
    "dro": _POLICY,
    "gspo": _POLICY | _CLIP | {"sequence_ratio_mask": COUNTED},
}
"""Arrays of a loss beside its targets, with the columns that they become."""
OPTIONAL = {"weights", "sequence_ratio_mask", *_CLIP}
IGNORED = ("weights", "mask")
"""Arrays that clients send beside those of a loss, see check_ignored."""
CONFIG: Mapping[str, tuple[str, ...]] = {"ppo": (*_CLIP,), "cispo": (*_CLIP,), "gspo": (*_CLIP,), "dro": ("beta",)}
"""Numbers of loss_fn_config by loss."""
CLIPS = {"cispo": (0.0, 4.0)}
"""Lowest and highest ratio that is not clipped, where it is not 0.8 and 1.2."""
UNSERVED = {
    "stable_reinforce": "its formula is not public; use loss_fn=importance_sampling|ppo|cispo",
    "custom": "custom losses run in the client: leave custom_loss_server_side off",
}


class Summed(Objective):
    """An objective without metrics: gradients and sums of several requests, under several losses, add up.

    config: loss_fn_config that it was made of, see objective_of.
    """

    def __init__(self, inner: Objective, config: Mapping[str, float | str]) -> None:
        self.inner, self.config = inner, config
        self.name, self.weights, self.columns = inner.name, inner.weights, inner.columns

    def columns_of(self, rows: Sequence[Row]) -> Mapping[str, np.ndarray]:
        return self.inner.columns_of(rows)

    def loss(self, logp_L: torch.Tensor, rows: RowsView) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.loss(logp_L, rows)[0], logp_L.new_zeros(0)

    def factors(self, rows: RowsView) -> torch.Tensor | None:
        return self.inner.factors(rows)


@dataclass(frozen=True, slots=True)
class Work:
    """Samples of a request and their objective. shapes: of each one's targets, (N,) or (N, K)."""

    objective: Objective
    samples: Sequence[Sample]
    shapes: Sequence[tuple[int, ...]]

    def loss_of(self, logprobs: Sequence[np.ndarray]) -> float:
        """Sum of the losses, from the log-probabilities of each sample's labels, float64 [L]."""
        rows = [Row(sample) for sample in self.samples]
        view = RowsView.of(self.objective, rows, FACTS)
        return float(self.objective.loss(torch.from_numpy(np.concatenate(logprobs)), view)[0].sum())


def check_loss(name: str) -> None:
    """Raises Failed where a loss of the protocol is not served, Refused where there is no such loss."""
    if name in UNSERVED:
        raise Failed(f"loss_fn {name!r} is not served: {UNSERVED[name]}")
    if name not in INPUTS:
        raise Refused(f"loss_fn: {quoted(name)} is not served; served are {', '.join(INPUTS)}")


def check_ignored(request: ForwardBackward) -> None:
    """Raises Refused where an array that the loss does not read is neither 1, nor 0 where nothing counts anyway."""
    counts = {"cross_entropy": "weights", "dro": "", "gspo": ""}.get(request.loss, "advantages")
    for number, datum in enumerate(request.data):
        for name in IGNORED:
            values, counted = datum.inputs.get(name), datum.inputs.get(counts)
            if values is None or name in INPUTS[request.loss]:
                continue
            is_idle = False if counted is None or counted.shape != values.shape else counted == 0
            if not ((values == 1) | ((values == 0) & is_idle)).all():
                advice = f", and give {counts} of 0 there" if counts else ""
                raise Refused(
                    f"data[{number}].loss_fn_inputs.{name}: {request.loss} does not read it, and it is not 1 where something "
                    f"counts; leave it out{advice}"
                )


def work_of(request: ForwardBackward, vocabulary: int, context: int, most_targets: int) -> Work:
    """Check a request. Raises Refused, which names the field; Failed as check_loss."""
    check_loss(request.loss)
    objective = objective_of(request.loss, request.config)
    samples, shapes = [], []
    for number, datum in enumerate(request.data):
        sample, shape = _sample(datum, request.loss, f"data[{number}]", vocabulary, context)
        samples.append(sample)
        shapes.append(shape)
    if (total := sum(sample.num_labels for sample in samples)) > most_targets:
        raise Refused(f"data: {total} targets, above the limit targets of {most_targets}; send several requests")
    return Work(objective, samples, shapes)


def objective_of(name: str, config: Mapping[str, float | str]) -> Summed:
    """Objective of a loss of the protocol with its loss_fn_config. Raises Refused."""
    known = CONFIG.get(name, ())
    for key, value in config.items():
        if key not in known:
            raise Refused(f"loss_fn_config: {quoted(key)} is no key of {name}; it has {', '.join(known) or 'none'}")
        if isinstance(value, str) or not np.isfinite(value):
            raise Refused(f"loss_fn_config.{key}: {quoted(value)} is no finite number")
    if name == "cross_entropy":
        return Summed(WeightedCrossEntropy(), config)
    low, high = CLIPS.get(name, (0.8, 1.2))
    low, high = (float(config.get(key, own)) for key, own in zip(_CLIP, (low, high), strict=True))
    if not 0 <= low <= high:
        raise Refused(f"loss_fn_config: clip thresholds {low:g} and {high:g} are no lower and upper bound of a ratio")
    beta = float(config.get("beta", 0.05))
    return Summed(PolicyObjective(name, (low, high), beta), config)


def _sample(datum: Datum, loss: str, where: str, vocabulary: int, context: int) -> tuple[TargetSample, tuple[int, ...]]:
    ids = datum.ids
    if not len(ids):
        raise Refused(f"{where}.model_input: it has no tokens")
    if len(ids) > context:
        raise Refused(f"{where}.model_input: {len(ids)} tokens, and the model's context is {context}; cut the sample")
    _check_tokens(ids, f"{where}.model_input", vocabulary)
    field = f"{where}.loss_fn_inputs"
    if (targets := datum.inputs.get(TARGETS)) is None:
        raise Refused(f"{field}: {TARGETS} is missing")
    if targets.dtype.kind != "i":
        raise Refused(f"{field}.{TARGETS}: {targets.dtype.name}; token ids are int64 or int32")
    if len(targets) != len(ids):
        raise Refused(f"{field}.{TARGETS}: {len(targets)} rows for {len(ids)} tokens of model_input")
    if targets.ndim == 2 and (loss != "cross_entropy" or not targets.shape[1]):
        raise Refused(
            f"{field}.{TARGETS}: shape {list(targets.shape)}; {loss} takes [N], only cross_entropy [N, K], K > 0"
        )
    _check_tokens(targets, f"{field}.{TARGETS}", vocabulary)
    columns = dict(_columns(datum.inputs, loss, field, targets.shape))
    if loss in ("importance_sampling", "ppo", "cispo"):  # nothing may become infinite where it counts for nothing
        columns[SAMPLED] = np.where(columns[ADVANTAGE] == 0, 0.0, columns[SAMPLED])
    each = targets.shape[1] if targets.ndim == 2 else 1
    places = np.repeat(np.arange(len(ids)), each)
    return TargetSample.of(ids, places, targets.reshape(-1), columns), targets.shape


def _columns(
    inputs: Mapping[str, np.ndarray], loss: str, field: str, shape: tuple[int, ...]
) -> Mapping[str, np.ndarray]:
    known, out = INPUTS[loss], dict[str, np.ndarray]()
    for name in inputs:
        if name not in known and name != TARGETS and name not in IGNORED:
            raise Refused(f"{field}: {quoted(name)} is no input of {loss}; it has {TARGETS}, {', '.join(known)}")
    for name, column in known.items():
        values = inputs.get(name)
        if values is None:
            if name in OPTIONAL:
                continue
            raise Refused(f"{field}: {name} is missing, which {loss} needs")
        if values.shape != shape:
            raise Refused(f"{field}.{name}: shape {list(values.shape)}, and {TARGETS} has {list(shape)}")
        if not np.isfinite(values).all():
            raise Refused(f"{field}.{name}: it has values that are not finite")
        out[column] = values.astype(np.float64).reshape(-1)
    return out


def _check_tokens(ids: np.ndarray, where: str, vocabulary: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < vocabulary):
        wrong = ids[(ids < 0) | (ids >= vocabulary)].flat[0]
        raise Refused(f"{where}: token {wrong} is not one of the vocabulary, 0 to {vocabulary - 1}")


def cut(samples: Sequence[Sample], budget: int, cost: Callable[[Sample], int]) -> list[range]:
    """Cut the rows of a request into pieces of at most so many tokens, in their order; one that is longer is alone.

    A piece is the part of a microbatch that this request fills: who else is in it changes no bit of the request's numbers.
    """
    pieces, start, tokens = [], 0, 0
    for number, sample in enumerate(samples):
        own = cost(sample)
        if number > start and tokens + own > budget:
            pieces.append(range(start, number))
            start, tokens = number, 0
        tokens += own
    return [*pieces, range(start, len(samples))]
