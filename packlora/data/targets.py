"""Samples whose labels are given beside their tokens: any token at any place, several at a place for soft targets.

A row of a data file has soft targets beside its `input_ids`:

    target_token_ids    for each token a list of the token ids that may stand in its place, or null; lists may be of any length
    target_logprobs     the log-probability of each, or
    target_weights      its weight

They lie as `labels` do, and as the prompt_logprobs of inference servers: those of a token are predicted by the tokens before
it, so that the first token has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from packlora.data.encode import NO_COLUMNS, Sample
from packlora.data.rows import MASKS, TARGETS
from packlora.data.values import Bad, integers
from packlora.errors import quoted, shown

NOWHERE = np.zeros(0, np.int64)
WEIGHTS = "weights"
"""Column of targets."""
MOST = 4096
"""Targets of a token of a row."""
ABOVE = 1e-3
"""How far a log-probability may be above 0 by rounding."""


@dataclass(frozen=True, slots=True)
class TargetSample(Sample):
    """Tokens with targets.

    predicting: places [l] of the tokens whose logits predict, ascending; one place may come several times. labels: token ids
    [l] that are predicted there. where: file and line of its row. `is_label` marks the tokens in whose place targets of a row
    stand; where targets come from elsewhere it says nothing.
    """

    predicting: np.ndarray = field(default_factory=lambda: NOWHERE)
    labels: np.ndarray = field(default_factory=lambda: NOWHERE)
    where: str = ""

    @staticmethod
    def of(
        ids: np.ndarray, predicting: np.ndarray, labels: np.ndarray, columns: Mapping[str, np.ndarray] = NO_COLUMNS
    ) -> TargetSample:
        """A sample of tokens [T], places [l], targets [l] and columns, [] or [l] float64 each."""
        none = np.zeros(len(ids), bool)
        return TargetSample(
            ids.astype(np.int32), none, columns=columns,
            predicting=predicting.astype(np.int64), labels=labels.astype(np.int64),
        )  # fmt: skip

    @property
    def num_labels(self) -> int:
        """Targets."""
        return len(self.labels)

    @property
    def num_learnt(self) -> int:
        """Places with targets."""
        return len(np.unique(self.predicting))

    @property
    def target_bytes(self) -> bytes:
        """Targets and their places."""
        return self.predicting.tobytes() + self.labels.tobytes()

    def first(self, limit: int) -> TargetSample:
        """Cut the sample to at most `limit` tokens and their targets."""
        kept = self.predicting < limit - 1
        columns = {name: own[kept] if own.shape == kept.shape else own for name, own in self.columns.items()}
        return TargetSample(
            self.ids[:limit], self.is_label[:limit], columns=columns, predicting=self.predicting[kept],
            labels=self.labels[kept], where=self.where,
        )  # fmt: skip

    def odd_target(self, vocabulary: int) -> str | None:
        """What is wrong with a target beyond the vocabulary, with file and line."""
        if (beyond := np.flatnonzero(self.labels >= vocabulary)).size:
            at = int(beyond[0])
            return (
                f"{self.where}: 'target_token_ids' has {self.labels[at]} at number {self.predicting[at] + 2}; the model's "
                f"tokens are 0 to {vocabulary - 1}"
            )
        return None


def soft_targets(value: Mapping[str, Any], ids: np.ndarray, where: str, bad: Bad) -> TargetSample:
    """The sample of a row of tokens [T] with soft targets; targets of weight 0 are left out.

    Raises:
        InputError: they are none.
    """
    tokens, key = _fields(value, bad)
    numbers = value[key]
    for name, some in ((TARGETS[0], tokens), (key, numbers)):
        if not isinstance(some, list) or len(some) != len(ids):
            found = f"{len(some)} entries" if isinstance(some, list) else type(some).__name__
            raise bad(f"{name!r} must have a list, or null, for each of the {len(ids)} 'input_ids'; found {found}")
    if tokens[0]:
        raise bad(
            f"{TARGETS[0]!r} has targets for the first token, which nothing predicts; targets lie as labels do: those of a "
            "token stand at its own number, null or [] at the first"
        )
    own = [_targets_of(number, *pair, key, bad) for number, pair in enumerate(zip(tokens, numbers, strict=True), 1)]
    counts = [len(found) for found, _ in own]
    labels = np.fromiter(chain.from_iterable(found for found, _ in own), np.int64)
    weights = np.fromiter(chain.from_iterable(found for _, found in own), np.float64)
    if key == TARGETS[1]:
        weights = np.exp(weights)
    places, counts_some = np.repeat(np.arange(len(ids)), counts), weights > 0
    is_label = np.zeros(len(ids), bool)
    is_label[places[counts_some]] = True
    return TargetSample(
        ids.astype(np.int32), is_label, columns={WEIGHTS: weights[counts_some]}, predicting=places[counts_some] - 1,
        labels=labels[counts_some], where=where,
    )  # fmt: skip


def _fields(value: Mapping[str, Any], bad: Bad) -> tuple[Any, str]:
    """The lists of token ids, and the field with what each of them weighs."""
    named = [key for key in TARGETS if value.get(key) is not None]
    if len(named) != 2 or named[0] != TARGETS[0]:
        raise bad(
            f"soft targets are {TARGETS[0]!r} and one of {TARGETS[1]!r} and {TARGETS[2]!r}; found {', '.join(named)}"
        )
    for key in ("labels", *MASKS):
        if value.get(key) is not None:
            raise bad(f"the row has {key!r} and {TARGETS[0]!r}, which say both what is learnt; leave one of them out")
    return value[TARGETS[0]], named[1]


def _targets_of(number: int, tokens: Any, numbers: Any, key: str, bad: Bad) -> tuple[Sequence[int], Sequence[float]]:
    """Targets of one token, counted from 1, and their numbers."""
    if not tokens and not numbers:
        return (), ()
    name = f"{TARGETS[0]!r} at number {number}"
    found: list[int] = integers(tokens, name, 0, bad).tolist()
    if len(found) > MOST or len(set(found)) < len(found):
        twice = next((one for one in found if found.count(one) > 1), None) if len(found) <= MOST else None
        what = f"{len(found)} tokens, at most {MOST} are accepted" if twice is None else f"the token {twice} twice"
        raise bad(f"{name} has {what}")
    if not isinstance(numbers, list) or len(numbers) != len(found):
        other = len(numbers) if isinstance(numbers, list) else type(numbers).__name__
        raise bad(f"{key!r} at number {number} must have {len(found)} numbers, one for each target; found {other}")
    if (odd := next((one for one in numbers if not _is_taken(one, key == TARGETS[1])), None)) is not None:
        accepted = "log-probabilities, of at most 0" if key == TARGETS[1] else "finite numbers from 0"
        raise bad(f"{key!r} at number {number} has {shown(quoted(odd))}; only {accepted} are accepted")
    return found, numbers


def _is_taken(one: Any, is_logp: bool) -> bool:
    if isinstance(one, bool) or not isinstance(one, int | float) or math.isnan(one):
        return False
    return one <= ABOVE if is_logp else 0 <= one < math.inf
