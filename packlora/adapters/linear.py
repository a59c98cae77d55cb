"""AdaptedLinear: a frozen linear layer that several adapters share, and the weights of one adapter on it.

Which token belongs to which adapter is not an argument of the model: all adapted layers of a model hold one Router, and
whoever runs the model sets its tokens first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from packlora.adapters.siblings import SiblingGroup
from packlora.adapters.spec import ModuleSpec
from packlora.ops.lora_linear.chain import lora_linear
from packlora.ops.lora_linear.group import GroupState, Layer, LowRank, Run, lora_group
from packlora.ops.lora_linear.reference import Segment, weight_norm
from packlora.plans.select import Planner


class AdapterWeights:
    """Trainable parameters of one adapter on one layer, float32 (float64 on a float64 base).

    A [r, K], B [N, r], magnitude [N], bias [N]; those that the spec does not have are None.
    """

    def __init__(self, spec: ModuleSpec, base: torch.nn.Linear, seed: int) -> None:
        dtype = torch.float64 if base.weight.dtype == torch.float64 else torch.float32
        device, (N, K) = base.weight.device, base.weight.shape
        self.spec, self._base = spec, base
        self.A = self.B = self.magnitude = self.bias = None
        if spec.rank:
            generator = torch.Generator().manual_seed(seed)
            bound = 1.0 / math.sqrt(K)  # kaiming_uniform_ with a = sqrt(5), PEFT's initialisation
            A_rK = torch.empty(spec.rank, K).uniform_(-bound, bound, generator=generator)
            self.A = torch.nn.Parameter(A_rK.to(device, dtype))
            self.B = torch.nn.Parameter(torch.zeros(N, spec.rank, device=device, dtype=dtype))
            if spec.use_dora:
                self.magnitude = torch.nn.Parameter(weight_norm(base.weight, self.A, self.B, spec.scaling))
        if spec.train_bias:
            self.bias = torch.nn.Parameter(base.bias.detach().to(dtype, copy=True))
        self._norm: torch.Tensor | None = None
        self._norm_of: tuple[int, int, int, int] | None = None

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that exist, by the name of the attribute."""
        named = {"A": self.A, "B": self.B, "magnitude": self.magnitude, "bias": self.bias}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    def norm(self) -> torch.Tensor | None:
        """||W + s B A|| by row, computed once per value of A and B: versions count every in-place change of a tensor."""
        if self.magnitude is None:
            return None
        assert self.A is not None and self.B is not None
        key = (id(self.A), self.A._version, id(self.B), self.B._version)
        if self._norm is None or self._norm_of != key:
            self._norm = weight_norm(self._base.weight, self.A, self.B, self.spec.scaling)
            self._norm_of = key
        return self._norm


@dataclass(frozen=True, slots=True)
class Tokens:
    """Who owns the tokens of a packed microbatch.

    runs: (adapter number, start, stop) for consecutive tokens, in order; tokens in no run see the base model.
    keys_T2: dropout keys [T, 2] int32, or None when nothing is dropped (evaluation).
    """

    total: int
    runs: tuple[tuple[int, int, int], ...]
    keys_T2: torch.Tensor | None = None


class Router:
    """Shared by all adapted layers of a model: the tokens of the forward that is running, and who chooses plans."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._tokens: Tokens | None = None
        self._only: int | None = None
        self._states: dict[tuple[int, ...], tuple[tuple[Layer, ...], GroupState]] = {}

    @contextmanager
    def route(self, tokens: Tokens) -> Iterator[None]:
        """Run the model, and its backward when it recomputes activations, on these tokens."""
        self._tokens = tokens
        try:
            yield
        finally:
            self._tokens = None

    @contextmanager
    def only(self, adapter: int) -> Iterator[None]:
        """All tokens belong to one adapter, without dropout, whatever their number: for generation."""
        self._only = adapter
        try:
            yield
        finally:
            self._only = None

    @property
    def current(self) -> Tokens | None:
        """Of the forward that is running; None where the number of tokens is not known ahead."""
        return None if self._only is not None else self._tokens

    def layers_of(self, members: Sequence[AdaptedLinear]) -> tuple[tuple[Layer, ...], GroupState]:
        """Siblings as the operator takes them, and what is kept for them from call to call."""
        key = tuple(map(id, members))
        layers = tuple(member.layer() for member in members)
        found = self._states.get(key)
        if found is None or any(new is not old for new, old in zip(layers, found[0], strict=True)):
            # adapters change by the jobs' own optimizers and by copy_: both move the version counters
            found = self._states[key] = (layers, GroupState(trusted=True))
        return found

    def tokens(self, total: int) -> Tokens | None:
        """Of a forward over `total` tokens; None runs the base model alone."""
        if self._only is not None:
            return Tokens(total, ((self._only, 0, total),))
        if self._tokens is not None and self._tokens.total != total:
            raise RuntimeError(f"the router was set for {self._tokens.total} tokens, the layer was given {total}")
        return self._tokens


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's part of a forward by ops/lora_linear/group.py, as siblings.py wants it."""

    member: AdaptedLinear
    tokens: Tokens

    @property
    def together(self) -> int:
        return id(self.tokens)

    def stamp(self) -> int:
        return id(self.tokens)


