"""Modules that jobs train beside low-rank adapters of linear layers: each token goes through what its owner has there.

    embedding   y = g * (E[id] + s (A[:, id])' B')         as PEFT has it: nothing is dropped; g = 1 without DoRA
    copy        y = the module with the job's own parameters
    tokens      y = the module with the job's own rows for some tokens, of an embedding or of an output layer
    convolution y = g * (W * x + s B * (A * x)) + b        of a vision tower, which is given rows of images

These are few layers of a model, so they are plain operations of torch, one after the other for the owners of a microbatch.
Parameters are float32: rows, norms and outputs of convolutions are added and multiplied in float32; copies of matrices, and
what is convolved with, are cast to the model's dtype.

Shapes: t tokens of one owner, T tokens, r rank, V vocabulary, D width, n tokens with rows of their own; C and N channels,
R rows of images of one owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import functional as F

from packlora.adapters import convolution, dora
from packlora.adapters.kinds import copied
from packlora.adapters.linear import AdaptedLinear, Attached
from packlora.adapters.norms import NormHandle, RowNorms
from packlora.adapters.owners import TokenOwners
from packlora.adapters.spec import ModuleSpec
from packlora.adapters.token_rows import TokenRows
from packlora.adapters.weights import TrainedWeights
from packlora.ops.dropout import dropout

First = list[tuple[torch.nn.Parameter, torch.Tensor]]


class RoutedWeights(TrainedWeights):
    """Trainable parameters of one job on one module, which they are whole on."""

    shard: None
    keeps_base = True
    """`forward` is given what the base gives."""

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, room, seed)

    def first_values(self, base: Any, norms: RowNorms) -> First:
        """First values that are made of the frozen module, for the caller to write."""
        return []

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Outputs for tokens of this job alone. y: of the base, where `keeps_base`."""
        raise NotImplementedError


class EmbeddingWeights(RoutedWeights):
    """A [r, V], B [D, r], and DoRA's magnitude [D]. B begins random and A with zeros, as in PEFT."""

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.A, self.B, self.magnitude = (self.parameters.get(name) for name in ("A", "B", "magnitude"))
        self.norm: NormHandle | None = None

    def first_values(self, base: Any, norms: RowNorms) -> First:
        if self.magnitude is None:
            return []
        assert self.A is not None and self.B is not None
        self.norm = NormHandle(norms, base.weight.detach().T, self.A, self.B, self.spec.scaling, version_counted=True)
        return [(self.magnitude, self.norm.get())]

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None and self.A is not None and self.B is not None
        low_tD = F.embedding(x, self.A.T, base.padding_idx) @ self.B.T
        wide_tD = y.to(torch.promote_types(y.dtype, low_tD.dtype)) + self.spec.scaling * embed_scale(base) * low_tD
        if self.magnitude is not None and self.norm is not None:
            wide_tD = dora.factor(self.magnitude, self.norm.get()) * wide_tD
        return wide_tD.to(y.dtype)


class CopyWeights(RoutedWeights):
    """All parameters of the module, which begin with its values."""

    keeps_base = False

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.is_embedding = isinstance(base, torch.nn.Embedding)

    def first_values(self, base: Any, norms: RowNorms) -> First:
        return [(self.parameters[name], getattr(base, own).detach()) for name, own in copied(base).items()]

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        names = copied(base)
        if "norm" in names or "weight" not in names:  # a product in 16 bits would lose what is small beside 1
            wide: dict[str, torch.Tensor] = {own: self.parameters[name] for name, own in names.items()}
            dtype = next(iter(wide.values())).dtype
            return functional_call(base, wide, (x.to(dtype),)).to(x.dtype)  # type: ignore[no-any-return]
        cast = {own: self.parameters[name].to(base.weight.dtype) for name, own in names.items()}
        return functional_call(base, cast, (x,))  # type: ignore[no-any-return]


class TokenWeights(RoutedWeights):
    """tokens [n, D], the rows of spec.tokens, which begin with the base's."""

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.rows = self.parameters["tokens"]
        self.index = TokenRows(spec.tokens, base.weight.shape[0], room["tokens"].device)

    def first_values(self, base: Any, norms: RowNorms) -> First:
        return [(self.rows, base.weight.detach()[self.index.indices_n])]

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None
        if not isinstance(base, torch.nn.Embedding):
            return self.index.logits(x, y, self.rows)
        return self.index.embedded(base, x, y, self.rows, embed_scale(base))


