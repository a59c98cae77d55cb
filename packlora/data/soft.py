"""Soft targets of rows of token ids, checked: for each token those that may stand in its place, with weights.

    target_token_ids    for each of the input_ids a list of token ids, or null; lists may be of any length
    target_logprobs     the log-probability of each, or
    target_weights      its weight

They lie as `labels` do, and as the prompt_logprobs of inference servers: those of a token are predicted by the tokens before
it, so that the first token has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from packlora.data.flags import TARGETS
from packlora.data.values import Bad, integers
from packlora.errors import kind_of, quoted, shown

TOKENS, LOGPROBS, WEIGHTS = TARGETS
MOST = 4096
"""Targets of a token."""
ABOVE = 1e-3
"""How far a log-probability may be above 0 by rounding."""


@dataclass(frozen=True, slots=True)
class SoftTargets:
    """Targets [l] of tokens [T], in their order. counts: targets of each token [T]. weights: float64, above 0."""

    counts: np.ndarray
    tokens: np.ndarray
    weights: np.ndarray

    @property
    def places(self) -> np.ndarray:
        """Number of the token in whose place each target may stand, from 0."""
        return np.repeat(np.arange(len(self.counts)), self.counts)


def soft_targets(value: Mapping[str, Any], length: int, others: Sequence[str], bad: Bad) -> SoftTargets:
    """The targets of a row of so many tokens; those of weight 0 are left out.

    Args:
        others: fields that say what is learnt too.

    Raises:
        InputError: they are none.
    """
    key = _key(value, others, bad)
    ids, numbers = (_lists(value[name], name, length, bad) for name in (TOKENS, key))
    if ids[0]:
        raise bad(
            f"{TOKENS!r} has targets for the first token, which nothing predicts; targets lie as labels do: those of a "
            "token stand at its own number, null or [] at the first"
        )
    own = [_of_token(n, some, those, key, bad) for n, (some, those) in enumerate(zip(ids, numbers, strict=True), 1)]
    places = np.repeat(np.arange(length), [len(found) for found, _ in own])
    tokens = np.fromiter(chain.from_iterable(found for found, _ in own), np.int64)
    weights = np.fromiter(chain.from_iterable(found for _, found in own), np.float64)
    weights = np.exp(weights) if key == LOGPROBS else weights
    kept = weights > 0
    return SoftTargets(np.bincount(places[kept], minlength=length), tokens[kept], weights[kept])


def _key(value: Mapping[str, Any], others: Sequence[str], bad: Bad) -> str:
    """The field of a row that says what each target weighs."""
    named = [key for key in TARGETS if value.get(key) is not None]
    if len(named) != 2 or named[0] != TOKENS:
        raise bad(f"soft targets are {TOKENS!r} and one of {LOGPROBS!r} and {WEIGHTS!r}; found {', '.join(named)}")
    for key in others:
        if value.get(key) is not None:
            raise bad(f"the row has {key!r} and {TOKENS!r}, which say both what is learnt; leave one of them out")
    return named[1]


def _lists(some: Any, name: str, length: int, bad: Bad) -> list[Any]:
    if not isinstance(some, list) or len(some) != length:
        found = f"{len(some)} entries" if isinstance(some, list) else kind_of(some)
        raise bad(f"{name!r} must have a list, or null, for each of the {length} 'input_ids'; found {found}")
    return some


def _of_token(number: int, tokens: Any, numbers: Any, key: str, bad: Bad) -> tuple[Sequence[int], Sequence[float]]:
    """Targets of one token, counted from 1, and their numbers."""
    if not tokens and not numbers:
        return (), ()
    name = f"{TOKENS!r} at number {number}"
    found: list[int] = integers(tokens, name, 0, bad).tolist()
    if len(found) > MOST:
        raise bad(f"{name} has {len(found)} tokens; at most {MOST} are accepted")
    if len(set(found)) < len(found):
        raise bad(f"{name} has the token {max(found, key=found.count)} twice")
    if not isinstance(numbers, list) or len(numbers) != len(found):
        other = len(numbers) if isinstance(numbers, list) else kind_of(numbers)
        raise bad(f"{key!r} at number {number} must have {len(found)} numbers, one for each target; found {other}")
    odd = [one for one in numbers if not _is_taken(one, key == LOGPROBS)]
    if odd:
        accepted = "log-probabilities, of at most 0" if key == LOGPROBS else "finite numbers from 0"
        raise bad(f"{key!r} at number {number} has {shown(quoted(odd[0]))}; only {accepted} are accepted")
    return found, numbers


def _is_taken(one: Any, is_logp: bool) -> bool:
    if isinstance(one, bool) or not isinstance(one, int | float) or math.isnan(one):
        return False
    return one <= ABOVE if is_logp else 0 <= one < math.inf
