"""Samples of files that are read while a job trains, for data that is larger than memory: `streaming: true`.

A stream is without an end: where the files end they begin again, and each pass is shuffled anew through a buffer of rows. Its
n-th sample is a function of the files, the job's seed and its settings: a resumed run finds it by reading from the beginning.

What must be known before (lengths, tokens, the share of labels) is estimated from the first samples, the probe.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from packlora.config import DataSource
from packlora.data.dataset import JobData
from packlora.data.encode import Encoded, Notes, Sample, noted, samples_hash
from packlora.data.order import SampleOrder
from packlora.data.readers import as_source, files_of, rows_of
from packlora.data.rows import Row
from packlora.errors import InputError, counted
from packlora.seeding import stable_hash

BUFFER = 1000
"""Rows of the buffer that are shuffled, where a run file does not say."""
PROBE = 256
"""Samples that are looked at before training; a global batch at least."""
TOGETHER = 64
"""Rows that are encoded at once."""
KEPT_BATCHES = 64
"""Global batches whose samples stay in memory behind the newest: those of the window that trains, and of some before it."""

Encode = Callable[[Sequence[Row]], Encoded]
"""Function that encodes rows as samples; it records rows that are no samples, and leaves them out."""


def shuffled(rows: Iterator[Row], size: int, key: int) -> Iterator[Row]:
    """Shuffle rows through a buffer of `size` rows: each row takes the place of one that is drawn from the buffer."""
    generator = np.random.Generator(np.random.Philox(key))
    buffer: list[Row] = []
    for row in rows:
        if len(buffer) < size:
            buffer.append(row)
            continue
        at = int(generator.integers(size))
        yield buffer[at]
        buffer[at] = row
    for at in generator.permutation(len(buffer)):
        yield buffer[at]


@dataclass(slots=True)
class Counts:
    """Counts of the samples that a stream has cut or left out so far, in all passes, and notes about its rows.

    first: message about the first row that was not a sample.
    """

    truncated: int = 0
    dropped: int = 0
    skipped: int = 0
    first: str | None = None
    notes: Notes = field(default_factory=dict)

    def add(self, truncated: int, dropped: int, skipped: Sequence[str], notes: Notes | None = None) -> None:
        self.truncated += truncated
        self.dropped += dropped
        self.skipped += len(skipped)
        if self.first is None and skipped:
            self.first = skipped[0]
        noted(self.notes, notes or {})


class Stream(Sequence[Sample]):
    """Samples of a job by number, 0, 1, ...; its length and iteration are those of the probe.

    Args:
        name: of the job, for messages.
        paths: of data, or sources, one after the other.
        buffer: rows that are shuffled together; 0: file order.
        encode: makes samples of rows.
        kept: samples that stay in memory behind the newest.

    Raises:
        InputError: a file cannot be read, or a whole pass has no sample; also later, while samples are taken.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[str | DataSource],
        seed: int,
        buffer: int,
        encode: Encode,
        kept: int,
        probe: int,
    ) -> None:
        self.name, self.seed, self.buffer, self.encode, self.kept = name, seed, buffer, encode, kept
        self.sources = list(map(as_source, paths))
        self._begin()
        self._probe: list[Sample] = []
        self._probe = [self[number] for number in range(probe)]

    def _begin(self) -> None:
        self.counts = Counts()
        self._held: dict[int, Sample] = {}
        self._next = 0
        """Number of the sample that comes next."""
        self._samples = self._endless()

    def __len__(self) -> int:
        return len(self._probe)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self._probe)

    def __getitem__(self, number: int) -> Sample:  # type: ignore[override]
        if number < len(self._probe):
            return self._probe[number]
        if number < self._next and number not in self._held:
            self._begin()
        while self._next <= number:
            sample = next(self._samples)
            if self._next > number - self.kept:
                self._held[self._next] = sample
            self._next += 1
            self._held.pop(self._next - 1 - self.kept, None)
        return self._held[number]

    def _endless(self) -> Iterator[Sample]:
        number = 0
        while True:
            before = self._next
            for part in self._pass(number):
                self.counts.add(part.truncated, part.dropped, part.skipped, part.notes)
                yield from part.samples
            if self._next == before:
                said = f", the first row: {self.counts.first}" if self.counts.first else ""
                if self.counts.dropped:
                    said += f"; {self.counts.dropped} are too long: raise max_length or max_tokens_per_microbatch"
                raise InputError(f"job {self.name!r}: a whole pass over the data has no sample within its limits{said}")
            number += 1

    def _pass(self, number: int) -> Iterator[Encoded]:
        rows = self._rows()
        if self.buffer:
            rows = shuffled(rows, self.buffer, stable_hash("stream", self.seed, number))
        while some := list(itertools.islice(rows, TOGETHER)):
            yield self.encode(some)

    def _rows(self) -> Iterator[Row]:
        for source in self.sources:
            for row in rows_of(source, self.name):
                if isinstance(row, Row):
                    yield row
                else:
                    self.counts.add(0, 0, [str(row).removeprefix(f"job {self.name!r}: ")])

    def fingerprint(self) -> str:
        """Fingerprint of the probe, and of the files by name and size; it tells whether data has changed."""
        digest = hashlib.blake2b(samples_hash(self._probe).encode(), digest_size=16)
        for source in self.sources:
            for name in files_of(source.path, self.name):
                inside = sorted(os.scandir(name), key=lambda one: one.name) if os.path.isdir(name) else []
                sizes = [(one.name, one.stat().st_size) for one in inside] or [
                    (os.path.basename(name), os.path.getsize(name))
                ]
                digest.update(repr(sizes).encode())
        return digest.hexdigest()