class TiedWeights(RoutedWeights):
    """Rows of an embedding on the output layer that is tied to it."""

    def __init__(self, spec: ModuleSpec, tokens: TokenWeights) -> None:
        super().__init__(spec, None, 0, {})
        self.tokens = tokens

    def forward(self, base: Any, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        assert y is not None
        return self.tokens.index.logits(x, y, self.tokens.rows)


class ConvolutionWeights(RoutedWeights):
    """A [r, C, kernel] and B [N, r, 1] of a convolution, DoRA's magnitude [1, N, 1], the bias [N]."""

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.A, self.B = self.parameters["A"], self.parameters["B"]
        self.magnitude, self.bias = self.parameters.get("filter_magnitude"), self.parameters.get("bias")

    def first_values(self, base: Any, norms: RowNorms) -> First:
        made: First = []
        if self.magnitude is not None:
            scaling, own = self.spec.scaling, convolution.problems(base, self.A, self.B)
            self._norms = [NormHandle(norms, *problem, scaling, version_counted=True) for problem in own]
            made.append((self.magnitude, self._norm_N().view_as(self.magnitude)))
        if self.bias is not None:
            made.append((self.bias, base.bias.detach()))
        return made

    def _norm_N(self) -> torch.Tensor:
        return convolution.whole([norm.get() for norm in self._norms])

    def rows(
        self, base: Any, x: torch.Tensor, y: torch.Tensor, keys_R2: torch.Tensor | None, salt: int
    ) -> torch.Tensor:
        """Outputs for R rows of images of this job alone.

        Args:
            y: of the base.
            keys_R2: of dropout; None: nothing is dropped.
            salt: of the layer.
        """
        spec = self.spec
        drops = keys_R2 is not None and spec.dropout > 0
        xd = dropout(x.flatten(1), keys_R2, salt, spec.dropout).view_as(x) if drops else x  # type: ignore[arg-type]
        low = convolution.low_rank(xd, base, self.A.to(x.dtype), self.B.to(x.dtype))
        wide = y.to(torch.promote_types(y.dtype, self.A.dtype))
        if self.magnitude is None:
            out = wide + spec.scaling * low
        else:
            g = convolution.column(dora.factor(self.magnitude, self._norm_N()), base)
            if drops and spec.base_dropped:
                share = convolution.convolve(xd, base, base.weight)
            else:
                share = wide if base.bias is None else wide - convolution.column(base.bias, base)
            out = dora.added(wide, share, low, g, spec.scaling)
        if self.bias is not None:
            out = out + convolution.column(self.bias - base.bias, base)
        return out.to(y.dtype)


WEIGHTS: dict[str, type[RoutedWeights]] = {
    "embedding": EmbeddingWeights, "copy": CopyWeights, "tokens": TokenWeights, "convolution": ConvolutionWeights,
}  # fmt: skip
"""Classes by ModuleSpec.kind; a tied one is made of that which it is tied to."""


def embed_scale(base: Any) -> float:
    """Factor that an embedding multiplies its rows with, in the dtype of its weight."""
    scale = getattr(base, "embed_scale", None)
    if scale is None:
        return 1.0
    known = base.__dict__.get("_packlora_scale")
    if known is None:  # once: it may be on a device, which would be waited for
        known = base.__dict__["_packlora_scale"] = float(torch.as_tensor(scale).to(base.weight.dtype))
    return float(known)


class Routed(torch.nn.Module):
    """A module of the base with what jobs have there.

    Args:
        inner: the frozen module, or what stands in its place for adapters of other kinds.
        attached: what the layers of the model share.
        of_rows: it stands behind the decoder, and so is given the rows of labels and not all tokens.
    """

    def __init__(self, inner: torch.nn.Module, attached: Attached, of_rows: bool) -> None:
        super().__init__()
        self.inner = inner
        self.adapters: dict[int, RoutedWeights] = {}
        self.attached, self.of_rows = attached, of_rows
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

    def first_values(self, number: int) -> First:
        """See AdaptedLinear.first_values."""
        return self.adapters[number].first_values(self.base, self.attached.norms)

    def adapters_changed(self) -> None:
        """An adapter has come or gone."""

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
        lead = x.shape if self.takes_ids else x.shape[:-1]
        flat = x.reshape(-1) if self.takes_ids else x.reshape(-1, x.shape[-1])
        out = own.forward(self.base, flat, None if y is None else y.reshape(-1, y.shape[-1]))
        return out.reshape(*lead, out.shape[-1])

    @property
    def takes_ids(self) -> bool:
        """Whether it is an embedding."""
        return isinstance(self.base, torch.nn.Embedding)

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
        """Dimension of x that the tokens are: norms of heads are given [1, T, H, D]."""
        outer = x.ndim if self.takes_ids else x.ndim - 1
        found = [dim for dim in range(outer) if x.shape[dim] == total]
        if len(found) == 1:
            self._dim = found[0]
        elif self._dim not in found:
            raise RuntimeError(
                f"the microbatch has {total} tokens, {type(self.base).__name__} was given {list(x.shape)}"
            )
        return self._dim


class RoutedRows(Routed):
    """A convolution of a vision tower, whose rows, the first dimension of x, are those of images.

    Args:
        salt: names its dropout masks.
    """

    adapters: dict[int, ConvolutionWeights]  # type: ignore[assignment]

    def __init__(self, inner: torch.nn.Module, attached: Attached, salt: int) -> None:
        super().__init__(inner, attached, of_rows=False)
        self.salt = salt

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        owners = self.attached.owners(len(x), of_images=True)
        y: torch.Tensor = self.inner(x, *args, **kwargs)
        if owners is None or owners.adapters.isdisjoint(self.adapters):
            return y
        keys_T2 = owners.keys_T2

        def part(own: ConvolutionWeights, start: int, stop: int) -> torch.Tensor:
            keys = None if keys_T2 is None else keys_T2[start:stop]
            return own.rows(self.base, x[start:stop], y[start:stop], keys, self.salt)

        return owners.by_owner(self.adapters, lambda start, stop: y[start:stop], part)
