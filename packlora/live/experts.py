"""PEFT's ParamWrapper over experts at run time: LoRA on the weights of all experts of a layer, without a matrix of their size.

PEFT makes W + s B A of all experts in every forward, and a gradient of that size in every backward. Here the rows that
go to each expert meet its A and B: ops/lora_experts, in the place of whatever function transformers computes experts with.
PEFT wraps a module of experts once for each of its weights that is adapted. The outermost of these computes for all of them.

Shapes: T tokens, k experts a token, E experts, K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from packlora.adapters.expert_forward import ScaledRows, frozen_at, sorted_outputs
from packlora.adapters.expert_layout import by_registry, is_experts, is_scaled, weight_names
from packlora.adapters.norms import RowNorms
from packlora.live.adapter import DTYPES, observed, parameter_adapter, product_dtype
from packlora.live.forward import ASKED_FOR, OwnForward
from packlora.live.wrapped import NotWhole, why_called, why_not_whole
from packlora.ops.lora_experts.autograd import lora_experts
from packlora.ops.lora_experts.routing import Routing
from packlora.ops.lora_experts.types import ExpertLowRank, ExpertWeight, turned
from packlora.ops.lora_experts.weighted import weighted_sums

PLAN = "grouped"
"""How the report names what this file does."""
NO_REGISTRY = "transformers does not call its experts through its registry of experts' functions"
FUNCTIONS = (None, "eager", "batched_mm", "grouped_mm", "deepgemm", "sonicmoe", "packlora")
"""Names by which transformers computes experts, all of them the same function of their inputs."""


class ExpertsForward(OwnForward):
    """Forward of one ParamWrapper over experts.

    outer: of the ParamWrapper around this one; None of the outermost, which alone is put in the place of a forward.
    """

    def __init__(self, layer: ParamWrapper, path: str, norms: RowNorms, outer: ExpertsForward | None) -> None:
        super().__init__(layer, path, norms)
        self.outermost: ExpertsForward = self if outer is None else outer.outermost
        self.wrappers: list[ExpertsForward] = []
        """Forwards of all ParamWrappers, of the outermost one: itself first."""
        self.outermost.wrappers.append(self)

    def install(self) -> None:
        if self.outermost is self:
            super().install()

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = (self._why_not_called(x, args, kwargs) or self._look(x)) if self.on else ""
        if not isinstance(found, str):
            computed: torch.Tensor = self._compute(x, args, found)
            return computed
        if self.on:
            for wrapper in self.wrappers:
                wrapper.calls.leave(found)
        return self.peft(x, *args, **kwargs)

    # --- what the wrappers compute now ---------------------------------------------------------------------------------

    def ready(self) -> ExpertLowRank | str:
        """The adapter of this wrapper's weight, or the reason why PEFT must compute it."""
        experts, leaf = self.layer.get_base_layer(), self.layer.parameter_name
        adapter = parameter_adapter(self.layer, _why_not_experts(experts, leaf))
        if isinstance(adapter, str):
            return adapter
        E, N, K = frozen_at(experts, leaf).shape
        if E == 1:
            return "it has one expert alone"
        A, B = adapter.A, adapter.B
        if is_scaled(experts) and len(A) == B.shape[1] and len(A) % E == 0:
            A, B = turned(A, B, E)
        low_rank = ExpertLowRank(A, B, adapter.scaling)
        if low_rank.A.shape[1] != K or low_rank.B.shape[0] != N or low_rank.A.shape[0] != low_rank.B.shape[1]:
            return NotWhole("the weight of its experts is not whole here")
        return low_rank

    def _look(self, x: torch.Tensor) -> dict[str, ExpertLowRank] | str:
        """The adapters of the experts by weight, or the reason why PEFT must compute them."""
        own: dict[str, ExpertLowRank] = {}
        reason = ""
        for wrapper in self.wrappers:
            found = wrapper.ready()
            if not isinstance(found, str):
                own[wrapper.layer.parameter_name] = found
            elif found not in ASKED_FOR:
                return found
            reason = found if isinstance(found, str) else reason
            if wrapper is not self and observed(wrapper.layer):
                return why_called("base layer", wrapper.layer)
        if not own:
            return reason
        experts, (dtype, autocast) = self.layer.get_base_layer(), product_dtype(x)
        for leaf in weight_names(experts):
            if unread := _why_not_experts(experts, leaf):
                return unread
            weight = experts._parameters[leaf]
            wide = weight.dtype == torch.float64, dtype == torch.float64
            if wide[0] != wide[1] if autocast else weight.dtype != dtype:
                return f"x is {dtype}, the weights of its experts are {weight.dtype}"
        return own

    def _why_not_called(self, x: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Why a call is PEFT's, whatever the wrappers compute now."""
        if reason := self.why_peft(x, (), kwargs):
            return reason
        if is_scaled(self.layer.get_base_layer()):
            fits = not args and x.ndim == 2 and len(x) % self.layer.num_experts == 0
            return None if fits else "it is not called with the tokens of all experts [E T, D] alone"
        index, weights = args if len(args) == 2 else (None, None)
        if (
            type(index) is not torch.Tensor or type(weights) is not torch.Tensor or x.ndim != 2 or index.ndim != 2
            or index.is_floating_point() or index.dtype == torch.bool or len(index) != len(x)
            or weights.shape != index.shape
        ):  # fmt: skip
            return "it is not called with hidden states [T, D], chosen experts [T, k] and their weights [T, k]"
        return None

    def planned(self, found: Mapping[str, object]) -> tuple[str, str]:
        E = self.layer.num_experts
        return PLAN, f"{self.layer.parameter_name} of {E} experts, nothing of its size is made"

    # --- computing it --------------------------------------------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compute(self, x: torch.Tensor, args: tuple[torch.Tensor, ...], own: dict[str, ExpertLowRank]) -> torch.Tensor:
        """The experts' forward, in compiled models outside of the graphs, as PEFT's is."""
        for wrapper in self.wrappers:
            if wrapper.layer.parameter_name in own:
                wrapper.calls.served += 1
            elif isinstance(reason := wrapper.ready(), str):
                wrapper.calls.leave(reason)
        experts = self.layer.get_base_layer()
        chosen = ScaledRows.of(x, experts.num_experts) if is_scaled(experts) else None
        routing = Routing.of(args[0] if chosen is None else chosen.expert[:, None], experts.num_experts)
        dtype, autocast = product_dtype(x)

        def product(x: torch.Tensor, leaf: str, of_tokens: bool) -> torch.Tensor:
            frozen = frozen_at(experts, leaf)
            bias, trained = frozen.bias, frozen.bias is not None and frozen.bias.requires_grad
            frozen = ExpertWeight(frozen.weight.to(dtype), None if trained else bias, frozen.transposed)
            with torch.autocast(x.device.type, enabled=False) if autocast else nullcontext():
                y_SN = lora_experts(x.to(dtype), frozen, routing, [own.get(leaf)], repeated=of_tokens)
                if trained:
                    assert bias is not None
                    y_SN = y_SN + bias.to(dtype)[routing.expert_of_row()]
            return y_SN

        y_SD = sorted_outputs(experts, x if chosen is None else chosen.x, product)
        if chosen is None:
            return weighted_sums(y_SD, args[1], routing, x.dtype)
        return chosen.back(routing.of_places(y_SD), x, experts.num_experts).to(x.dtype)


def _why_not_experts(experts: Any, leaf: str) -> str | None:
    """Why a weight of a module of experts, or the module, cannot be read in the place of calling it."""
    if not is_experts(experts):
        return NO_REGISTRY
    if observed(experts):
        return why_called("experts", experts)
    if getattr(experts, "_is_expert_parallel", False):
        return "its experts are spread over processes"
    if by_registry(experts) and (function := experts.config._experts_implementation) not in FUNCTIONS:
        return f"its experts are computed by {function}"
    if leaf not in weight_names(experts):
        return f"{leaf} is no weight of the experts' products"
    weight = experts._parameters.get(leaf)
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return NotWhole(f"the weight of its experts is a {type(weight).__name__}, not a Parameter")
    if weight.dtype not in DTYPES:
        return f"the weight of its experts is {weight.dtype}"
    if weight.ndim != 3:
        return why_not_whole("experts", weight)
    return "the weights of its experts are trained too" if weight.requires_grad else None
