"""Content that a base model reads beside texts: its place in rows, samples and microbatches, and the plug-in for all else.

The rooms of the package know these few calls alone. The plug-in (images/) is imported by its name, where a row, the rows of a
run or a question have something beside texts.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedModel

PLUGIN = "packlora.images.plugin"

Draw = tuple[int, int, int] | None
"""Dropout key, step and number of a sample; None: nothing is dropped."""
Spans = list[tuple[int, int]]
"""Character spans of a text, [start, stop)."""


class Extras(Protocol):
    """Content of a sample beside its tokens. Some of its tokens, which have one id, stand for it."""

    @property
    def kind(self) -> str:
        """Word for the content in messages."""

    @property
    def token_id(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Tokens that stand for it."""

    @property
    def digest(self) -> bytes:
        """Digests of the files that it is read from."""

    def cut(self, ids: np.ndarray, limit: int) -> tuple[int, Self | None]:
        """Tokens that are left of `ids` [T] where at most `limit` are, with nothing cut through; and what is whole in them."""

    def split(self, parts: Sequence[np.ndarray]) -> list[Self | None]:
        """Split the content among the parts of a sample, by their token ids [T]."""

    def joined(self, others: Sequence[Self]) -> Self:
        """The same with that of other parts behind it."""


class ExtrasReader(Protocol):
    """Makes texts of rows ready for what stands for their files."""

    def put_in(self, text: str, spans: Spans, paths: Sequence[str], where: str) -> tuple[str, Spans, Extras]:
        """A text with what stands for each file in the place of its mark, the spans that were given in it, and the extras.

        Raises:
            InputError: there are not as many marks as files, or a file cannot be read for this model.
        """

    def problem_of(self, ids: np.ndarray, extras: Any) -> str | None:
        """Error in the tokens [T] of a sample, or None: tokens that stand for content must match its extras."""


class BatchExtras(Protocol):
    """Content of the samples of a microbatch beside their tokens."""

    @property
    def owners(self) -> Any:
        """Owners of the rows of modules beside the language model: adapters/owners.py, BesideOwners."""

    def positions(self, total: int) -> list[np.ndarray]:
        """Positions of all tokens, [T] or [3 T], with those of nobody at the end."""

    def arguments(self, total: int, device: torch.device) -> dict[str, torch.Tensor]:
        """More of the model's keyword arguments."""


class Modality(Protocol):
    """Reader of the content that one base model takes beside texts."""

    @property
    def reader(self) -> ExtrasReader: ...

    @property
    def chat_template(self) -> str | None:
        """The chat template that writes the marks; None where the model has no other than the tokenizer's."""

    @property
    def example(self) -> Mapping[str, Any]:
        """Keyword arguments of a packed call with extras; there after `check`."""

    def own(self, model: PreTrainedModel, path: str) -> Any:
        """Output of the untouched model for probes. Raises InputError where it does not run."""

    def check(self, model: PreTrainedModel, own: Any, path: str) -> None:
        """Raises InputError where packed samples are not what they are alone. own: of `own`."""

    def in_batch(
        self, samples: Sequence[Any], owners: Sequence[int], draws: Sequence[Draw], device: torch.device
    ) -> BatchExtras | None:
        """The extras of a microbatch, read when it is due; None where no sample has any. Raises InputError where a file is not
        what it was.

        Args:
            samples: of data/encode.py.
            owners, draws: of each sample.
        """


def plugin() -> Any:
    """The plug-in, images/plugin.py, imported now."""
    return importlib.import_module(PLUGIN)
