"""The weights of one adapter on one layer: what they begin with, and how the operator takes them."""

from __future__ import annotations

import math

import torch

from packlora.adapters.norms import RowNorms
from packlora.adapters.spec import ModuleSpec
from packlora.ops.lora_linear.types import LowRank


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
                self._norm = norms.add(base.weight, self.A, self.B, spec.scaling, version_counted=True)
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
