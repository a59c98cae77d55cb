"""Convolutions of a vision tower, which are given rows of images: y = g * (W * x + s B * (A * x)) + b

adapters/convolution.py says what the products are. Outputs are added and multiplied in float32; what is convolved with is cast
to the model's dtype.

Shapes: R rows of images of one owner; C and N channels, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from packlora.adapters import convolution, dora
from packlora.adapters.linear import Attached
from packlora.adapters.norms import NormHandle
from packlora.adapters.routed import First, Routed, RoutedWeights
from packlora.adapters.spec import ModuleSpec
from packlora.ops.dropout import dropout
from packlora.ops.dropout.keys import layer_salt


class Weights(RoutedWeights):
    """A [r, C, kernel] and B [N, r, 1] of a convolution, DoRA's magnitude [1, N, 1], the bias [N]."""

    suffixes = MappingProxyType(
        {
            "A": "lora_A.weight", "B": "lora_B.weight", "filter_magnitude": "lora_magnitude_vector",
            "bias": "base_layer.bias",
        }
    )  # fmt: skip
    of_images = True
    unread = "adapts {path}, a convolution"

    def __init__(self, spec: ModuleSpec, base: Any, seed: int, room: Mapping[str, torch.Tensor]) -> None:
        super().__init__(spec, base, seed, room)
        self.A, self.B = self.parameters["A"], self.parameters["B"]
        self.magnitude, self.bias = self.parameters.get("filter_magnitude"), self.parameters.get("bias")

    @classmethod
    def takes(cls, module: torch.nn.Module) -> bool:
        """See RoutedWeights."""
        return type(module) in convolution.CONVOLVE

    @classmethod
    def why_not(cls, spec: ModuleSpec, base: Any) -> str | None:
        """See RoutedWeights."""
        if spec.start == "orthogonal":
            return "a convolution, for which there are no orthogonal factors (init_lora_weights)"
        found = convolution.why_unfit(base, spec.rank)
        return None if found is None else f"a convolution which {found}"

    @classmethod
    def why_not_merged(cls, base: Any) -> str | None:
        """See RoutedWeights."""
        if base.groups == 1:
            return None
        return (
            f"a convolution of {base.groups} groups: no one weight has its numbers, as a filter sees one group and A sees all; "
            "the adapter can be used beside its base alone"
        )

    @classmethod
    def shapes(cls, spec: ModuleSpec, base: Any) -> dict[str, tuple[int, ...]]:
        """See RoutedWeights."""
        return convolution.shapes(base, spec.rank, spec.use_dora, spec.train_bias)

    @classmethod
    def layer(cls, inner: torch.nn.Module, attached: Attached, of_rows: bool, path: str) -> Routed:
        """See RoutedWeights."""
        return RoutedRows(inner, attached, layer_salt(path))

    def first_values(self, base: Any, attached: Attached) -> First:
        made: First = []
        if self.magnitude is not None:
            scaling, own = self.spec.scaling, convolution.problems(base, self.A, self.B)
            self._norms = [NormHandle(attached.norms, *problem, scaling, version_counted=True) for problem in own]
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


class RoutedRows(Routed):
    """A convolution of a vision tower, whose rows, the first dimension of x, are those of images.

    Args:
        salt: names its dropout masks.
    """

    adapters: dict[int, Weights]  # type: ignore[assignment]

    def __init__(self, inner: torch.nn.Module, attached: Attached, salt: int) -> None:
        super().__init__(inner, attached, of_rows=False)
        self.salt = salt

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        owners = self.attached.owners(len(x), of_images=True)
        y: torch.Tensor = self.inner(x, *args, **kwargs)
        if owners is None or owners.adapters.isdisjoint(self.adapters):
            return y
        keys_T2 = owners.keys_T2

        def part(own: Weights, start: int, stop: int) -> torch.Tensor:
            keys = None if keys_T2 is None else keys_T2[start:stop]
            return own.rows(self.base, x[start:stop], y[start:stop], keys, self.salt)

        return owners.by_owner(self.adapters, lambda start, stop: y[start:stop], part)
