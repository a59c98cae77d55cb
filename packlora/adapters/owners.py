"""Who owns the tokens of a microbatch: a value that goes with the microbatch through its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from packlora.ops.lora_linear.moving import MovingSegments

MIN_ROWS = 16
"""Fewest rows of a matrix product whose rows have the same bits whatever other rows there are. Products of a handful of rows
take other routines with other rounding (MKL on the CPU: fewer than 12 rows)."""


@dataclass(frozen=True, slots=True, eq=False)
class Noise:
    """What NEFTune adds to the embeddings of T tokens (noise.py).

    keys_T2: [T, 2] int32, as of dropout. scale_T: float32, alpha / sqrt(tokens of the sample), 0 for tokens without noise.
    """

    keys_T2: torch.Tensor
    scale_T: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenOwners:
    """The owners of the T tokens of one packed microbatch. Two of them are equal only if they are the same object.

    total: T.
    segments: (adapter number, start, stop) of consecutive tokens, in order; tokens in no segment see the base model alone.
    keys_T2: dropout keys [T, 2] int32 (ops.dropout.token_keys), or None when nothing is dropped (evaluation).
    moving: whose nominal segments these are, the true ones being on the device (ops.lora_linear.moving).
    noise: of the embeddings; None where no token has any.
    """

    total: int
    segments: tuple[tuple[int, int, int], ...]
    keys_T2: torch.Tensor | None = None
    moving: MovingSegments | None = None
    noise: Noise | None = None
    adapters: frozenset[int] = field(init=False)
    """Numbers of those that own tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapters", frozenset(number for number, _, _ in self.segments))
