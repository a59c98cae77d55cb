"""Adapters on the weights of all experts of a layer, and on routers, for several jobs in one microbatch.

transformers calls experts through a registry of functions, to which one is added here: it sorts the tokens by expert and job
and gives each weight to the operator of ops/lora_experts. So no model is changed, and experts without adapters go the same way.
Experts that it calls otherwise (expert_layout.SCALED) get another forward, where they have adapters.
A router's product with its weight is an AdaptedLinear; what the router makes of it stays its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from packlora.adapters.expert_forward import ScaledRows, frozen_at, sorted_outputs
from packlora.adapters.expert_layout import ROUTED, STATE, is_scaled, part_of
from packlora.adapters.expert_targets import RouterProduct, router_product
from packlora.adapters.linear import AdaptedLinear, Attached
from packlora.adapters.moving_rows import owners_on_device
from packlora.adapters.owners import TokenOwners
from packlora.adapters.slices import Slice
from packlora.adapters.spec import ModuleSpec
from packlora.adapters.weights import TrainedWeights
from packlora.ops.dropout.keys import layer_salt
from packlora.ops.lora_experts.autograd import lora_experts
from packlora.ops.lora_experts.norm import expert_norms, squared_row_norms
from packlora.ops.lora_experts.routing import Routing
from packlora.ops.lora_experts.types import ExpertLowRank, ExpertWeight, turned
from packlora.ops.lora_experts.weighted import weighted_sums
from packlora.ops.lora_linear.boundaries import ON_HOST, Boundaries
from packlora.plans.select import PlanChooser

IMPLEMENTATION = "packlora"
"""Under this name the function is in transformers' registry."""


