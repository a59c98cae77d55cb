"""Optimizers of libraries as a job's optimizer: Adafactor of transformers, SGD of torch, 8-bit AdamW and Lion of bitsandbytes.

Names and settings are those of transformers' TrainingArguments. The library steps each parameter by itself: its factors, its
clip and its blocks of 8-bit numbers are those of a tensor of PEFT's shape. Parameters are views of the job's one tensor; of a
parameter that is trained in part (adapters/starts.py) the library has the part.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers.optimization import Adafactor

from packlora.adapters.flat import SLOW, UNDECAYED, FlatLayout
from packlora.config import TrainConfig

CONSTANT = ("qmap1", "qmap2", "RMS")
"""Parts of a state that a library makes anew."""


class _Kind(NamedTuple):
    """Settings that an optimizer has for a kind of parameters. ratio: factor of the step's learning rate."""

    is_embedding: bool
    is_decayed: bool
    ratio: float


def _made(config: TrainConfig, kind: _Kind, parameters: Sequence[torch.nn.Parameter]) -> Any:
    """The library's optimizer of parameters of one kind, with transformers' settings for its name, which keep 32 bits of the
    moments of a whole embedding."""
    name, decay = config.optim, config.weight_decay if kind.is_decayed else 0.0
    if name == "sgd":
        return torch.optim.SGD(parameters, lr=config.learning_rate, weight_decay=decay, foreach=False)
    if name == "adafactor":
        fixed = {"scale_parameter": False, "relative_step": False}
        return Adafactor(parameters, lr=config.learning_rate, weight_decay=decay, **fixed)
    from bitsandbytes import optim

    made: dict[str, Any] = {
        "lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "weight_decay": decay,
        "optim_bits": 8 if "8bit" in name and not kind.is_embedding else 32, "is_paged": name.startswith("paged_"),
    }  # fmt: skip
    own = {} if "lion" in name else {"eps": config.adam_epsilon}
    inner: Any = (optim.Lion if "lion" in name else optim.AdamW)(parameters, **made, **own)
    inner.mng = _no_overrides()
    return inner


def _no_overrides() -> Any:
    """A manager of overrides that has none. bitsandbytes' own is one for all optimizers of a process and knows parameters by
    their place in an optimizer or by an id that may be used again: what other code asks for would be done to a job."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    return manager


class LibraryOptimizer:
    """The optimizer of one job. The other arguments and the methods are FlatAdamW's; no process has slices of the job.

    A parameter without a gradient is left alone by a step.

    Args:
        parts: the parts of parameters that are stepped, by name, where that is not the whole parameter. The library sees a
            tensor of the part's shape.
        embeddings: names of whole embeddings.
    """

    def __init__(
        self, flat: torch.Tensor, layout: FlatLayout, config: TrainConfig,
        parts: Mapping[str, tuple[slice, ...]] | None = None, embeddings: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.flat, self.layout, self.config, self._parts = flat, layout, config, parts or {}
        self._views = self._stepped(flat)
        self.parameters = {name: torch.nn.Parameter(view.contiguous()) for name, view in self._views.items()}
        self._copies = [name for name, view in self._views.items() if not view.is_contiguous()]
        """Names of the parts that do not lie in one piece, of which the library steps copies."""
        self.steps = dict.fromkeys(self.parameters, 0)
        fast = config.loraplus_lr_ratio or 1.0
        self._kinds = {
            name: _Kind(name in embeddings, not name.endswith(UNDECAYED), 1.0 if name.endswith(SLOW) else fast)
            for name in self.parameters
        }
        self._inner = {
            kind: _made(config, kind, [self.parameters[name] for name, own in self._kinds.items() if own == kind])
            for kind in dict.fromkeys(self._kinds.values())
        }

    def _stepped(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of what is stepped of a tensor like the parameters', by name."""
        return {name: view[self._parts.get(name, ...)] for name, view in self.layout.views(flat).items()}

    @torch.no_grad()
    def ready(self, gradient: torch.Tensor, without: Collection[str], lr: float) -> Callable[[], None]:
        """See FlatAdamW.ready. bitsandbytes' wait for the device; Adafactor, and SGD with decay, make tensors as they step."""
        views = {name: view for name, view in self._stepped(gradient).items() if name not in without}
        grads = {
            name: torch.empty_like(self.parameters[name]) if name in self._copies else views[name] for name in views
        }
        self._make_states(grads)

        @torch.no_grad()
        def take() -> None:
            for name, parameter in self.parameters.items():
                parameter.grad = grads.get(name)
                self.steps[name] += name in grads
            for name in self._copies:
                self.parameters[name].copy_(self._views[name])
                if name in grads:
                    grads[name].copy_(views[name])
            for kind, inner in self._inner.items():
                inner.param_groups[0]["lr"] = lr * kind.ratio
                inner.step()
            for name in self._copies:
                self._views[name].copy_(self.parameters[name])
            for parameter in self.parameters.values():
                parameter.grad = None
            torch.autograd.graph.increment_version(self.flat)  # which kernels do not that write by address

        return take

    def _make_states(self, names: Collection[str]) -> None:
        """Make the states of bitsandbytes that the first step of these parameters would make."""
        for kind, inner in self._inner.items():
            own = [name for name, other in self._kinds.items() if other == kind]  # as they were given to it
            for at, name in enumerate(own if hasattr(inner, "init_state") else ()):
                if name in names and (parameter := self.parameters[name]) not in inner.state:
                    try:
                        inner.init_state(inner.param_groups[0], parameter, 0, at)
                    except BaseException:
                        inner.state.pop(parameter, None)
                        raise

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
            own, kept = state.get(name), self._inner[self._kinds[name]].state
            self.steps[name] = int(own["step"]) if own is not None else 0
            if own is None:
                kept.pop(parameter, None)
                continue
            fresh = self._fresh(name)
            wanted, found = self._shapes(fresh), self._shapes(own)
            if wanted != found:
                raise ValueError(f"{name} has {found}, should be {wanted}")
            for leaf in wanted:
                fresh[leaf].copy_(own[leaf])
            if "step" in fresh:
                fresh["step"] = self.steps[name]
            if fresh:
                kept[parameter] = fresh

    def _kept(self, name: str) -> dict[str, torch.Tensor]:
        """Nothing of a parameter of another stage, which sgd alone knows of."""
        if name not in self.parameters:
            return {}
        own = self._inner[self._kinds[name]].state.get(self.parameters[name], {})
        return {leaf: own[leaf].to("cpu", copy=True) for leaf in self._shapes(own)}

    @torch.no_grad()
    def _fresh(self, name: str) -> dict[str, Any]:
        """State that the library has for a parameter like this one after its first step."""
        one = torch.nn.Parameter(self.parameters[name].clone())
        one.grad = torch.zeros_like(one)
        inner = _made(self.config, self._kinds[name], [one])
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
