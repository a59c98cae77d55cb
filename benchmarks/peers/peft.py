"""PEFT's layer over given values, and the check that another way computes what it computes.

Shapes: K inputs, N outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

LARGEST_DIFFERENCE = 0.02
"""Relative Frobenius distance to PEFT in bfloat16 (unit roundoff 0.004) beyond which a result is wrong, not rounded."""


class One(nn.Module):
    """A model of one linear layer, for PEFT to wrap."""

    def __init__(self, weight_NK: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(weight_NK.shape[1], weight_NK.shape[0], bias=False, device="meta")
        self.linear.weight = weight_NK

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


def peft_model(
    weight_NK: nn.Parameter,
    A_rK: torch.Tensor,
    B_Nr: torch.Tensor,
    dropout: float,
    wide: bool,
    magnitude_N: torch.Tensor | None = None,
) -> tuple[Any, One, list[nn.Parameter]]:
    """A PEFT model of one layer with the given adapter values.

    Args:
        wide: float32 adapter parameters, PEFT's default; else the weight's type.
        magnitude_N: makes it a DoRA adapter.

    Returns:
        The PEFT model, the module inside to call, and the parameters that train: A, B and the magnitude.
    """
    rank, dora = A_rK.shape[0], magnitude_N is not None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=dropout, target_modules=["linear"], use_dora=dora)
    model = get_peft_model(One(weight_NK), config, autocast_adapter_dtype=wide).train()
    layer = model.base_model.model.linear
    with torch.no_grad():
        layer.lora_A["default"].weight.copy_(A_rK)
        layer.lora_B["default"].weight.copy_(B_Nr)
        if magnitude_N is not None:
            layer.lora_magnitude_vector["default"].weight.copy_(magnitude_N)
    return model, model.base_model.model, [p for p in model.parameters() if p.requires_grad]


def under_autocast(call: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    """The call under torch.autocast to bfloat16."""

    def wrapped(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return call(x)

    return wrapped


def check_close(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """y, dx, dA, dB and the magnitude's gradient, where there is one, of two ways, by relative Frobenius distance.

    Raises:
        AssertionError: a distance is larger than rounding can make it, so the time of this contender means nothing.
    """
    names = ("y", "dx", "dA", "dB", "dm")[: len(ours)]
    for name, own, other in zip(names, ours, theirs, strict=True):
        distance = float((own.detach().float() - other.detach().float()).norm() / other.detach().float().norm())
        if not distance <= LARGEST_DIFFERENCE:
            raise AssertionError(
                f"{name} differs from PEFT's by {distance:.2g}, at most {LARGEST_DIFFERENCE} is rounding"
            )
