"""Tokens that a trainer has scored with the weights that it publishes, which a sampler of these weights must score alike.

<adapter folder>/proof.safetensors      ids int32 [n], logprobs float64 [n - 1] of the second token on
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from packlora.engine.drift import drift_of, why_apart
from packlora.files import write_tensors

FILE = "proof.safetensors"
TOKENS = 64
"""Most tokens that are scored."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens [n] with the trainer's log-probabilities [n - 1]."""

    ids: np.ndarray
    logprobs: np.ndarray

    def write(self, folder: Path) -> None:
        """Write them into an adapter folder."""
        tensors = {"ids": torch.from_numpy(self.ids), "logprobs": torch.from_numpy(self.logprobs)}
        write_tensors(folder / FILE, tensors)

    def why_apart(self, sampler: np.ndarray, dtype: torch.dtype) -> str | None:
        """Say that the sampler's log-probabilities [n - 1] differ by more than rounding; None where they do not."""
        return why_apart(drift_of(self.logprobs, sampler), dtype, f"{len(self.ids)} tokens of the model")


def read_scores(folder: Path) -> Scored | None:
    """Scores in an adapter folder; None where it has none."""
    if not (folder / FILE).exists():
        return None
    tensors = load_file(folder / FILE)
    return Scored(tensors["ids"].numpy(), tensors["logprobs"].numpy())
