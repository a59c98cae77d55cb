"""Forward and backward of one microbatch: what training repeats, the profiler measures and benchmarks time.

Gradients are left in the parameters of the jobs, losses are handed back by job. What a job does with them is job.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.adapters.linear import Router
from packlora.base.model import Base
from packlora.runtime.collate import PackedSample, collate
from packlora.runtime.loss import sum_by_owner, token_losses

NO_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
"""How libraries and drivers say it that do not raise torch's own error."""


@dataclass(frozen=True, slots=True)
class Ran:
    """sums: of the label tokens' losses by owner, float64 on the device. tokens, samples: by owner that took part."""

    sums: torch.Tensor
    tokens: Mapping[int, int]
    samples: Mapping[int, int]


def run_microbatch(base: Base, router: Router, samples: Sequence[PackedSample], weights: np.ndarray) -> Ran:
    """Run the samples through the model and back.

    Args:
        base: the model, with the adapters attached.
        router: of the adapters.
        samples: ordered by owner.
        weights: by owner, of each of its label tokens' losses in the gradient.

    Raises:
        torch.OutOfMemoryError: gradients of the owners may then hold a part of it.
    """
    try:
        return _run(base, router, samples, weights)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not any(words in str(error) for words in NO_MEMORY):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def _run(base: Base, router: Router, samples: Sequence[PackedSample], weights: np.ndarray) -> Ran:
    batch = collate(samples, base.device)
    with router.route(batch.tokens):
        # Each label's own weight is its gradient; the total is for backward alone, whatever NaN is in it.
        weights_L = torch.from_numpy(weights).to(base.device)[batch.owners_L]
        losses_L, total = token_losses(base.model, batch, weights_L, base.fused_loss)
        if (
            total.requires_grad
        ):  # else no adapter of these samples takes part in the output, which their jobs will notice
            total.backward()
    return Ran(sum_by_owner(losses_L, batch, len(weights)), batch.num_tokens, batch.num_samples)
