"""Optimizers of libraries as a job's optimizer: Adafactor of transformers, SGD of torch, 8-bit AdamW and Lion of bitsandbytes.

Names and settings are those of transformers' TrainingArguments. Parameters are views of the job's one tensor, each of which the
library steps by itself: its factors and its blocks of 8-bit numbers are those of a parameter on its own, as without packlora.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers.optimization import Adafactor

from packlora.adapters.flat import SLOW, UNDECAYED, FlatLayout
from packlora.config import JobConfig, TrainConfig
from packlora.errors import InputError

CONSTANT = ("qmap1", "qmap2", "RMS")
"""Parts of a state that a library makes anew."""


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


def _made(config: TrainConfig, groups: list[dict[str, Any]]) -> Any:
    """The library's optimizer, with transformers' settings for its name."""
    name = config.optim
    if name == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, foreach=False)
    if name == "adafactor":
        return Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    from bitsandbytes import optim

    made: dict[str, Any] = {
        "lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2),
        "optim_bits": 8 if "8bit" in name else 32, "is_paged": name.startswith("paged_"),
    }  # fmt: skip
    return optim.Lion(groups, **made) if "lion" in name else optim.AdamW(groups, eps=config.adam_epsilon, **made)


class LibraryOptimizer:
    """The optimizer of one job. Arguments and methods are FlatAdamW's; no process has slices of the job.

    A parameter without a gradient is left alone by a step.
    """

    def __init__(self, flat: torch.Tensor, layout: FlatLayout, config: TrainConfig) -> None:
        self.flat, self.layout, self.config = flat, layout, config
        self.parameters = {name: torch.nn.Parameter(view) for name, view in layout.views(flat).items()}
        self.steps = dict.fromkeys(self.parameters, 0)
        fast = config.loraplus_lr_ratio or 1.0
        kinds = [(decayed, slow) for decayed in (True, False) for slow in (True, False)]
        groups = {kind: [p for name, p in self.parameters.items() if kind == _kind(name)] for kind in kinds}
        self._inner = _made(
            config,
            [
                {"params": own, "weight_decay": config.weight_decay if decayed else 0.0, "ratio": 1.0 if slow else fast}
                for (decayed, slow), own in groups.items()
                if own
            ],
        )

    @torch.no_grad()
    def step(self, gradient: torch.Tensor, without: Collection[str], lr: float) -> None:
        """See FlatAdamW.step. bitsandbytes' wait for the device."""
        for name, view in self.layout.views(gradient).items():
            self.parameters[name].grad = None if name in without else view
            self.steps[name] += name not in without
        for group in self._inner.param_groups:
            group["lr"] = lr * group["ratio"]
        self._inner.step()
        for parameter in self.parameters.values():
            parameter.grad = None
        torch.autograd.graph.increment_version(self.flat)  # which kernels do not that write by address

    def state(
        self,
        whole_of: Callable[[torch.Tensor], Mapping[str, torch.Tensor]] | None = None,
        everywhere: Callable[[Mapping[str, int]], Mapping[str, int]] = dict,
    ) -> dict[str, dict[str, torch.Tensor]]:
        """See FlatAdamW.state; beside `step` what the library keeps of a parameter, by its names."""
        return {
            name: {"step": torch.tensor(float(count))} | self._kept(name)
            for name, count in everywhere(self.steps).items()
            if count
        }

    def load(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take what `state` gave.

        Raises:
            ValueError: it does not fit a parameter.
        """
        for name, parameter in self.parameters.items():
            own = state.get(name)
            self.steps[name] = int(own["step"]) if own is not None else 0
            if own is None:
                self._inner.state.pop(parameter, None)
                continue
            fresh = self._fresh(parameter)
            wanted, found = self._shapes(fresh), self._shapes(own)
            if wanted != found:
                raise ValueError(f"{name} has {found}, should be {wanted}")
            for leaf in wanted:
                fresh[leaf].copy_(own[leaf])
            if "step" in fresh:
                fresh["step"] = self.steps[name]
            if fresh:
                self._inner.state[parameter] = fresh

    def _kept(self, name: str) -> dict[str, torch.Tensor]:
        """Nothing of a parameter of another stage, which sgd alone knows of."""
        parameter = self.parameters.get(name)
        own = {} if parameter is None else self._inner.state.get(parameter, {})
        return {leaf: own[leaf].to("cpu", copy=True) for leaf in self._shapes(own)}

    @torch.no_grad()
    def _fresh(self, parameter: torch.Tensor) -> dict[str, Any]:
        """What the library keeps of a parameter like this one after its first step."""
        one = torch.nn.Parameter(parameter.clone())
        one.grad = torch.zeros_like(one)
        inner = _made(self.config, [{"params": [one]}])
        inner.step()
        return dict(inner.state.get(one, {}))

    @staticmethod
    def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and types of what a checkpoint holds of a state."""
        return {
            leaf: (tuple(value.shape), str(value.dtype))
            for leaf, value in sorted(state.items())
            if isinstance(value, torch.Tensor) and leaf != "step" and leaf not in CONSTANT
        }


def _kind(name: str) -> tuple[bool, bool]:
    """Whether a parameter is decayed, and whether it learns at the learning rate itself under LoRA+."""
    return not name.endswith(UNDECAYED), name.endswith(SLOW)
