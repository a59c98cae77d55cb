"""AdaptedLinear: a frozen linear layer that several adapters share, and the weights of one adapter on it.

Which token belongs to which adapter is not an argument of the model: all adapted layers of a model hold one Router, and
whoever runs the model sets its tokens first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from packlora.adapters.spec import ModuleSpec
from packlora.ops.dropout import layer_salt
from packlora.ops.lora_linear.chain import lora_linear
from packlora.ops.lora_linear.reference import Segment, weight_norm


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
    """Shared by all adapted layers of a model: the tokens of the forward that is running."""

    def __init__(self) -> None:
        self._tokens: Tokens | None = None
        self._only: int | None = None

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

    def tokens(self, total: int) -> Tokens | None:
        """Of a forward over `total` tokens; None runs the base model alone."""
        if self._only is not None:
            return Tokens(total, ((self._only, 0, total),))
        if self._tokens is not None and self._tokens.total != total:
            raise RuntimeError(f"the router was set for {self._tokens.total} tokens, the layer was given {total}")
        return self._tokens


class AdaptedLinear(torch.nn.Module):
    """y = the operator of ops/lora_linear over the adapters that own tokens of the microbatch.

    Takes x [..., K] and gives [..., N]; the leading dimensions are the packed tokens. `adapters` holds the weights by
    adapter number; they are parameters of their jobs, not of the model.
    """

    def __init__(self, base: torch.nn.Linear, name: str, router: Router) -> None:
        super().__init__()
        self.base = base
        self.adapters: dict[int, AdapterWeights] = {}
        self.router = router
        self.salt = layer_salt(name)

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lead = x.shape[:-1]
        tokens = self.router.tokens(math.prod(lead))
        segments = [] if tokens is None else self._segments(tokens)
        if not segments:
            return torch.nn.functional.linear(x, self.base.weight, self.base.bias)
        assert tokens is not None
        x_TK = x.reshape(-1, x.shape[-1])
        y_TN = lora_linear(x_TK, self.base.weight, self.base.bias, segments, tokens.keys_T2, self.salt)
        return y_TN.view(*lead, -1)

    def _segments(self, tokens: Tokens) -> list[Segment]:
        out = []
        for number, start, stop in tokens.runs:
            weights = self.adapters.get(number)
            if weights is None:
                continue
            spec = weights.spec
            dropout = spec.dropout if tokens.keys_T2 is not None else 0.0
            out.append(
                Segment(
                    start,
                    stop,
                    spec.scaling,
                    dropout,
                    weights.A,
                    weights.B,
                    weights.magnitude,
                    weights.norm(),
                    weights.bias,
                )
            )
        return out
