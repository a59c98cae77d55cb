"""AdamW over the parameters of a job as one tensor: torch.optim.AdamW's numbers, by one kernel on a GPU and by a handful of
operations on a CPU, where the bits are those of a step of every parameter on its own.

A parameter without a gradient is left alone by a step, as by torch: it is not decayed, its moments stay and its steps are not
counted. Parameters that lie side by side and have taken the same steps are a span, and step together. They are all one span,
and biases another, unless a part of the adapter got no gradient in some step, or A and B have learning rates of their own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING

import torch
from torch.optim.adamw import adamw

from packlora.adapters.attach import Adapter
from packlora.adapters.flat import SLOW, UNDECAYED, FlatLayout
from packlora.config import JobConfig, TrainConfig
from packlora.errors import InputError

if TYPE_CHECKING:
    from packlora.engine.library_optimizer import LibraryOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
"""State of AdamW for every element, by torch's names."""


@dataclass(slots=True)
class _Span:
    """Elements [start, stop) of parameters that have taken the same steps."""

    names: tuple[str, ...]
    start: int
    stop: int
    decayed: bool
    ratio: float
    """Factor of the step's learning rate."""
    steps: int


class FlatAdamW:
    """The optimizer of one job.

    Args:
        flat: the parameters; changed in place, and its version moves at every step.
        layout: of `flat`. Names that end as UNDECAYED are not decayed; those that do not end as SLOW learn at
            loraplus_lr_ratio times the learning rate.
    """

    def __init__(self, flat: torch.Tensor, layout: FlatLayout, config: TrainConfig) -> None:
        self.flat, self.layout, self.config = flat, layout, config
        self._fused = flat.is_cuda or config.optim == "adamw_torch_fused"
        self._spans = self._spans_of(dict.fromkeys(layout.places, 0))
        self._moments: tuple[torch.Tensor, torch.Tensor] | None = None
        """MOMENTS, like `flat`; made by the first step."""

    @torch.no_grad()
    def ready(self, gradient: torch.Tensor, without: Collection[str], lr: float) -> Callable[[], None]:
        """Make what one step needs. Returns what takes it, without waiting for the device; on a GPU it makes no tensor.

        Args:
            gradient: like the parameters; its values are read when the step is taken.
            without: names of parameters that have no gradient.
        """
        if without:
            steps = {name: span.steps for span in self._spans for name in span.names}
            self._spans = self._spans_of(steps, without)
        due = [span for span in self._spans if span.names[0] not in without]
        kinds: dict[tuple[bool, float], list[_Span]] = {}
        for span in due:
            kinds.setdefault((span.decayed, span.ratio), []).append(span)
        calls = [self._step_of(spans, gradient, decayed, lr * ratio) for (decayed, ratio), spans in kinds.items()]

        def take() -> None:
            for call in calls:
                call()
            for span in due:
                span.steps += 1
            if self._fused:
                torch.autograd.graph.increment_version(self.flat)  # which torch's fused optimizers do not

        return take

    @torch.no_grad()
    def _step_of(self, spans: list[_Span], gradient: torch.Tensor, decayed: bool, lr: float) -> Callable[[], None]:
        config = self.config
        values, grads, first, second = (
            [tensor[span.start : span.stop] for span in spans] for tensor in (self.flat, gradient, *self._made())
        )
        steps = [torch.full((), float(span.steps), device=self.flat.device) for span in spans]
        return partial(
            adamw, values, grads, first, second, [], steps, foreach=False, fused=self._fused, amsgrad=False, lr=lr,
            beta1=config.adam_beta1, beta2=config.adam_beta2, weight_decay=config.weight_decay if decayed else 0.0,
            eps=config.adam_epsilon, maximize=False,
        )  # fmt: skip

    def state(
        self,
        whole_of: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] | None = None,
        everywhere: Callable[[Mapping[str, int]], Mapping[str, int]] = dict,
    ) -> dict[str, dict[str, torch.Tensor]]:
        """State of torch.optim.AdamW by parameter that has taken a step: step, exp_avg, exp_avg_sq; on the CPU.

        Args:
            whole_of: see AdapterState.whole_of; None: what is here.
            everywhere: see AdapterState.everywhere.
        """
        first, second = map(whole_of or (lambda moment: self.layout.views(moment.cpu())), self._made())
        steps = everywhere({name: span.steps for span in self._spans for name in span.names})
        return {
            name: {"step": torch.tensor(float(count)), **dict(zip(MOMENTS, (first[name], second[name]), strict=True))}
            for name, count in steps.items() if count and name in first
        }  # fmt: skip

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take what `state` gave, of what of the parameters is here; those that are not there have taken no step.

        Raises:
            ValueError: it does not fit a parameter.
        """
        moments = self._made()
        for leaf, moment in zip(MOMENTS, moments, strict=True):
            moment.zero_()
            for name, view in self.layout.views(moment).items():
                if name in state:
                    view.copy_(state[name][leaf])
        self._spans = self._spans_of(
            {name: int(state[name]["step"]) if name in state else 0 for name in self.layout.places}
        )

    def _made(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._moments is None:
            self._moments = torch.zeros_like(self.flat), torch.zeros_like(self.flat)
        return self._moments

    def _spans_of(self, steps: Mapping[str, int], without: Iterable[str] = ()) -> list[_Span]:
        """Make as few spans as there can be, none of which has parameters both with a gradient and without one."""
        left_out, places, spans = set(without), self.layout.places, []
        fast = self.config.loraplus_lr_ratio or 1.0

        def kind(name: str) -> tuple[bool, float, int, bool]:
            return not name.endswith(UNDECAYED), 1.0 if name.endswith(SLOW) else fast, steps[name], name in left_out

        for (decayed, ratio, count, _), members in groupby(places, key=kind):
            names = tuple(members)
            spans.append(_Span(names, places[names[0]].start, places[names[-1]].stop, decayed, ratio, count))
        return spans


def check_optim(job: JobConfig, device: torch.device, dtype: str) -> None:
    """Raises InputError where the optimizer of a job cannot be had on a device."""
    name = job.train.optim
    if not of_bitsandbytes(name):
        return
    said = f"job {job.name!r}: train.optim: {name}"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(f"{said} needs bitsandbytes, which is not installed; pip install 'packlora[quant]'")
    if dtype == "float64":
        raise InputError(f"{said} keeps no float64; use adamw_torch, adafactor or sgd, or another dtype")
    import bitsandbytes

    known: set[str] = getattr(bitsandbytes, "supported_torch_devices", {"cuda"})
    if device.type not in known:
        raise InputError(
            f"{said}: bitsandbytes {bitsandbytes.__version__} has nothing for {device.type}; use adamw_torch"
        )
    if name.startswith("paged_") and device.type == "cpu":
        raise InputError(f"{said} pages its state between GPU and host, and this run is on the CPU; use {name[6:]}")


def of_bitsandbytes(name: str) -> bool:
    return "8bit" in name or "lion" in name or name.startswith("paged_")


def optimizer_of(adapter: Adapter, config: TrainConfig) -> FlatAdamW | LibraryOptimizer:
    """The optimizer of a job that has taken no step."""
    if config.optim.startswith("adamw_torch"):
        return FlatAdamW(adapter.flat, adapter.layout, config)
    from packlora.engine.library_optimizer import LibraryOptimizer

    return LibraryOptimizer(adapter.flat, adapter.layout, config, adapter.trained_parts, adapter.copied_embeddings)