class AdaptedLinear(torch.nn.Module):
    """y = the operator of ops/lora_linear over the adapters that own tokens of the microbatch.

    Takes x [..., K] and gives [..., N]; the leading dimensions are the packed tokens. `adapters` holds the weights by
    adapter number; they are parameters of their jobs, not of the model. Layers that read the same tensor (siblings) are
    computed by one call; layers where a DoRA adapter or a trained bias takes part go through the chain, one by one.

    Args:
        base: the frozen layer.
        salt: of the tensor that the layer reads, so the same for siblings: see ops.dropout.layer_salt.
        router: of the model.
    """

    def __init__(self, base: torch.nn.Linear, salt: int, router: Router) -> None:
        super().__init__()
        self.base = base
        self.adapters: dict[int, AdapterWeights] = {}
        self.router = router
        self.salt = salt
        self.siblings = SiblingGroup([self], compute, Call)
        self.index = 0
        self._layer: Layer | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-1]
        tokens = self.router.tokens(math.prod(lead))
        if tokens is None or not any(number in self.adapters for number, _, _ in tokens.runs):
            return torch.nn.functional.linear(x, self.base.weight, self.base.bias)
        if self._needs_chain(tokens):
            x_TK = x.reshape(-1, x.shape[-1])
            y_TN = lora_linear(
                x_TK, self.base.weight, self.base.bias, self._segments(tokens), tokens.keys_T2, self.salt
            )
            return y_TN.view(*lead, -1)
        return self.siblings.serve(self.index, x, Call(self, tokens))

    def ready(self) -> Call | None:
        """A sibling asks whether this layer can be computed with it."""
        tokens = self.router.current
        if tokens is None or self._needs_chain(tokens) or not any(n in self.adapters for n, _, _ in tokens.runs):
            return None
        return Call(self, tokens)

    def layer(self) -> Layer:
        """The layer and all its plain LoRA adapters as the operator takes them."""
        if self._layer is None or self._layer.weight is not self.base.weight:
            low_rank = {
                number: LowRank(weights.A, weights.B, weights.spec.scaling)
                for number, weights in self.adapters.items()
                if weights.A is not None and weights.B is not None and weights.magnitude is None
            }
            self._layer = Layer(self.base.weight, self.base.bias, low_rank)
        return self._layer

    def _needs_chain(self, tokens: Tokens) -> bool:
        own = (self.adapters.get(number) for number, _, _ in tokens.runs)
        return any(w is not None and (w.magnitude is not None or w.bias is not None) for w in own)

    def dropout(self, tokens: Tokens, number: int) -> float:
        weights = self.adapters.get(number)
        return weights.spec.dropout if weights is not None and tokens.keys_T2 is not None else 0.0

    def _segments(self, tokens: Tokens) -> list[Segment]:
        out = []
        for number, start, stop in tokens.runs:
            weights = self.adapters.get(number)
            if weights is None:
                continue
            out.append(
                Segment(
                    start,
                    stop,
                    weights.spec.scaling,
                    self.dropout(tokens, number),
                    weights.A,
                    weights.B,
                    weights.magnitude,
                    weights.norm(),
                    weights.bias,
                )
            )
        return out


def compute(x: torch.Tensor, calls: Sequence[Call]) -> tuple[torch.Tensor, ...]:
    """Outputs of siblings for x [..., K], by one call of the operator."""
    first, tokens = calls[0].member, calls[0].tokens
    members = [call.member for call in calls]
    runs = tuple(
        Run(number, start, stop, max(member.dropout(tokens, number) for member in members))
        for number, start, stop in tokens.runs
        if any(number in member.adapters for member in members)
    )
    x_TK = x.reshape(-1, x.shape[-1])
    layers, state = first.router.layers_of(members)
    plan = first.router.planner.plan_of(x_TK, layers, runs)
    outputs = lora_group(x_TK, layers, runs, tokens.keys_T2, first.salt, plan, state)
    return tuple(y_TN.view(*x.shape[:-1], -1) for y_TN in outputs)
