"""Inputs of a vision-language model for images: its processor, the tensors of a microbatch, the positions of tokens.

The processor is the library's own, without the part for videos, which needs more packages. Images are processed one at a time
and joined here, so an image's numbers do not depend on its neighbours. proof.py shows that a model may be run so.

Shapes: T tokens of a sample.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image as pillow
from transformers import PreTrainedModel
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from packlora.errors import InputError, foreign

OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids", "text_replacement_offsets")
"""Names that processors return beside the tensors of images."""


@dataclass(slots=True)
class ImageTensors:
    """Tensors of some images, in order. tensors: keyword arguments of the model. shares: one number for each image; any module
    of the vision tower gets rows of the images in proportion to these."""

    tensors: dict[str, torch.Tensor]
    shares: tuple[int, ...]

    @staticmethod
    def joined(parts: Sequence[ImageTensors]) -> ImageTensors:
        tensors = {name: _joined([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        return ImageTensors(tensors, tuple(share for part in parts for share in part.shares))


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along the first dimension; the tiles of images with fewer of them are padded, as LLaVA-NeXT expects."""
    if parts[0].ndim == 5:
        most = max(part.shape[1] for part in parts)
        parts = [torch.nn.functional.pad(part, (0, 0) * 3 + (0, most - part.shape[1])) for part in parts]
    return torch.cat(parts)


@dataclass(slots=True)
class Vision:
    """The images of one base model.

    token_id: of all tokens in whose place image features are put. image_mark: what the chat template writes for an image.
    example: keyword arguments of packed calls with images, of the proof.
    """

    processor: Any
    token_id: int
    image_mark: str
    model_type: str
    example: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    """Dtype of the model."""
    _positions: Any = None
    _by_block: bool = False

    @staticmethod
    def of(path: str, revision: str | None, config: Any) -> Vision:
        """Load the processor of a folder or a hub id without running code from it. Raises InputError where the model reads no
        images here."""
        what = f"base_model {path!r}: a {config.model_type} model"
        known: Any = PROCESSOR_MAPPING.get(type(config), None)
        if getattr(config, "vision_config", None) is None or known is None or not hasattr(known, "replace_image_token"):
            raise InputError(f"{what} reads no images here, and some are given; choose a vision-language model")

        def parts(cls: Any) -> list[str]:
            return [name for name in known.get_attributes() if name != "video_processor"]

        images_alone: Any = type(known.__name__, (known,), {"get_attributes": classmethod(parts)})
        try:
            processor = images_alone.from_pretrained(path, revision=revision, trust_remote_code=False)
        except ImportError as error:
            raise InputError(
                f"{what} needs another package for images: {foreign(error)}; pip install torchvision"
            ) from None
        except Exception as error:  # transformers raises many types for a processor that is not there
            raise InputError(
                f"{what}: its processor cannot be loaded: {foreign(error)}; save it beside the weights by its save_pretrained"
            ) from None
        (token_id,) = {int(one) for one in processor.image_token_ids if one is not None}
        return Vision(processor, token_id, processor.image_token, config.model_type)

    @property
    def chat_template(self) -> str | None:
        """Chat template of the processor, which supports images; None where the processor has none."""
        return getattr(self.processor, "chat_template", None)

    def text_of(self, image: pillow.Image) -> str:
        """See files.py, ImageText."""
        try:
            found = self.processor(images=[image], text=[self.image_mark], return_text_replacement_offsets=True)
            return str(found["text_replacement_offsets"][0][0]["replacement"])
        except (RuntimeError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(foreign(error)) from None

    def count(self, text: str) -> int:
        ids = self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        return sum(one == self.token_id for one in ids)

    def tensors(self, image: pillow.Image) -> ImageTensors:
        """Tensors of one image, on the host."""
        found = self.processor(images=[image], text=[self.image_mark], return_tensors="pt")
        own = {name: tensor for name, tensor in found.items() if name not in OF_TEXT}
        return ImageTensors(own, (own["pixel_values"].numel(),))

    # --- of the model that is run ------------------------------------------------------------------------------------------

    def bind(self, model: PreTrainedModel) -> None:
        """Learn from the model's own methods what its tokens need beside their numbers."""
        inner: Any = model.base_model
        self.dtype = model.dtype
        self._positions = getattr(inner, "get_rope_index", None)
        self._by_block = "token_type_ids" in inspect.signature(inner.forward).parameters

    def as_transformers_runs(self, model: PreTrainedModel, ids_T: torch.Tensor) -> dict[str, torch.Tensor]:
        """Keyword arguments that mark a sample's image tokens for the model as transformers runs it."""
        known = inspect.signature(model.base_model.forward).parameters
        is_image = (ids_T == self.token_id)[None].long()
        return {name: is_image for name in ("token_type_ids", "mm_token_type_ids") if name in known}

    def positions(self, ids: np.ndarray, images: ImageTensors | None) -> np.ndarray:
        """Positions of the tokens of one sample, int64 [T]; or [3, T], where images have positions in time, height and
        width."""
        if self._positions is None or images is None:
            return np.arange(len(ids))
        ids_T = torch.from_numpy(ids.astype(np.int64))[None]
        known = inspect.signature(self._positions).parameters
        more = {name: tensor for name, tensor in images.tensors.items() if name in known}
        if "mm_token_type_ids" in known:
            more["mm_token_type_ids"] = (ids_T == self.token_id).int()
        found, _ = self._positions(ids_T, **more)
        return found[:, 0].numpy()  # type: ignore[no-any-return]

    def blocks(self, ids: np.ndarray, start: int) -> np.ndarray | None:
        """Image number of each token of a sample, int64 [T]: the tokens of one image attend to all of its tokens; -1 for other
        tokens; numbers begin with `start`. None where attention is causal for all tokens."""
        if not self._by_block:
            return None
        is_image = ids == self.token_id
        begins = is_image & ~np.concatenate([[False], is_image[:-1]])
        return np.where(is_image, np.cumsum(begins) - 1 + start, -1)


def joined_positions(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate the positions of samples, each [T] or [3, T]: the result is [3, T] where one of them has positions in three
    dimensions."""
    if all(part.ndim == 1 for part in parts):
        return np.concatenate(parts)
    return np.concatenate([np.broadcast_to(part, (3, part.shape[-1])) for part in parts], axis=1)


def on_device(tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of images where the model is, in its dtype."""
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype, non_blocking=True)
        for name, tensor in tensors.items()
    }
