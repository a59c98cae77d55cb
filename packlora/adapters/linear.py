"""AdaptedLinear: a frozen linear layer that several adapters share.

Which token belongs to which adapter is not an argument of the model. It is a value of the microbatch (TokenOwners), and
whoever runs a forward or a backward makes it active on what all adapted layers of the model share (Attached). From there a
call is three steps: AdaptedLinear.forward, its group of siblings, one call of the operator in `compute`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.utils.hooks import RemovableHandle

from packlora.adapters.cache import GroupCache
from packlora.adapters.owners import TokenOwners
from packlora.adapters.siblings import SiblingGroup
from packlora.adapters.slices import slice_of
from packlora.adapters.weights import AdapterWeights
from packlora.ops.dropout.keys import keys_from
from packlora.ops.lora_linear.autograd import lora_group
from packlora.ops.lora_linear.frozen import FrozenLinear, FrozenWeight, InMemory
from packlora.ops.lora_linear.types import Layer, LowRank, Segment
from packlora.ops.recompute import recompute_of
from packlora.plans.select import PlanChooser

if TYPE_CHECKING:
    from packlora.adapters.norms import RowNorms
    from packlora.adapters.recorded_groups import RecordedGroups
    from packlora.ops.lora_linear.storage import Storage

_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)
"""Number of the backward that runs in this thread, -1 outside of any."""


def in_backward() -> bool:
    """Whether this thread runs a backward."""
    return _graph_task() != -1


class Attached:
    """State that the adapted layers of one model share: the owners of the tokens that pass through them, and who chooses plans.

    The owners are a value of the microbatch. Whoever runs its forward or its backward makes them active around it, so forwards
    and backwards of several microbatches may alternate in any order. They are an attribute, not a context variable:
    checkpointed activations are recomputed in autograd's own threads, which see no context of the thread that called backward.
    """

    def __init__(
        self, choosers: Sequence[PlanChooser], storage: Storage | None = None, version_counted: bool = True
    ) -> None:
        self.storage = storage or InMemory()
        """How the frozen weights lie."""
        self.version_counted = version_counted
        """Whether all writes into adapters are seen by their version counters (prepared.py), as those of jobs' own optimizers
        and of copy_ are."""
        self.choosers = tuple(dict.fromkeys(choosers))
        """Choosers of plans: each layer has one of them."""
        self.groups: dict[str, tuple[str, ...]] = {}
        """Groups of siblings, by the path of each, adapted or not."""
        self.of_rows: set[str] = set()
        """Paths of the modules that are given rows of labels and not all tokens: the output layer and what stands right before
        it."""
        self._active: TokenOwners | int | None = None
        self.after_embedding: Callable[..., torch.Tensor | None] | None = None
        """Hook of the model's embedding, see embeddings.py."""
        self.embedding_hook: RemovableHandle | None = None
        self.recorded: WeakValueDictionary[frozenset[int], RecordedGroups] = WeakValueDictionary()
        """Groups of what is recorded, by its adapters (recorded_groups.py)."""

    @cached_property
    def norms(self) -> RowNorms:
        """DoRA's, of all adapters."""
        from packlora.adapters.norms import RowNorms

        return RowNorms()

    @contextmanager
    def active(self, owners: TokenOwners | int) -> Iterator[None]:
        """Run the forward of a microbatch, or its backward, on the tokens of these owners (or of the one adapter, see `only`).

        Raises:
            RuntimeError: another forward or backward is running on the model.
        """
        if self._active is not None:
            raise RuntimeError("another forward or backward is running on this model: one at a time")
        self._active = owners
        try:
            yield
        finally:
            self._active = None

    def only(self, adapter: int) -> AbstractContextManager[None]:
        """All tokens belong to one adapter, without dropout, whatever their number: for generation."""
        return self.active(adapter)

    @property
    def microbatch(self) -> TokenOwners | None:
        """Owners of the microbatch that is running; None where the number of tokens is not known ahead."""
        return None if isinstance(self._active, int) else self._active

    @contextmanager
    def among_rows(self, owners: TokenOwners) -> Iterator[None]:
        """Run the output layer on some rows of labels of the microbatch that is running. owners: of these rows."""
        before, self._active = self._active, owners
        try:
            yield
        finally:
            self._active = before

    def among(self, of_rows: bool) -> TokenOwners | int | None:
        """Owners of a forward, or the one adapter; None runs the base model alone.

        Args:
            of_rows: of a layer behind the decoder, which is given the rows of labels.

        Raises:
            RuntimeError: a backward recomputes activations of nobody knows which microbatch.
        """
        active = self._active
        if active is None and in_backward():
            raise RuntimeError(
                "a backward that recomputes activations must run inside active(owners) of its microbatch"
            )
        return (active.rows or active) if of_rows and isinstance(active, TokenOwners) else active

    def owners(self, total: int, of_rows: bool = False, of_images: bool = False) -> TokenOwners | None:
        """Owners of a forward over `total` tokens; None runs the base model alone.

        Args:
            of_rows: see `among`.
            of_images: `total` are rows of images, in a vision tower.

        Raises:
            RuntimeError: the microbatch has another number of tokens, or see `among`.
        """
        active = self.among(of_rows)
        if active is None:
            return None
        if of_images and isinstance(active, TokenOwners):
            return None if active.beside is None else active.beside.of(total)
        if isinstance(active, int):
            return TokenOwners(total, ((active, 0, total),))
        if active.total != total:
            raise RuntimeError(f"the microbatch has {active.total} tokens, the layer was given {total}")
        return active


