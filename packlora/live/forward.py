"""Replacement of a PEFT layer's forward: who computes a call, this package or PEFT, and the count of both."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from packlora.adapters.norms import RowNorms
from packlora.live.adapter import DISABLED, MERGED, NOT_ACTIVE
from packlora.live.wrapped import kind_of

EMPTY = "x is empty"
ASKED_FOR = (DISABLED, MERGED, NOT_ACTIVE, EMPTY)
"""Reasons for PEFT's own forward that are no loss: there is no adapter to compute."""
REPLICA = "a replica of nn.DataParallel computes with tensors of its own"


@dataclass(slots=True)
class Warned:
    """Whether the one warning of a model was given."""

    yet: bool = False


@dataclass(slots=True)
class Calls:
    """Calls of one layer: how often it was computed here, and how often by PEFT, by reason. Compiled graphs count nothing."""

    path: str
    promised: bool = False
    """The report calls the layer accelerated, so a call that PEFT computes is worth a warning."""
    warned: Warned = field(default_factory=Warned)
    served: int = 0
    left: dict[str, int] = field(default_factory=dict)

    def leave(self, reason: str) -> None:
        """Count a call that PEFT computes."""
        if torch.compiler.is_compiling():
            return
        self.left[reason] = self.left.get(reason, 0) + 1
        if self.promised and not self.warned.yet and reason not in ASKED_FOR:
            self.warned.yet = True
            warnings.warn(
                f"packlora: {self.path} runs PEFT's own forward now, though the report of accelerate() calls it accelerated: "
                f"{reason}. This is said once for a model; report.served() counts the calls of every layer",
                stacklevel=2,
            )


def _is_checkpointed_by_operation() -> bool:
    """Whether torch.utils.checkpoint watches operations, in the forward or in the recomputation."""
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in _get_current_dispatch_mode_stack())


class OwnForward:
    """Stand-in for `forward` of one PEFT layer."""

    def __init__(self, layer: Any, path: str, norms: RowNorms) -> None:
        self.layer, self.path, self.norms = layer, path, norms
        self.on = True
        self.calls = Calls(path)

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not self.on:
            return self.peft(x, *args, **kwargs)
        call: Any = self.why_peft(x, args, kwargs) or self.ready()
        if isinstance(call, str):
            self.calls.leave(call)
            return self.peft(x, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self.calls.served += 1
        return self.compute(x, call)

    def install(self) -> None:
        self.layer.forward = self.__call__
        self.layer._packlora = self
        self.layer._replicate_for_data_parallel = self.replica

    @staticmethod
    def remove(module: nn.Module) -> None:
        """Remove the stand-in from a module that has one. Where other code has wrapped the forward since, the stand-in stays
        inside of the wrapper, switched off."""
        own = module.__dict__.pop("_packlora", None)
        if own is not None:
            own.on = False
            module.__dict__.pop("_replicate_for_data_parallel", None)
            if module.__dict__.get("forward") == own.__call__:
                del module.__dict__["forward"]

    def replica(self) -> nn.Module:
        """Replica that nn.DataParallel asks for: a copy of the layer that will have tensors of its own, and so PEFT's own
        forward."""
        copy: nn.Module = type(self.layer)._replicate_for_data_parallel(self.layer)
        for name in ("forward", "_packlora", "_replicate_for_data_parallel"):
            copy.__dict__.pop(name, None)
        self.calls.leave(REPLICA)
        return copy

    def peft(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """PEFT's own forward."""
        y: torch.Tensor = kind_of(self.layer).forward(self.layer, x, *args, **kwargs)  # type: ignore[attr-defined]
        return y

    def why_peft(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call is PEFT's, whatever the layer computes now."""
        if args or kwargs:
            return f"it is called with more than x ({', '.join(kwargs) or len(args)})"
        if type(x) not in (torch.Tensor, nn.Parameter):
            return f"x is a {type(x).__name__}, not a Tensor"
        if not x.numel():
            return EMPTY
        if torch.compiler.is_compiling():
            return None
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return "a transform of torch.func or forward differentiation is at work"
        if torch._C._get_tracing_state() is not None:
            return "torch.jit.trace is at work"
        if torch._C._len_torch_dispatch_stack() and _is_checkpointed_by_operation():
            return "a selective checkpoint, which compares every operation with its own, is around it"
        return None

    def ready(self) -> object | str:
        """Call that the layer computes for an x without further arguments, or the reason why PEFT must compute it."""
        raise NotImplementedError

    def compute(self, x: torch.Tensor, call: Any) -> Any:
        """The layer's output for what `ready` gave."""
        raise NotImplementedError

    def siblings(self) -> tuple[str, ...]:
        """Paths of the layers that are computed by one call with this one, itself included, in order; () where it is alone."""
        return ()

    def planned(self, found: Mapping[str, object]) -> tuple[str, str]:
        """For the report, the plan's name and what speaks for it, "" where nothing is chosen.

        found: by path, what `ready` gave of all layers; of this one no reason.
        """
        raise NotImplementedError
