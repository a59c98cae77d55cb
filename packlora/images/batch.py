"""The images of a microbatch: decoded when it is due, as tensors for the model, with the owners of their rows.

Shapes: T tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from packlora.data.encode import Sample
from packlora.images.files import ImageFile, Images
from packlora.images.owners import ImageOwners, OwnedImage
from packlora.images.vision import ImageTensors, Vision, joined_positions, on_device
from packlora.modality import Draw


@dataclass(frozen=True, slots=True)
class BatchImages:
    """samples: each part of one by itself. images: of each, None where it has none. See modality.py, BatchExtras."""

    vision: Vision
    samples: Sequence[Sample]
    images: Sequence[ImageTensors | None]
    owners: ImageOwners

    def positions(self, total: int) -> list[np.ndarray]:
        """Positions of all tokens, [T] or [3 T]; those of filler tokens come last."""
        own = [self.vision.positions(item.ids, one) for item, one in zip(self.samples, self.images, strict=True)]
        count = total - sum(item.num_tokens for item in self.samples)
        return [joined_positions([*own, np.arange(count)]).reshape(-1)]

    def arguments(self, total: int, device: torch.device) -> dict[str, torch.Tensor]:
        """More of the model's keyword arguments."""
        joined = ImageTensors.joined([one for one in self.images if one is not None])
        out = on_device(joined.tensors, device, self.vision.dtype)
        blocks, start = list[np.ndarray](), 0
        for item in self.samples:
            own = self.vision.blocks(item.ids, start)
            if own is None:
                return out
            blocks.append(own)
            start += item.num_tokens
        blocks.append(np.full(total - start, -1))
        return out | {"image_blocks": torch.from_numpy(np.concatenate(blocks)).to(device)}


def in_batch(
    samples: Sequence[Sample],
    owners: Sequence[int],
    draws: Sequence[Draw],
    vision: Vision,
    device: torch.device,
) -> BatchImages | None:
    """Decode the images of samples; None where there are none. Raises InputError where a file is not what it was.

    Args:
        owners, draws: of each sample.
    """
    if all(item.extras is None for item in samples):
        return None
    files = dict.fromkeys(file for item in samples for file in _files(item))
    tensors = {file: vision.tensors(file.decode()) for file in files}
    parts: list[Sample] = []
    images: list[ImageTensors | None] = []
    owned: list[OwnedImage] = []
    for item, owner, draw in zip(samples, owners, draws, strict=True):
        for part in item.parts():
            own = None if part.extras is None else ImageTensors.joined([tensors[file] for file in _files(part)])
            owned += [] if own is None else [OwnedImage(owner, share, draw) for share in own.shares]
            images.append(own)
            parts.append(part)
    return BatchImages(vision, parts, images, ImageOwners(owned, device))


def _files(sample: Sample) -> tuple[ImageFile, ...]:
    if sample.extras is None:
        return ()
    assert isinstance(sample.extras, Images)
    return sample.extras.files
