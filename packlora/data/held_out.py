"""Held-out samples that are drawn from the training data: `data.eval_split`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packlora.config import DataConfig
from packlora.data.encode import Encoded
from packlora.errors import InputError
from packlora.seeding import stable_hash


def held_out(parts: Sequence[Encoded], data: DataConfig, seed: int, job: str) -> tuple[list[Encoded], Encoded]:
    """Draw the share `eval_split` of all samples, by the seed alone; the order of samples stays.

    Args:
        parts: by source.

    Returns:
        What is left of each source, and what is held out.

    Raises:
        InputError: one of both would be without a sample, or a source that has a weight.
    """
    share, total = data.eval_split or 0.0, sum(len(part.samples) for part in parts)
    count = int(share * total + 0.5)
    if not 0 < count < total:
        left = "none is held out" if count == 0 else "none is left to train on"
        raise InputError(f"job {job!r}: of {total} samples data.eval_split {share:g} is {count}, so {left}; change it")
    generator = np.random.Generator(np.random.Philox(stable_hash("eval_split", seed)))
    drawn = set(generator.permutation(total)[:count].tolist())
    kept, out, numbers = list[Encoded](), Encoded([]), itertools.count()
    for part, (path, weight) in zip(parts, data.sources, strict=True):
        own = replace(part, samples=[])
        for sample in part.samples:
            (out if next(numbers) in drawn else own).samples.append(sample)
        if weight is not None and not own.samples:
            raise InputError(f"job {job!r}: data.eval_split {share:g} holds out all samples of {path}; change it")
        kept.append(own)
    return kept, out
