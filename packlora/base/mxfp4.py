"""Weights of experts in the codes of the Open Compute Project's MX formats, 4 bits a number: how GPT-OSS is published.

32 numbers in a row share a scale, a power of two. A byte holds two numbers, the first one in its lower half; a number is a sign
and one of eight magnitudes. All of them are bfloat16's too.

Shapes: E experts, N outputs, K inputs, G = K / 32 groups.
"""

from __future__ import annotations

import torch

BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the keys of codes and scales in files."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127
"""Bias of the scales' exponents."""


def packed_names(shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """Names of weights whose codes and scales are among the keys of files. shapes: by key."""
    ends = [key.removesuffix(BLOCKS) for key, shape in shapes.items() if key.endswith(BLOCKS) and shape[3:] == (16,)]
    return [name for name in ends if shapes.get(name + SCALES) == shapes[name + BLOCKS][:3]]


@torch.no_grad()
def floats_of(blocks_ENG16: torch.Tensor, scales_ENG: torch.Tensor) -> torch.Tensor:
    """bfloat16 [E, K, N] of uint8 codes and scales: as GPT-OSS multiplies with them, inputs first."""
    E, N, G, _ = blocks_ENG16.shape
    values = torch.tensor([*MAGNITUDES, *(-own for own in MAGNITUDES)], dtype=torch.bfloat16)
    out = torch.empty(E, 32 * G, N, dtype=torch.bfloat16)
    for codes, scales, own in zip(
        blocks_ENG16, scales_ENG, out, strict=True
    ):  # the temporary tensors beside it are of one expert
        pairs = torch.stack([codes & 15, codes >> 4], -1).flatten(2)
        numbers = torch.ldexp(values[pairs.int()].float(), scales.int()[..., None] - BIAS)
        own.copy_(numbers.flatten(1).t())
    return out
