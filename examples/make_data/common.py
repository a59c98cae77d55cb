"""Shared parts of the data scripts: token counts, near-duplicate filter, deterministic selection, output.

The selection does not use a random generator.  Candidates are ordered by the SHA-256 of their key, so a
source that changed in a few places changes the chosen rows in a few places only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_WORD = re.compile(r"[^\W_]+")
_PERSONAL = re.compile(
    r"[\w.+-]+@[\w-]+\.\w+"  # e-mail address
    r"|\+\d[\d\s().-]{7,}\d"  # telephone number
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd\ufeff]")
# fmt: off
_COMMON_WORDS = frozenset((
    "about", "also", "and", "are", "for", "from", "has", "into", "its", "not", "other", "than", "that",
    "the", "this", "using", "when", "with",
))
# fmt: on


@dataclass(frozen=True)
class Candidate:
    """One possible row.

    ``key`` orders the candidates and must be unique; ``text`` is what near-duplicates are looked for in (the
    row without the words that every row of the set has); ``source`` goes into the set's sources.tsv.
    """

    key: str
    prompt: str
    completion: str
    text: str
    source: tuple[str, ...]
    group: str = ""


@dataclass(frozen=True)
class Plan:
    """How many rows to take, of which length, and how different from each other they have to be."""

    n_train: int
    n_eval: int
    min_tokens: int
    max_tokens: int
    max_overlap: float
    group_limits: dict[str, int]


def words(text: str) -> list[str]:
    """Lower-cased words and numbers of the text."""
    return _WORD.findall(text.lower())


def is_clean(text: str) -> bool:
    """True when the text has no control characters, no e-mail address and no telephone number."""
    return not _CONTROL.search(text) and not _PERSONAL.search(text)


def is_derivable(completion: str, prompt: str, share: float) -> bool:
    """True when at least ``share`` of the completion's content words (or their stems) occur in the prompt."""
    content = {w for w in words(completion) if len(w) > 2 and w not in _COMMON_WORDS}
    if not content:
        return False
    haystack = prompt.lower()
    return sum(w[: max(4, len(w) - 3)] in haystack for w in content) >= share * len(content)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load ``tokenizer.json`` from a model folder, or the file itself."""
    return Tokenizer.from_file(str(path / "tokenizer.json" if path.is_dir() else path))


def count_tokens(tokenizer: Tokenizer, prompt: str, completion: str) -> int:
    """Tokens of prompt and completion, without chat template or special tokens."""
    return sum(len(tokenizer.encode(t, add_special_tokens=False).ids) for t in (prompt, completion))


def shingles(text: str, size: int = 4) -> frozenset[tuple[str, ...]]:
    """All runs of ``size`` words of the text (a shorter text is one single run)."""
    w = words(text)
    return frozenset(tuple(w[i : i + size]) for i in range(max(1, len(w) - size + 1)))


class NearDuplicates:
    """Remembers accepted texts and says how much of a new text was already seen in one of them."""

    def __init__(self) -> None:
        """Start with no text."""
        self._sizes: list[int] = []
        self._where: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def overlap(self, new: frozenset[tuple[str, ...]]) -> float:
        """Largest share of common runs with any accepted text, relative to the shorter of the two."""
        hits: dict[int, int] = defaultdict(int)
        for run in new:
            for index in self._where.get(run, ()):
                hits[index] += 1
        return max((n / min(len(new), self._sizes[i]) for i, n in hits.items()), default=0.0)

    def add(self, new: frozenset[tuple[str, ...]]) -> None:
        """Accept a text."""
        for run in new:
            self._where[run].append(len(self._sizes))
        self._sizes.append(len(new))


def select(
    candidates: Iterable[Candidate],
    plan: Plan,
    tokenizer: Tokenizer,
    accept: Callable[[Candidate], bool] = lambda _: True,
) -> tuple[list[Candidate], list[Candidate]]:
    """Return (train, eval): rows of the wanted length of which no two are near-duplicates."""
    ordered = sorted(candidates, key=lambda c: hashlib.sha256(c.key.encode()).hexdigest())
    texts, completions = NearDuplicates(), set[tuple[str, ...]]()
    taken: dict[str, int] = defaultdict(int)
    chosen: list[Candidate] = []
    for c in ordered:
        if len(chosen) == plan.n_train + plan.n_eval:
            break
        if taken[c.group] >= plan.group_limits.get(c.group, 10**9):
            continue
        # Four characters a token is usual; this cheap test spares most calls of the tokenizer.
        if len(c.prompt) + len(c.completion) > 8 * plan.max_tokens or not accept(c):
            continue
        if not is_clean(c.prompt) or not is_clean(c.completion):
            continue
        answer = tuple(sorted(set(words(c.completion))))
        runs = shingles(c.text)
        if answer in completions or texts.overlap(runs) > plan.max_overlap:
            continue
        if not plan.min_tokens <= count_tokens(tokenizer, c.prompt, c.completion) <= plan.max_tokens:
            continue
        texts.add(runs)
        completions.add(answer)
        taken[c.group] += 1
        chosen.append(c)
    if len(chosen) < plan.n_train + plan.n_eval:
        raise SystemExit(f"only {len(chosen)} of {plan.n_train + plan.n_eval} rows found")
    # Every k-th row goes to the evaluation file, so that both files have the same mixture of sources.
    step = len(chosen) // plan.n_eval
    held_out = set(range(step - 1, step * plan.n_eval, step))
    return (
        [c for i, c in enumerate(chosen) if i not in held_out],
        [c for i, c in enumerate(chosen) if i in held_out],
    )


def write_set(out: Path, train: Sequence[Candidate], held_out: Sequence[Candidate], columns: Sequence[str]) -> None:
    """Write train.jsonl, eval.jsonl and sources.tsv (where each row comes from) into ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(("file", "row", *columns))]
    for name, rows in (("train.jsonl", train), ("eval.jsonl", held_out)):
        with (out / name).open("w", encoding="utf-8", newline="\n") as f:
            for number, c in enumerate(rows, 1):
                row = {"prompt": c.prompt, "completion": c.completion}
                f.write(json.dumps(row, ensure_ascii=False) + "\n")
                lines.append("\t".join((name, str(number), *c.source)))
    (out / "sources.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    print(f"{out}: {len(train)} train rows, {len(held_out)} eval rows")