@dataclass(slots=True)
class StreamOrder(SampleOrder):
    """The global batches of a stream: its samples as they come. lengths: of the probe."""

    stream: Stream = field(kw_only=True, repr=False, compare=False)

    @property
    def batches_per_epoch(self) -> int:
        return self.num_batches

    def samples(self, number: int) -> np.ndarray:
        return np.arange(number * self.global_batch_size, (number + 1) * self.global_batch_size)

    def batch(self, n: int) -> list[tuple[int, int]]:
        return [(number, self.stream[number].num_tokens) for number in self.samples(n).tolist()]


@dataclass(slots=True)
class StreamData(JobData):
    """A job's stream in the place of its samples. Its epoch is all of its steps."""

    def __post_init__(self) -> None:
        stream = self.samples
        assert isinstance(stream, Stream)
        lengths = np.array([sample.num_tokens for sample in stream], np.int32)
        self.num_labels = np.array([sample.num_labels for sample in stream])
        self.num_learnt = np.array([sample.num_learnt for sample in stream])
        self.label_share = int(self.num_labels.sum()) / int(lengths.sum())
        self.planned = StreamOrder(
            self.name, lengths, self.config.global_batch_size, self.seed, self.config.max_steps, stream=stream
        )

    @property
    def batches_per_epoch(self) -> int:
        return self.config.max_steps

    @property
    def num_samples(self) -> int:
        return self.config.max_steps * self.config.global_batch_size

    def total(self, values: np.ndarray) -> float:
        """Total as in JobData.total, estimated from the mean of the probe."""
        return float(values.mean(dtype=np.float64)) * self.num_steps * self.config.global_batch_size

    def label_tokens(self, step: int) -> int:
        return sum(self.samples[number].num_learnt for number in self.global_batch(step))

    def fingerprint(self, held_out: Sequence[Sample]) -> str:
        assert isinstance(self.samples, Stream)
        return self.samples.fingerprint() + samples_hash(held_out)

    def notes(self) -> list[str]:
        stream = self.samples
        assert isinstance(stream, Stream)
        told = []
        for count, what in ((stream.counts.truncated, "were cut"), (stream.counts.dropped, "were dropped as too long")):
            told += [f"of the stream, over all passes, {counted(count, 'sample', what)}"] if count else []
        if stream.counts.skipped:
            left = counted(stream.counts.skipped, "row", "were left out by on_bad_row")
            told.append(f"of the stream, over all passes, {left}, the first: {stream.counts.first}")
        for so, (rows, where) in stream.counts.notes.items():
            told.append(f"of the stream, over all passes, {counted(rows, 'row', so)}, the first: {where}")
        return [f"job {self.name!r}: {text}" for text in told]
