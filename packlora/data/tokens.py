"""Tokens of texts: the tokens that a tokenizer puts before a text occur once, and none are put after it.

A text that was rendered before begins with the first token already, and a tokenizer would put a second one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from packlora.errors import InputError


def leading(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before any text, most often the one that begins a text, or none."""
    plain, whole = (list(tokenizer("a", add_special_tokens=more)["input_ids"]) for more in (False, True))
    starts = range(len(whole) - len(plain) + 1)
    return whole[: next((start for start in starts if whole[start : start + len(plain)] == plain), 0)]


def missing(before: Sequence[int], ids: Sequence[int]) -> Sequence[int]:
    """Leading tokens that a text does not already begin with."""
    sizes = range(len(before), -1, -1)
    repeated = next(size for size in sizes if list(ids[:size]) == list(before[len(before) - size :]))
    return before[: len(before) - repeated]


def prompt_tokens(text: str, tokenizer: Any, is_rendered: bool) -> list[int]:
    """Tokens of a text that is gone on from. is_rendered: a chat template wrote it, which writes the first tokens itself."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids if is_rendered else [*missing(leading(tokenizer), ids), *ids]


def tokens_and_offsets(texts: Sequence[str], tokenizer: Any, is_rendered: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens of each text, int32 [T], and the character range of each token, [T, 2]; the range of special tokens put before the
    text is (0, 0)."""
    encoded = tokenizer(
        list(texts), add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False
    )
    before, out = [] if is_rendered else leading(tokenizer), []
    for ids, offsets in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        first = missing(before, ids)
        places = np.fromiter(chain([0, 0] * len(first), *offsets), np.int64)  # an array of pairs takes twice as long
        out.append((np.array([*first, *ids], np.int32), places.reshape(-1, 2)))
    return out


def ended(text: str, end: str) -> str:
    """A text with the token that ends it, which it has once, also where white space follows."""
    return text if text.rstrip().endswith(end) else text + end


def check_vocabulary(job: str, texts: Iterable[np.ndarray], vocabulary: int, tokenizer: Any) -> None:
    """Raises InputError where the ids [T] of a text have a token for which the model has no embedding."""
    largest = max(int(ids.max()) for ids in texts)
    if largest >= vocabulary:
        known = len(tokenizer)
        grown = (
            f" and the tokenizer {known} tokens: its vocabulary was grown; grow the model's (resize_token_embeddings({known})) "
            "and save it"
        )
        raise InputError(
            f"job {job!r}: its data has token {largest}, the model has embeddings for {vocabulary}"
            + grown * (known > vocabulary)
        )
