"""Images that `generate` and `chat` are asked about: looked at as those of rows are, and what a model takes of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from packlora.data.places import prompt_text
from packlora.data.prompts import NO_VARIABLES
from packlora.data.template import Template
from packlora.data.tokens import prompt_tokens
from packlora.errors import InputError
from packlora.images.files import Images, Shown
from packlora.images.vision import ImageTensors, Vision, on_device
from packlora.terminal import say


class AskedImages:
    """Images for a base model. Its processor is loaded with the first image.

    Args:
        path, revision: of the base model.
        config: its configuration.
    """

    def __init__(self, path: str, revision: str | None, config: Any) -> None:
        self.path, self.revision, self.config = path, revision, config
        self.there = getattr(config, "vision_config", None) is not None
        """Whether the base model is one that sees images."""
        self._vision: Vision | None = None
        self._shown: Shown | None = None

    def _loaded(self, tokenizer: Any) -> tuple[Vision, Shown]:
        if self._vision is None or self._shown is None:
            self._vision = Vision.of(self.path, self.revision, self.config)
            self._shown = Shown(self._vision)
            tokenizer.chat_template = self._vision.chat_template or tokenizer.chat_template  # as in training
        return self._vision, self._shown

    def look(self, image: str, where: str, tokenizer: Any) -> None:
        """Raises InputError where the base model sees none, or a file is no image for it. where: for messages."""
        self._loaded(tokenizer)[1].look(image, where)

    def named(self, image: str, where: str, tokenizer: Any) -> list[str]:
        """The path of an image that a person named; none, and a line that says why, where it cannot be shown."""
        path = os.path.expanduser(image)
        try:
            if not path:
                raise InputError(f"{where}: give the path of a file behind it")
            self.look(path, where, tokenizer)
        except InputError as error:
            say(str(error))
            return []
        return [path]

    def inputs(
        self, messages: list[dict[str, Any]], paths: Sequence[str], tokenizer: Any, model: PreTrainedModel,
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
        """Token ids [1, T] of a conversation, and further arguments of the model: the tensors of the images, and the mask of
        image tokens. variables: of the chat template."""
        vision, shown = self._loaded(tokenizer)
        ids, images = image_prompt_ids(messages, paths, tokenizer, shown, "an image", variables)
        tensors = ImageTensors.joined([vision.tensors(file.decode()) for file in images.files]).tensors
        ids_T = torch.tensor(ids)
        own = on_device(tensors | vision.as_transformers_runs(model, ids_T), model.device, model.dtype)
        return ids_T[None].to(model.device), own

    def tokens_of(self, ids: torch.Tensor) -> int:
        """Number of image tokens."""
        return int((ids == self._vision.token_id).sum()) if self._vision is not None else 0


def image_prompt_ids(
    messages: list[dict[str, Any]], paths: Sequence[str], tokenizer: Any, shown: Shown, where: str,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> tuple[list[int], Images]:  # fmt: skip
    """Tokens of a conversation with images, and the images.

    Args:
        messages: contents are texts, or lists of blocks with {"type": "image"} for each image.
        paths: of the images, in the order of their blocks.
        where: for messages.
        variables: of the chat template.

    Raises:
        InputError: the template refuses the messages, or does not show all of them; or a file is no image for this model.
    """
    text, _, images = shown.put_in(prompt_text(Template(tokenizer, None, variables), messages), [], paths, where)
    ids = prompt_tokens(text, tokenizer, is_rendered=True)
    if problem := shown.problem_of(np.asarray(ids), images):
        raise InputError(f"{where}: {problem}")
    return ids, images
