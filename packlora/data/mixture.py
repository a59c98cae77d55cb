"""The samples of a job from several sources in shares by weight, and a share of them that is held out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packlora.config import DataConfig
from packlora.data.encode import Encoded, Sample
from packlora.data.samples import joined
from packlora.errors import InputError, plural
from packlora.seeding import stable_hash


def mixed(parts: Sequence[Encoded], data: DataConfig, seed: int, job: str, notes: list[str]) -> Encoded:
    """The samples of several sources with weights as those of one: as many as in all sources together, of which each source has
    its share: all its samples so many times, and the rest drawn without replacement.

    Args:
        parts: by source.
        data: of the job.
        seed: of what is drawn.
        notes: takes what each source gives.

    Raises:
        InputError: a source's share is less than one sample.
    """
    out = joined(parts)
    out.samples = []
    total = sum(len(part.samples) for part in parts)
    shares = shares_of([float(weight or 0) for _, weight in data.sources], total)
    for number, ((path, weight), part, share) in enumerate(zip(data.sources, parts, shares, strict=True)):
        if not share:
            raise InputError(
                f"job {job!r}: data.path: {path} has the weight {weight:g}, which of {plural(total, 'sample')} is none"
            )
        out.samples += _drawn(part.samples, share, stable_hash("mixture", seed, number))
        notes.append(f"job {job!r}: {path} gives {share} of {total} samples, and has {len(part.samples)}")
    return out


def shares_of(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided by weights into whole numbers; what rounding down leaves goes to the largest remainders, the first ones
    of equal ones."""
    exact = [weight / sum(weights) * total for weight in weights]
    shares = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda number: (shares[number] - exact[number], number))
    for number in order[: total - sum(shares)]:
        shares[number] += 1
    return shares


def _drawn(samples: Sequence[Sample], share: int, key: int) -> list[Sample]:
    """Select `share` of the samples, in their order: each as often as all can be, and some once more."""
    times, rest = divmod(share, len(samples))
    generator = np.random.Generator(np.random.Philox(key))
    once_more = set(generator.permutation(len(samples))[:rest].tolist())
    return [sample for number, sample in enumerate(samples) for _ in range(times + (number in once_more))]


def split_off_held_out(
    parts: Sequence[Encoded], data: DataConfig, seed: int, job: str
) -> tuple[list[Encoded], Encoded]:
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
        of = f"of {plural(total, 'sample')} data.eval_split {share:g} is {count}"
        raise InputError(f"job {job!r}: {of}, so {left}; change it")
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
