"""Limits of the size to which compressed tables unpack, checked before they are unpacked.

A file of some kilobytes can hold the same text a million times. Parquet files and Arrow streams declare the unpacked size of
their parts; texts that dictionaries repeat are counted row by row, before they become Python objects.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from packlora.errors import InputError

UNPACKED_AT_ONCE = 2**28
"""Bytes of texts that one read of a .parquet file may repeat out of its dictionaries."""
MOST_UNPACKED = 2**30
"""Most bytes that a file may unpack to."""
MOST_RATIO = 1000
"""Largest ratio of unpacked bytes to packed bytes of a larger file. Texts shrink tenfold, repeated ones a hundredfold."""


class Bound:
    """Refuses a file that unpacks to far more than it is. size: of the file, in bytes."""

    def __init__(self, name: str, size: int, job: str) -> None:
        self.name, self.size, self.job, self.unpacked = name, size, job, 0
        self.most = max(MOST_UNPACKED, MOST_RATIO * size)

    def add(self, batch: Any) -> None:
        """Count the rows of a batch, before they are Python's objects."""
        self.unpacked += sum(int(_sizes(column).sum()) for column in batch.columns)
        self.check(self.unpacked)

    def check(self, unpacked: int) -> None:
        """Raises InputError where so many bytes are too many."""
        if unpacked > self.most:
            raise InputError(
                f"job {self.job!r}: {self.name} has {self.size} bytes and unpacks to more than {self.most}, as no texts of "
                "samples do; give the rows as .jsonl"
            )


def _sizes(array: Any) -> np.ndarray:
    """[rows] Bytes of texts of each row of a column, those of a dictionary as often as they are used."""
    import pyarrow
    from pyarrow import compute, types

    kind = array.type
    if types.is_dictionary(kind):
        known = np.append(_sizes(array.dictionary), 0)
        return np.asarray(
            known[compute.fill_null(array.indices.cast(pyarrow.int64()), -1).to_numpy(zero_copy_only=False)]
        )
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        lengths = compute.fill_null(compute.binary_length(array).cast(pyarrow.int64()), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False))
    if types.is_struct(kind):
        return np.asarray(sum(map(_sizes, array.flatten()), np.zeros(len(array), np.int64)))
    if types.is_list(kind) or types.is_large_list(kind):
        counts = compute.fill_null(compute.list_value_length(array).cast(pyarrow.int64()), 0)
        ends = np.cumsum(counts.to_numpy(zero_copy_only=False))
        total = np.append(0, np.cumsum(_sizes(array.flatten())))
        return np.diff(total[ends], prepend=0)
    return np.full(len(array), 8)


def claimed_by_parquet(metadata: Any, read: list[str]) -> int:
    """Unpacked bytes that the columns of a .parquet file declare, without what their encodings repeat."""
    groups = range(metadata.num_row_groups)
    return sum(chunk.total_uncompressed_size for group in groups for chunk in _chunks(metadata, group, read))


def rows_at_once(metadata: Any, file: Path, read: list[str], most_rows: int) -> int:
    """Rows of one read of a .parquet file, such that texts stay within memory, however often an encoding repeats them.

    Dictionaries are read as such, with the first row of each group. A text that begins as the one before (DELTA_BYTE_ARRAY) is
    no longer than all that its column chunk spells.
    """
    import pyarrow.parquet

    most = 1.0
    for number in range(metadata.num_row_groups):
        chunks, rows = list(_chunks(metadata, number, read)), metadata.row_group(number).num_rows
        if not rows:
            continue
        shared = [chunk for chunk in chunks if "DELTA_BYTE_ARRAY" in chunk.encodings]
        repeated = sum(chunk.total_uncompressed_size for chunk in shared)
        if known := [one.path_in_schema for one in chunks if one.has_dictionary_page and one not in shared]:
            with pyarrow.parquet.ParquetFile(file, metadata=metadata, read_dictionary=known, memory_map=True) as table:
                repeated += sum(batch.nbytes for batch in itertools.islice(table.iter_batches(1, [number], known), 1))
        most = max(most, repeated * max([1.0, *(chunk.num_values / rows for chunk in chunks)]))
    return int(min(most_rows, max(1, UNPACKED_AT_ONCE // most)))


def _chunks(metadata: Any, number: int, read: list[str]) -> Iterator[Any]:
    """Column chunks of a row group that are read."""
    group = metadata.row_group(number)
    chunks = map(group.column, range(group.num_columns))
    return (chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in read)


def claimed_by_message(message: Any) -> int:
    """Bytes that the compressed buffers of a message of an Arrow stream say they unpack to; 0 where none are compressed.

    The metadata is a flatbuffer (Message.fbs): a table begins with the distance to its list of fields' places.
    """
    data = message.metadata.to_pybytes()

    def number(kind: str, at: int) -> int:
        return int(struct.unpack_from(kind, data, at)[0])

    def field(table: int, index: int) -> int:
        """Offset of a field of a table; 0 where the table lacks the field."""
        listed = table - number("<i", table)
        place = number("<H", listed + 4 + 2 * index) if 4 + 2 * index < number("<H", listed) else 0
        return table + place if place else 0

    def follow(at: int) -> int:
        return at + number("<I", at)

    try:
        root = follow(0)
        kind, header = number("<B", field(root, 1)), follow(field(root, 2))
        batch = follow(field(header, 1)) if kind == 2 else header  # a dictionary's rows
        if kind not in (2, 3) or not field(batch, 3):
            return 0
        buffers = follow(field(batch, 2))
        places = [number("<q", buffers + 4 + 16 * index) for index in range(number("<I", buffers))]
        sizes = [number("<q", buffers + 12 + 16 * index) for index in range(len(places))]
        body = memoryview(message.body)
        claims = [struct.unpack_from("<q", body, at)[0] for at, size in zip(places, sizes, strict=True) if size >= 8]
    except struct.error:
        return 0  # the reader reports that it is no message
    return sum(claim for claim in claims if claim > 0)  # -1: not compressed
