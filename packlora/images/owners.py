"""Who owns the rows of images that the modules of a vision tower are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from packlora.adapters.owners import TokenOwners
from packlora.ops.dropout.keys import packed_token_keys


@dataclass(frozen=True, slots=True)
class OwnedImage:
    """An image of a sample. share: of the rows that modules of a vision tower are given, in proportion to the other images'.
    draw: dropout key, step and number of the sample; None: nothing is dropped."""

    owner: int
    share: int
    draw: tuple[int, int, int] | None = None


class ImageOwners:
    """The owners of rows of images, which lie one image behind the other. Modules of a vision tower are given different numbers
    of rows, as some merge patches, but of each image the same share. See adapters/owners.py, BesideOwners."""

    def __init__(self, images: Sequence[OwnedImage], device: torch.device) -> None:
        self._images, self._device = tuple(images), device
        self._known: dict[int, TokenOwners] = {}
        self.last: TokenOwners | None = None
        """Owners that were asked for last: siblings have the rows of the first layer called."""

    def of(self, total: int) -> TokenOwners:
        """The owners of so many rows. Raises RuntimeError where they are not whole numbers of rows of each image."""
        if total not in self._known:
            self._known[total] = self._made(total)
        self.last = self._known[total]
        return self.last

    def _made(self, total: int) -> TokenOwners:
        whole = sum(image.share for image in self._images)
        if any(image.share * total % whole for image in self._images):
            raise RuntimeError(f"a layer of the vision tower is given {total} rows, which the images do not share")
        rows = [image.share * total // whole for image in self._images]
        stops = np.cumsum(rows)
        segments: list[tuple[int, int, int]] = []
        for image, count, stop in zip(self._images, rows, stops.tolist(), strict=True):
            if segments and segments[-1][::2] == (image.owner, stop - count):
                segments[-1] = (image.owner, segments[-1][1], stop)
            else:
                segments.append((image.owner, stop - count, stop))
        return TokenOwners(total, tuple(one for one in segments if one[0] >= 0), self._keys(rows))

    def _keys(self, rows: Sequence[int]) -> torch.Tensor | None:
        """[total, 2]; a sample's rows are counted through all of its images."""
        if all(image.draw is None for image in self._images):
            return None
        own = [
            (key, sum(count for _, count in some))
            for key, some in ((k, list(g)) for k, g in groupby(zip(self._images, rows, strict=True), _sample))
        ]
        keys, steps, numbers = zip(*[draw or (0, 0, 0) for (_, draw), _ in own], strict=True)
        lengths = [count for _, count in own]
        made = packed_token_keys(keys, steps, numbers, lengths)
        made[np.repeat([draw is None for (_, draw), _ in own], lengths)] = 0
        return torch.from_numpy(made).to(self._device)


def _sample(one: tuple[OwnedImage, int]) -> tuple[int, tuple[int, int, int] | None]:
    """Number of the sample that an image belongs to."""
    return one[0].owner, one[0].draw
