"""Images as the rest of the package asks for them; see packlora/modality.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from packlora.data.encode import Sample
from packlora.images.rows import with_images
from packlora.modality import Draw, Modality

if TYPE_CHECKING:
    from packlora.images.batch import BatchImages
    from packlora.images.files import Shown
    from packlora.images.proof import OwnImages
    from packlora.images.vision import Vision

__all__ = ["modality", "with_images"]


@dataclass(frozen=True, slots=True)
class ImageModality:
    """The images that one base model sees. See packlora/modality.py, Modality."""

    vision: Vision
    reader: Shown

    @property
    def chat_template(self) -> str | None:
        return self.vision.chat_template

    @property
    def example(self) -> Mapping[str, Any]:
        return self.vision.example

    def own(self, model: PreTrainedModel, path: str) -> OwnImages:
        from packlora.images.proof import own_images

        return own_images(model, path, self.vision)

    def check(self, model: PreTrainedModel, own: OwnImages, path: str) -> None:
        from packlora.images.proof import check_images

        check_images(model, own, path, self.vision)

    def in_batch(
        self, samples: Sequence[Sample], owners: Sequence[int], draws: Sequence[Draw], device: torch.device
    ) -> BatchImages | None:
        from packlora.images.batch import in_batch

        return in_batch(samples, owners, draws, self.vision, device)


def modality(path: str, revision: str | None, config: Any) -> Modality:
    """The images that the base model of a folder or a hub id sees. Raises InputError where it sees none here."""
    from packlora.images.files import Shown
    from packlora.images.vision import Vision

    vision = Vision.of(path, revision, config)
    return ImageModality(vision, Shown(vision))
