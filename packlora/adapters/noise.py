"""NEFTune (Jain et al. 2023): uniform noise on the embeddings of a training sample, of alpha / sqrt(tokens * width).

The noise is a function of the job's seed, step, sample, position and feature, as dropout masks are (ops/dropout/keys.py): it is
the same whatever else is in the microbatch, on whatever device.

Shapes: T tokens, D width of the embeddings.
"""

from __future__ import annotations

from typing import Any

import torch

from packlora.adapters.linear import Attached
from packlora.adapters.owners import Noise
from packlora.ops.dropout.keys import layer_salt, uniform

SALT = layer_salt("neftune")


def add_noise(embedded: torch.Tensor, noise: Noise) -> torch.Tensor:
    """Embeddings [..., T, D] with noise; those of tokens of scale 0 as they are."""
    width = embedded.shape[-1]
    scale_T1 = noise.scale_T[:, None] * width**-0.5
    drawn = (uniform(noise.keys_T2, SALT, width) * scale_T1).to(embedded.dtype)
    return torch.where(scale_T1 == 0, embedded, embedded + drawn)


def noisy_embeddings(model: Any, attached: Attached) -> None:
    """Let the model's embeddings have the noise of the microbatch that is running, where it has some. Called again where
    something was put in their place: the noise is on what the model calls."""

    def after(_: torch.nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor | None:
        owners = attached.microbatch
        return None if owners is None or owners.noise is None else add_noise(embedded, owners.noise)

    if attached.noise_hook is not None:
        attached.noise_hook.remove()
    attached.noise_hook = model.get_input_embeddings().register_forward_hook(after)