@dataclass(frozen=True, slots=True)
class AdaptedCall:
    """One layer's part of a forward by ops/lora_linear, as siblings.py wants it."""

    member: AdaptedLinear
    owners: TokenOwners

    @property
    def together(self) -> TokenOwners:
        return self.owners

    def stamp(self) -> TokenOwners:
        return self.owners


class AdaptedModule(torch.nn.Module):
    """A module of the base with what jobs train there: AdaptedLinear, or routed.py's Routed.

    Args:
        attached: what the layers of the model share.
        of_rows: it stands behind the decoder, and so is given the rows of labels and not all tokens.
    """

    base: Any
    adapters: dict[int, Any]
    """What each job trains there, by the adapter's number."""

    def __init__(self, attached: Attached, of_rows: bool) -> None:
        super().__init__()
        self.attached, self.of_rows = attached, of_rows

    def trained(self) -> dict[int, Any]:
        """All that jobs train on the module, by the adapter's number."""
        return dict(self.adapters)

    def first_values(self, number: int) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """First values of an adapter that are made of the frozen module, for the caller to write."""
        return self.adapters[number].first_values(self.base, self.attached)  # type: ignore[no-any-return]

    def adapters_changed(self) -> None:
        """An adapter has come or gone."""


class AdaptedLinear(AdaptedModule):
    """y = the operator of ops/lora_linear over the adapters that own tokens of the microbatch.

    Takes x [..., K] and gives [..., N]; the leading dimensions are the packed tokens. `adapters` holds the weights by
    adapter number; they are parameters of their jobs, not of the model. Layers that read the same tensor (siblings) are
    computed by one call.

    A layer of which this process has a slice is adapted by a class of its own, see `adapted_linear`.

    Args:
        base: the frozen layer.
        salt: of the tensor that the layer reads, so the same for siblings: see ops.dropout.layer_salt.
        attached, of_rows: see AdaptedModule.
        chooser: of plans; the same for siblings.
        of_images: it is part of a vision tower, which is given rows of images.
    """

    base: torch.nn.Linear

    def __init__(
        self, base: torch.nn.Linear, salt: int, attached: Attached, chooser: PlanChooser, of_rows: bool = False,
        of_images: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(attached, of_rows)
        self.base, self.of_images = base, of_images
        self.adapters: dict[int, AdapterWeights] = {}
        self.chooser = chooser
        self.salt = salt
        self.group = SiblingGroup([self], compute, AdaptedCall)
        self.index = 0
        self.keep_output = False
        """The backward reads this layer's output in the place of DoRA's product (kept_outputs.py)."""
        self.groups = GroupCache(attached.version_counted)
        self._layer: Layer | None = None
        self._frozen: FrozenWeight | None = None

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owners = self.attached.owners(math.prod(x.shape[:-1]), self.of_rows, self.of_images)
        if owners is None or owners.adapters.isdisjoint(self.adapters):
            return self.base.forward(x)
        return self.group.serve(self.index, x, AdaptedCall(self, owners))

    def ready(self) -> AdaptedCall | None:
        """A sibling asks whether this layer can be computed with it."""
        owners = self.attached.microbatch
        if owners is not None and self.of_images:
            owners = None if owners.beside is None else owners.beside.last
        if owners is None or owners.adapters.isdisjoint(self.computed()):
            return None
        return AdaptedCall(self, owners)

    @property
    def first_feature(self) -> int:
        """Index, among the whole layer's inputs, of the first one here."""
        return 0

    def computed(self) -> Mapping[int, AdapterWeights]:
        """Adapters that the operator computes."""
        return self.adapters

    def low_rank(self) -> dict[int, LowRank]:
        """Operands of these adapters."""
        return {number: weights.low_rank() for number, weights in self.computed().items()}

    @property
    def added(self) -> torch.Tensor | None:
        """Bias that the operator adds."""
        return self.base.bias

    @property
    def why_product(self) -> str | None:
        """Reason, in words, why the output is not kept, whatever the adapters are; None: it may be."""
        return "an output that the loss writes over" if self.of_rows else None

    def adapters_changed(self) -> None:
        """See AdaptedModule. What was prepared of adapters that are gone is not kept until the next call, nor by a sibling that
        computes this layer with its own."""
        self._layer = None
        siblings: Sequence[Any] = self.group.siblings
        for sibling in siblings:
            sibling.groups = GroupCache(self.attached.version_counted)

    def layer(self) -> Layer:
        """The layer and all its adapters as the operator takes them."""
        known, bias = self._layer, self.added
        if (
            known is None or known.frozen is not self.frozen() or known.bias is not bias
            or known.keep_output != self.keep_output
        ):  # fmt: skip
            known = self._layer = Layer(self.frozen(), bias, self.low_rank(), self.keep_output)
        return known

    def first_values(self, number: int) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """See AdaptedModule."""
        return self.adapters[number].first_values(self.frozen, self.bias, self.attached)

    def frozen(self) -> FrozenWeight:
        """The frozen weight as the operator takes it: the same object while it is the same tensor."""
        if isinstance(self.base, FrozenLinear):
            return self.base.frozen
        known = self._frozen
        if known is None or known.dense() is not self.base.weight:
            known = self._frozen = self.attached.storage.frozen(self.base.weight)
        return known


def adapted_linear(base: torch.nn.Linear, *more: Any) -> AdaptedLinear:
    """Put adapters onto a linear layer, by the module that a slice names or AdaptedLinear.

    Args:
        more: further arguments of AdaptedLinear.
    """
    own = slice_of(base)
    made: AdaptedLinear = (AdaptedLinear if own is None else own.adapted)(base, *more)
    return made


def compute(x: torch.Tensor, calls: Sequence[AdaptedCall]) -> tuple[torch.Tensor, ...]:
    """Outputs of siblings for x [..., K], by one call of the operator."""
    first, owners = calls[0].member, calls[0].owners
    members, keys_T2 = [call.member for call in calls], owners.keys_T2
    cache, layers = _cached(owners, members)
    group = cache.of(layers)
    # what the segments and the plan depend on: while it is the same, those of the last call stand
    tokens = owners.total, owners.segments, keys_T2 is None, x.requires_grad, owners.boundaries.known
    if group.tokens != tokens:
        segments = tuple(_segments(owners, [member.computed() for member in members]))
        plan = first.chooser.plan_of(x, group.layers, segments, owners.boundaries.known)
        group = cache.put(group, tokens, segments, plan)
    if keys_T2 is not None and first.first_feature and any(segment.dropout for segment in group.segments):
        keys_T2 = keys_from(keys_T2, first.salt, first.first_feature)
    layers, segments, plan, state = group.layers, group.segments, group.plan, group.state
    return lora_group(x, layers, segments, keys_T2, first.salt, plan, state, recompute_of(x), owners.boundaries)


def _cached(owners: TokenOwners, members: Sequence[AdaptedLinear]) -> tuple[GroupCache, tuple[Layer, ...]]:
    """The layers of siblings as the operator takes them, and the cache of their groups."""
    if owners.boundaries.replayed:
        from packlora.adapters.recorded_groups import cached

        return cached(owners, members)
    return members[0].groups, tuple([member.layer() for member in members])


def _segments(owners: TokenOwners, computed: Sequence[Mapping[int, AdapterWeights]]) -> Iterator[Segment]:
    """The tokens of adapters that siblings have. computed: the adapters of each."""
    for number, start, stop in owners.segments:
        specs = [adapters[number].spec for adapters in computed if number in adapters]
        if specs:
            dropout = max(spec.dropout for spec in specs) if owners.keys_T2 is not None else 0.0
            yield Segment(number, start, stop, dropout, all(spec.base_dropped for spec in specs))
