"""Parquet files."""

from __future__ import annotations

import os
from pathlib import Path

from packlora.data.rows import How
from packlora.data.tables import AT_ONCE, Values, check_pyarrow, read_batches, used
from packlora.data.unpacking import Bound, claimed_by_parquet, rows_at_once
from packlora.errors import InputError


def rows(file: Path, job: str, how: How) -> Values:
    """Rows, each with its number. Raises InputError where the file is none of parquet, or unpacks to too much."""
    check_pyarrow(f"job {job!r}: {file}")
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            bound = Bound(str(file), os.path.getsize(file), job)
            read, left = used(table.schema_arrow, how)
            bound.check(claimed_by_parquet(table.metadata, read))
            batches = table.iter_batches(rows_at_once(table.metadata, file, read, AT_ONCE), columns=read)
            yield from read_batches(batches, str(file), job, how, bound, left)
    except pyarrow.ArrowException as error:
        raise InputError(f"job {job!r}: cannot read {file} as parquet: {error}") from None
