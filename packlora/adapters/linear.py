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

from packlora.adapters.norms import RowNorms
from packlora.adapters.siblings import SiblingGroup
from packlora.adapters.spec import ModuleSpec
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import Dense
from packlora.ops.lora_linear.prepared import GroupState
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.recipe import recipe_of
from packlora.plans.select import Planner


class AdapterWeights:
    """Trainable parameters of one adapter on one layer, float32 (float64 on a float64 base).

    A [r, K], B [N, r], magnitude [N], bias [N]; those that the spec does not have are None.
    """

    def __init__(self, spec: ModuleSpec, base: torch.nn.Linear, seed: int, norms: RowNorms) -> None:
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
                # A and B change by the job's own optimizer and by copy_, which the host sees
                self._norm = norms.add(base.weight, self.A, self.B, spec.scaling, trusted=True)
                self.magnitude = torch.nn.Parameter(self._norm.get().clone())
        if spec.train_bias:
            self.bias = torch.nn.Parameter(base.bias.detach().to(dtype, copy=True))

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Those that exist, by the name of the attribute."""
        named = {"A": self.A, "B": self.B, "magnitude": self.magnitude, "bias": self.bias}
        return {name: parameter for name, parameter in named.items() if parameter is not None}

    def low_rank(self) -> LowRank:
        """As the operator takes them."""
        norm = None if self.magnitude is None else self.norm
        return LowRank(self.A, self.B, self.spec.scaling, self.magnitude, norm, self.bias)

    def norm(self) -> torch.Tensor:
        """||W + s B A|| by row, [N], for the present values."""
        assert self.A is not None and self.B is not None
        return self._norm.point(self._base.weight, self.A, self.B, self.spec.scaling).get()


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
            found = self._states[key] = (layers, GroupState(version_counted=True))
        return found

    def forget(self) -> None:
        """Drop what is kept for layers from call to call."""
        self._states.clear()

    def tokens(self, total: int) -> Tokens | None:
        """Of a forward over `total` tokens; None runs the base model alone."""
        if self._only is not None:
            return Tokens(total, ((self._only, 0, total),))
        if self._tokens is not None and self._tokens.total != total:
            raise RuntimeError(f"the router was set for {self._tokens.total} tokens, the layer was given {total}")
        return self._tokens


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's part of a forward by ops/lora_linear, as siblings.py wants it."""

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
    computed by one call.

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
        self.keep_output = False
        """Nobody writes into what this layer gives: it may stand in for DoRA's product (outputs.py)."""
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
        return self.siblings.serve(self.index, x, Call(self, tokens))

    def ready(self) -> Call | None:
        """A sibling asks whether this layer can be computed with it."""
        tokens = self.router.current
        if tokens is None or not any(n in self.adapters for n, _, _ in tokens.runs):
            return None
        return Call(self, tokens)

    def layer(self) -> Layer:
        """The layer and all its adapters as the operator takes them."""
        known, base = self._layer, self.base
        if (
            known is None or known.frozen.dense() is not base.weight or known.bias is not base.bias
            or known.keep_output != self.keep_output
        ):  # fmt: skip
            low_rank = {number: weights.low_rank() for number, weights in self.adapters.items()}
            known = self._layer = Layer(Dense(base.weight), base.bias, low_rank, self.keep_output)
        return known


def compute(x: torch.Tensor, calls: Sequence[Call]) -> tuple[torch.Tensor, ...]:
    """Outputs of siblings for x [..., K], by one call of the operator."""
    first, tokens = calls[0].member, calls[0].tokens
    members = [call.member for call in calls]
    runs = []
    for number, start, stop in tokens.runs:
        specs = [member.adapters[number].spec for member in members if number in member.adapters]
        if specs:
            dropout = max(spec.dropout for spec in specs) if tokens.keys_T2 is not None else 0.0
            runs.append(Segment(number, start, stop, dropout, all(spec.base_dropped for spec in specs)))
    layers, state = first.router.layers_of(members)
    plan = first.router.planner.plan_of(x, layers, runs)
    return lora_group(x, layers, runs, tokens.keys_T2, first.salt, plan, state, recipe_of(x))
