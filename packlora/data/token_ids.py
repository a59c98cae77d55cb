"""Rows of token ids, and which of them are learnt: by labels, by masks, or by soft targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packlora.data.flags import MASKS, PACKED, TARGETS
from packlora.data.soft import soft_targets
from packlora.data.values import Bad, holds_something, integers

UNLEARNT = -100
"""The label of a token that is not learnt."""


def tokens_of(value: Mapping[str, Any], bad: Bad) -> dict[str, Any]:
    """Arguments of the Row that a row of token ids is; without labels, masks or targets all of them are learnt, as of a text.

    Raises:
        InputError: it is none.
    """
    for key in PACKED:
        if holds_something(value.get(key)):
            raise bad(f"{key!r} is not read; a row is one sample of texts, whose tokens are numbered from 0")
    ids = integers(value["input_ids"], "'input_ids'", 0, bad)
    is_label = np.ones(len(ids), bool)
    if value.get("labels") is not None:
        labels = integers(value["labels"], "'labels'", UNLEARNT, bad)
        if len(labels) != len(ids):
            raise bad(f"'labels' has {len(labels)} numbers, 'input_ids' {len(ids)}; there is one for each token")
        is_label = labels != UNLEARNT
        if (odd := np.flatnonzero(is_label & (labels != ids))).size:
            at = int(odd[0])
            raise bad(
                f"'labels' has {labels[at]} where 'input_ids' has {ids[at]}, at number {at + 1}; a label is its own token, "
                f"which is not shifted here, or {UNLEARNT}"
            )
    for key in MASKS:
        if value.get(key) is not None:
            mask = integers(value[key], repr(key), 0, bad)
            if len(mask) != len(ids) or mask.max() > 1:
                raise bad(
                    f"{key!r} must have {len(ids)} numbers, 1 for each of the 'input_ids' that is learnt, 0 for others"
                )
            is_label &= mask == 1
    if (
        value.get("attention_mask") is not None
        and (integers(value["attention_mask"], "'attention_mask'", 0, bad) != 1).any()
    ):
        raise bad("'attention_mask' has other numbers than 1; leave the padding out")
    targets = None
    if any(holds_something(value.get(key)) for key in TARGETS):
        targets = soft_targets(value, len(ids), ("labels", *MASKS), bad)
        is_label = targets.counts > 0
    return {"ids": ids.astype(np.int32), "is_label": is_label, "targets": targets}


def beyond(ids: np.ndarray, vocabulary: int | None) -> str | None:
    """Problem of token ids [T] of which the model lacks one; None: it has all of them."""
    if vocabulary is None or (largest := int(ids.max())) < vocabulary:
        return None
    at = int(np.argmax(ids)) + 1
    return f"'input_ids' has {largest} at number {at}; the model's tokens are 0 to {vocabulary - 1}"
