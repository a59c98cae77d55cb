"""Modules that jobs train beside low-rank adapters of linear layers: each token goes through what its owner has there.

What a job has there is of a kind; each kind is a module of kinds/. These are few layers of a model, so they are plain
operations of torch, one after the other for the owners of a microbatch. Parameters are float32.

Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from packlora.adapters.kinds import LOW_RANK, sizes
from packlora.adapters.linear import AdaptedLinear, AdaptedModule, Attached
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import ModuleSpec
from packlora.adapters.weights import TrainedWeights, low_rank_shapes

First = list[tuple[torch.nn.Parameter, torch.Tensor]]
Own = Callable[[str], torch.Tensor]


class RoutedWeights(TrainedWeights):
    """Trainable parameters of one job on one module, which they are whole on. A kind of module is a subclass, `Weights` of a
    module in kinds/; this one has what is usual of low-rank factors A [r, K] and B [N, r].

    suffixes: ends of the parameters' keys in the files of PEFT, by name.
    keeps_base: whether `forward` is given what the base gives.
    is_turned: whether low-rank factors are added to the transposed weight.
    of_images: whether the module is of a vision tower, and is given rows of images and no tokens.
    unread: what other programs do not read of an adapter, for messages; `{path}` stands for the module's. None where they read
        it as PEFT writes it.
    tied_to: weights on the embedding whose rows this output layer has, see kinds/tied.py.
    """

    shard: None
    suffixes: Mapping[str, str] = LOW_RANK
    keeps_base = True
    is_turned = of_images = False
    unread: str | None = "adapts {path}, by a kind of packlora's own"
    tied_to: RoutedWeights | None = None

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, room, seed)

    @classmethod
    def takes(cls, module: torch.nn.Module) -> bool:
        """Whether a module that target_modules names is of this kind."""
        return False

    @classmethod
    def why_not(cls, spec: ModuleSpec, base: Any) -> str | None:
        """Why an adapter is not put on a module that `takes` is true of: the end of "target_modules matches PATH, ". A kind
        with dropout, DoRA or trained biases overrides this."""
        if not (spec.dropout or spec.use_dora or spec.train_bias):
            return None
        return f"a {type(base).__name__}, which takes lora_dropout: 0, use_dora: false and bias: none alone"

    @classmethod
    def why_not_merged(cls, base: Any) -> str | None:
        """Why an adapter cannot be merged into a module: the end of "FOLDER adapts PATH, "."""
        return None

    @classmethod
    def shapes(cls, spec: ModuleSpec, base: Any) -> dict[str, tuple[int, ...]]:
        """Shapes of the parameters, by name."""
        return low_rank_shapes(spec, *sizes(base))

    @classmethod
    def layer(cls, inner: torch.nn.Module, attached: Attached, of_rows: bool, path: str) -> Routed:
        """Make what stands in the place of the module. Arguments are Routed's."""
        return Routed(inner, attached, of_rows)

    @classmethod
    def replaced(cls, W: torch.Tensor, leaf: str, spec: ModuleSpec, own: Own) -> torch.Tensor | None:
        """Merged value of a parameter of the module; None where low-rank factors are added to it.

        Args:
            W: value of the base, float32.
            leaf: name of the parameter.
            own: gives the adapter's tensors by name, float32.
        """
        return None

    def first_values(self, base: Any, attached: Attached) -> First:
        """First values that are made of the frozen module, for the caller to write."""
        return []

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Outputs for tokens of this job alone, x [T, K], or ids [T]. y: of the base, where `keeps_base`."""
        raise NotImplementedError


def embed_scale(base: Any) -> float:
    """Factor that an embedding multiplies its rows with, in the dtype of its weight."""
    scale = getattr(base, "embed_scale", None)
    if scale is None:
        return 1.0
    known = base.__dict__.get("_packlora_scale")
    if known is None:  # once: it may be on a device, which would be waited for
        known = base.__dict__["_packlora_scale"] = float(torch.as_tensor(scale).to(base.weight.dtype))
    return float(known)


class Routed(AdaptedModule):
    """A module of the base with what jobs have there.

    Args:
        inner: the frozen module, or what stands in its place for adapters of other kinds.
        attached, of_rows: see AdaptedModule.
    """

    def __init__(self, inner: torch.nn.Module, attached: Attached, of_rows: bool) -> None:
        super().__init__(attached, of_rows)
        self.inner = inner
        self.adapters: dict[int, RoutedWeights] = {}
        self._dim: int | None = None
        """Dimension of the tokens in the input, once that was clear."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    @property
    def base(self) -> Any:
        """The frozen module."""
        return self.inner.base if isinstance(self.inner, AdaptedLinear) else self.inner

    def trained(self) -> dict[int, Any]:
        """See AdaptedModule."""
        inside = self.inner.adapters if isinstance(self.inner, AdaptedLinear) else {}
        tied = {number: own.tied_to for number, own in self.adapters.items() if own.tied_to is not None}
        return self.adapters | inside | tied

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        active = self.attached.among(self.of_rows)
        own = self.adapters.get(active) if isinstance(active, int) else None
        if own is not None:
            return self._part(own, x, self.inner(x) if own.keeps_base else None)
        if active is None or isinstance(active, int) or active.adapters.isdisjoint(self.adapters):
            inner: torch.Tensor = self.inner(x, *args, **kwargs)
            return inner
        return self._by_owner(x, active)

    def _part(self, own: RoutedWeights, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Outputs for x, all of whose tokens have one owner. y: of the base."""
        lead = x.shape[:-1] if x.is_floating_point() else x.shape
        flat = x.reshape(lead.numel(), *x.shape[len(lead) :])
        out = own.forward(self.base, flat, None if y is None else y.reshape(-1, y.shape[-1]))
        return out.reshape(*lead, out.shape[-1])

    def _by_owner(self, x: torch.Tensor, owners: TokenOwners) -> torch.Tensor:
        dim = self._token_dim(x, owners.total)
        x = x.movedim(dim, 0)
        y: torch.Tensor | None = None

        def base(start: int, stop: int) -> torch.Tensor:
            nonlocal y
            if y is None:
                y = self.inner(x.movedim(0, dim)).movedim(dim, 0)
            return y[start:stop]

        if owners.boundaries.replayed:
            from packlora.adapters.moving_rows import by_moving_owner

            whole = partial(base, 0, owners.total)
            moved = by_moving_owner(
                self.adapters, owners, x, whole,
                lambda own, given: self._part(own, given, whole() if own.keeps_base else None),
            )  # fmt: skip
            return moved.movedim(0, dim)

        def part(own: RoutedWeights, start: int, stop: int) -> torch.Tensor:
            return self._part(own, x[start:stop], base(start, stop) if own.keeps_base else None)

        return owners.by_owner(self.adapters, base, part).movedim(0, dim)

    def _token_dim(self, x: torch.Tensor, total: int) -> int:
        """Dimension of x that the tokens are: norms of heads are given [1, T, H, D], embeddings ids [1, T]. Where there are as
        many heads as tokens, the one that is so long in the output of a projection that x is a view of, too."""
        outer = x.ndim - x.is_floating_point()
        found = [dim for dim in range(outer) if x.shape[dim] == total]
        if len(found) > 1 and self._dim is None and x._base is not None:
            steps = {x._base.stride(dim) for dim in range(x._base.ndim - 1) if x._base.shape[dim] == total}
            found = [dim for dim in found if len(steps) == 1 and x.stride(dim) in steps]
        if len(found) == 1:
            self._dim = found[0]
        elif self._dim not in found:
            raise RuntimeError(
                f"the microbatch has {total} tokens, {type(self.base).__name__} was given {list(x.shape)}"
            )
        return self._dim