class ExpertWeights(TrainedWeights):
    """Trainable parameters of one adapter on one weight of all experts, in the layout of PEFT's files.

    A [E r, K], expert by expert; B [N, r E], the expert running fastest; magnitude [E, N] or None. A [E r, N] and B [K, r E]
    of experts that PEFT takes to lie the other way round.

    Args:
        frozen: the weight; it is asked for where it is read, as it may be here only while its layer runs.
        room: where they lie, by name: zeros, on the device of the experts.
        shard: which experts are here; None: all.
        lies_turned: see expert_layout.SCALED.
    """

    def __init__(
        self, spec: ModuleSpec, frozen: Callable[[], ExpertWeight], seed: int, room: Mapping[str, torch.Tensor],
        shard: Slice | None = None, lies_turned: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(spec, room, seed, shard)
        self.frozen, self.lies_turned = frozen, lies_turned
        self.A, self.B, self.magnitude = self.parameters["A"], self.parameters["B"], self.parameters.get("magnitude")
        self._norm: tuple[tuple[int, int], torch.Tensor] | None = None
        self._squared: torch.Tensor | None = None

    def first_values(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """First values of the magnitude, for the caller to write when it has those of all layers."""
        return [] if self.magnitude is None else [(self.magnitude, self.norm())]

    def low_rank(self, dropping: bool, boundaries: Boundaries = ON_HOST) -> ExpertLowRank:
        """Low-rank operands as the operator takes them.

        Args:
            dropping: the tokens have dropout keys.
            boundaries: of the tokens' segments.
        """
        spec, norm = self.spec, None
        if self.magnitude is not None:
            norm = boundaries.kept(id(self), self.norm)
        dropout = spec.dropout if dropping else 0.0
        return ExpertLowRank(*self._factors(), spec.scaling, dropout, self.magnitude, norm, spec.base_dropped)

    def _factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [E r, K] and B [N, r E]."""
        return turned(self.A, self.B, len(self.A) // self.spec.rank) if self.lies_turned else (self.A, self.B)

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """||W + s B A|| by row of every expert, [E, N], for the present values.

        A and B change by the job's own optimizer and by copy_, which move their version counters; the experts are frozen.
        """
        versions = self.A._version, self.B._version
        if self._norm is None or self._norm[0] != versions:
            frozen = self.frozen()
            if self._squared is None:
                self._squared = squared_row_norms(frozen, self.A, self.B)
            self._norm = versions, expert_norms(frozen, *self._factors(), self.spec.scaling, self._squared)
        return self._norm[1]


class AdaptedExperts:
    """Adapters on the experts of one layer: by name of the weight, the adapters by number.

    Args:
        path: of the module; with the name of a weight it names the weight's dropout masks.
        attached: what the layers of the model share.
    """

    def __init__(self, path: str, attached: Attached) -> None:
        self.path, self.attached = path, attached
        self.adapters: dict[str, dict[int, ExpertWeights]] = {}

    def numbers(self, owners: TokenOwners | None = None) -> list[int]:
        """Numbers of the adapters that have something here; of these owners."""
        every = {n for own in self.adapters.values() for n in own}
        return sorted(every if owners is None else every & owners.adapters)


def adapt_experts(
    model: PreTrainedModel, path: str, attached: Attached, number: int, spec: ModuleSpec, seed: int,
    room: Mapping[str, torch.Tensor],
) -> ExpertWeights:  # fmt: skip
    """Put an adapter onto the weight of experts at a path. seed, room: see ExpertWeights.

    Raises:
        RuntimeError: transformers does not call the model's experts by a function that it is given.
    """
    owner, _, leaf = path.rpartition(".")
    experts = model.get_submodule(owner)
    compute_here(model, owner)
    if STATE not in vars(experts):
        setattr(experts, STATE, AdaptedExperts(owner, attached))
    weights = ExpertWeights(spec, partial(frozen_at, experts, leaf), seed, room, part_of(experts), is_scaled(experts))
    vars(experts)[STATE].adapters.setdefault(leaf, {})[number] = weights
    return weights


def compute_here(model: PreTrainedModel, path: str) -> None:
    """Let the experts at a path be computed by the functions of this file. Raises as adapt_experts."""
    experts: Any = model.get_submodule(path)
    if is_scaled(experts):
        experts.forward = partial(scaled_forward, experts)
    elif experts.config._experts_implementation != IMPLEMENTATION:
        model.set_experts_implementation(IMPLEMENTATION)
        if experts.config._experts_implementation != IMPLEMENTATION:
            raise RuntimeError(f"{path}: transformers cannot be told which function computes these experts")


def adapted_router(model: PreTrainedModel, path: str, attached: Attached, chooser: PlanChooser) -> AdaptedLinear:
    """Make the product of a router with its weight at a path one that can have adapters. It has a copy of a weight that is here
    only while its layer runs."""
    owner, _, leaf = path.rpartition(".")
    router: Any = model.get_submodule(owner)
    for _ in attached.storage.each([path]):
        weight = getattr(router, leaf)
        dtype = router_product(router, weight)
        stays = dtype == weight.dtype and attached.storage.frozen(weight).stays
        own = weight if stays else torch.nn.Parameter(weight.detach().to(dtype, copy=True), False)
    with torch.device("meta"):
        linear = torch.nn.Linear(own.shape[1], own.shape[0], bias=False)
    linear.weight = own
    adapted = AdaptedLinear(linear, layer_salt(path), attached, chooser)
    router.add_module(ROUTED, adapted)
    router.forward = _Routed(router.forward, lambda: getattr(router, leaf), adapted)
    return adapted


class _Routed:
    """A router's forward with its product computed by an AdaptedLinear.

    weight: of the router, as it is while this runs.
    """

    def __init__(self, forward: Callable[..., Any], weight: Callable[[], torch.Tensor], adapted: AdaptedLinear) -> None:
        self.forward, self.weight, self.adapted = forward, weight, adapted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with RouterProduct(self.weight(), lambda x, _: self.adapted(x)):
            return self.forward(*args, **kwargs)


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """transformers' interface of experts: hidden states [T, D], chosen experts and their weights [T, k] -> [T, D]."""
    if getattr(self, "_is_expert_parallel", False):
        raise RuntimeError(f"{type(self).__name__}: experts that are spread over processes are not served")
    part = part_of(self)
    if part is not None:
        hidden_states, top_k_weights = part.enter(hidden_states), part.enter(top_k_weights)
    owned = Owned.of(self, len(hidden_states), hidden_states.device)
    return _sums(self, hidden_states, top_k_index, top_k_weights, owned)


@dataclass(frozen=True, slots=True)
class Owned:
    """Owners of the tokens that experts are given. numbers: of the adapters that are the first of `count` owners; one more is
    nobody. owner: the place of every token's owner, int64 [T], None where there is one. keys: of tokens, [T, 2].
    boundaries: of the tokens' segments."""

    numbers: Sequence[int]
    owner: torch.Tensor | None
    count: int
    keys: torch.Tensor | None
    boundaries: Boundaries = ON_HOST

    @staticmethod
    def of(experts: Any, tokens: int, device: torch.device) -> Owned:
        """Owners of so many tokens. Where rows go to other processes, all adapters here may own some, as on the others."""
        state: AdaptedExperts | None = vars(experts).get(STATE)
        owners = None if state is None else state.attached.owners(tokens)
        keys, part = None if owners is None else owners.keys_T2, part_of(experts)
        if part is not None and part.takes_rows:
            numbers = [] if state is None else state.numbers()
            return Owned(numbers, _owner_of_tokens(owners, numbers, tokens, device), len(numbers) + 1, keys)
        if state is None or owners is None or not (numbers := state.numbers(owners)):
            return Owned([], None, 1, keys)
        if not (boundaries := owners.boundaries).known:
            owner_T = owners_on_device(owners, numbers, device)
            return Owned(numbers, owner_T, len(numbers) + 1, keys, boundaries)
        owned = sum(stop - start for number, start, stop in owners.segments if number in numbers)
        if owned == tokens and len(numbers) == 1:
            return Owned(numbers, None, 1, keys, boundaries)
        owner_T = _owner_of_tokens(owners, numbers, tokens, device)
        return Owned(numbers, owner_T, len(numbers) + (owned < tokens), keys)

    def rows(self, token: torch.Tensor) -> Owned:
        """Owners of rows that are these tokens."""
        owner, keys = (None if one is None else one[token] for one in (self.owner, self.keys))
        return Owned(self.numbers, owner, self.count, keys, self.boundaries)


def _sums(
    experts: Any, x_TD: torch.Tensor, chosen_Tk: torch.Tensor, weights_Tk: torch.Tensor, owned: Owned
) -> torch.Tensor:
    """Output of experts for tokens, summed with the routers' weights, [T, D]; of the group that shares them out."""
    part = part_of(experts)
    if part is not None and part.takes_rows:

        def compute(x: torch.Tensor, routing: Routing, keys: torch.Tensor | None) -> torch.Tensor:
            return _experts(experts, x, Rows(owned.numbers, routing, keys))

        summed: torch.Tensor = part.sums(x_TD, chosen_Tk, weights_Tk, owned, compute)
        return summed
    first = None if part is None else part.first
    routing = Routing.of(chosen_Tk, experts.num_experts, owned.owner, owned.count, first)
    y_SD = _experts(experts, x_TD, Rows(owned.numbers, routing, owned.keys, owned.boundaries))
    y_TD = weighted_sums(y_SD, weights_Tk, routing, x_TD.dtype)
    return y_TD if part is None else part.leave(y_TD)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that experts compute. numbers: of the adapters that are the routing's first owners; others have none. keys: of
    tokens. boundaries: as of Owned."""

    numbers: Sequence[int]
    routing: Routing
    keys: torch.Tensor | None
    boundaries: Boundaries = ON_HOST


def _experts(experts: Any, x: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Output of experts for tokens, without the routers' weights, by sorted rows [S, D]."""
    state: AdaptedExperts | None = vars(experts).get(STATE)

    def product(x: torch.Tensor, name: str, repeated: bool) -> torch.Tensor:
        own = {} if state is None else state.adapters.get(name, {})
        dropping = rows.keys is not None
        low_rank = [
            own[number].low_rank(dropping, rows.boundaries) if number in own else None for number in rows.numbers
        ]
        low_rank += [None] * (rows.routing.owners - len(low_rank))
        salt = 0 if state is None else layer_salt(f"{state.path}.{name}")
        return lora_experts(x, frozen_at(experts, name), rows.routing, low_rank, rows.keys, salt, repeated)

    return sorted_outputs(experts, x, product)


def scaled_forward(experts: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """The forward of a module of SCALED, [E T, D] -> [E T, D]. Every row is its token's, once multiplied: its weight is 1."""
    part = part_of(experts)
    E = experts.num_experts * (1 if part is None else part.count)
    chosen = ScaledRows.of(hidden_states, E)
    x_SD = chosen.x if part is None else part.enter(chosen.x)
    owned = Owned.of(experts, len(hidden_states) // E, hidden_states.device).rows(chosen.token)
    y_SD = _sums(experts, x_SD, chosen.expert[:, None], x_SD.new_ones(len(x_SD), 1), owned)
    return chosen.back(y_SD, hidden_states, E)


def _owner_of_tokens(
    owners: TokenOwners | None, numbers: Sequence[int], tokens: int, device: torch.device
) -> torch.Tensor:
    """See Owned: the place in `numbers`, the one after the last where a token is nobody's, [T]."""
    owner_T = torch.full((tokens,), len(numbers), dtype=torch.int64, device=device)
    places = {number: place for place, number in enumerate(numbers)}
    segments = () if owners is None else owners.segments
    for number, start, stop in segments:
        if number in places:
            owner_T[start:stop] = places[number]  # by the device, which so never waits for a copy
    return owner_T


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
