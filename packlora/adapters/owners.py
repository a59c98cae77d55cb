"""Who owns the tokens of a microbatch: a value that goes with the microbatch through its forward and its backward."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from packlora.ops.dropout.keys import packed_token_keys
from packlora.ops.lora_linear.moving import MovingSegments

MIN_ROWS = 16
"""Fewest rows of a matrix product whose rows have the same bits whatever other rows there are. Products of a handful of rows
take other routines with other rounding (MKL on the CPU: fewer than 12 rows)."""


@dataclass(frozen=True, slots=True)
class OwnedImage:
    """An image of a sample. share: of the rows that modules of a vision tower are given, in proportion to the other images'.
    draw: dropout key, step and number of the sample; None: nothing is dropped."""

    owner: int
    share: int
    draw: tuple[int, int, int] | None = None


class ImageOwners:
    """The owners of rows of images, which lie one image behind the other. Modules of a vision tower are given different numbers
    of rows, as some merge patches, but of each image the same share."""

    def __init__(self, images: Sequence[OwnedImage], device: torch.device) -> None:
        self._images, self._device = tuple(images), device
        self._known: dict[int, TokenOwners] = {}
        self.last: TokenOwners | None = None
        """Those that were asked for last: siblings have the rows of the first one called."""

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
    """Which sample an image is of."""
    return one[0].owner, one[0].draw


@dataclass(frozen=True, slots=True, eq=False)
class TokenOwners:
    """The owners of the T tokens of one packed microbatch. Two of them are equal only if they are the same object.

    total: T.
    segments: (adapter number, start, stop) of consecutive tokens, in order; tokens in no segment see the base model alone.
    keys_T2: dropout keys [T, 2] int32 (ops.dropout.token_keys), or None when nothing is dropped (evaluation).
    moving: whose nominal segments these are, the true ones being on the device (ops.lora_linear.moving).
    columns: named values of tokens [T], for what is done to embeddings (embeddings.py).
    label_rows: segments of the rows of labels, which the output layer is given, and which tokens these are; None where it is
        given all tokens, if any.
    images: of the rows that a vision tower is given; None where no sample has images.
    """

    total: int
    segments: tuple[tuple[int, int, int], ...]
    keys_T2: torch.Tensor | None = None
    moving: MovingSegments | None = None
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)
    label_rows: tuple[tuple[tuple[int, int, int], ...], torch.Tensor] | None = None
    images: ImageOwners | None = None
    adapters: frozenset[int] = field(init=False)
    """Numbers of those that own tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapters", frozenset(number for number, _, _ in self.segments))

    @property
    def rows(self) -> TokenOwners | None:
        """Owners of the rows of labels."""
        if self.label_rows is None:
            return None
        segments, rows_L = self.label_rows
        return TokenOwners(len(rows_L), segments, None if self.keys_T2 is None else self.keys_T2[rows_L])

    def runs(self, adapters: Container[int]) -> list[tuple[int | None, int, int]]:
        """(adapter, start, stop) of all tokens in order: those of these adapters, and None with the others between them."""
        found: list[tuple[int | None, int, int]] = []
        at = 0
        for number, start, stop in self.segments:
            if number in adapters:
                found += [(None, at, start), (number, start, stop)] if at < start else [(number, start, stop)]
                at = stop
        return [*found, (None, at, self.total)] if at < self.total else found

    def part(self, start: int, stop: int) -> TokenOwners:
        """Of consecutive ones of these tokens."""
        inside = [(number, max(a, start) - start, min(b, stop) - start) for number, a, b in self.segments]
        keys = None if self.keys_T2 is None else self.keys_T2[start:stop]
        return TokenOwners(stop - start, tuple(one for one in inside if one[1] < one[2]), keys)
