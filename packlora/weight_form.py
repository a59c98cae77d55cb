"""Interface of the form of a base model's linear layers, where they are not floats (form.py). It is imported for its type
alone."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedModel


class WeightForm(Protocol):
    """The form of a base model's linear layers."""

    @property
    def key(self) -> str:
        """Key of a run that stands for it, for messages."""

    @property
    def method(self) -> str: ...

    @property
    def by_launches(self) -> bool:
        """Whether products are made by launches alone, which a CUDA graph can record."""

    @property
    def described(self) -> str:
        """Description for messages."""

    @property
    def held(self) -> tuple[int, int]:
        """Numbers of the layers that are held so, and bytes that they take."""

    def read(
        self, path: str, revision: str | None, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False,
        notes: list[str] | None = None,
    ) -> PreTrainedModel:  # fmt: skip
        """The model on its device with these layers, the rest of this dtype.

        Args:
            notes: gets what is to be known of it.

        Raises:
            InputError: it cannot be loaded, or something of it is in a form that is not read here.
        """

    def counted(self, skeleton: PreTrainedModel, path: str, dtype: torch.dtype) -> WeightForm:
        """The same, with what it holds of a model in a run of this dtype."""

    def own_layers(
        self, model: PreTrainedModel, dtype: torch.dtype, path: str, notes: list[str] | None = None
    ) -> PreTrainedModel:
        """Put layers of this form in the place of a loaded model's, on its device. path: the model, for messages. Errors as
        those of `read`."""

    def share(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Put layers of this form in the place of a model's, which is on the meta device and is to be shared by rows. dtype: of
        the run."""
