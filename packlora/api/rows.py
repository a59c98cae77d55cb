"""Rows of a job as Python objects: lists and iterables of mappings, Hugging Face data sets, Arrow tables.

All of them become the values that a data file of the same rows has, so that the way in which rows come changes no number.
"""

from __future__ import annotations

import hashlib
import json
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from packlora.config import DataSource
from packlora.data.rows import How
from packlora.data.tables import AT_ONCE
from packlora.errors import InputError
from packlora.given import GivenRows

ACCEPTED = "a path, a list of mappings, a datasets.Dataset, an Arrow table, a data frame or an iterable of mappings"


def is_path(data: Any) -> bool:
    """Whether data are paths, as data.path of a run file takes them: one, or a list of paths or of {path, weight}."""
    if isinstance(data, str | os.PathLike):
        return True
    items = data if isinstance(data, list) else []
    return bool(items) and all(
        isinstance(one, str | os.PathLike)
        or (isinstance(one, Mapping) and "path" in one and {*one} <= {*DataSource.model_fields})
        for one in items
    )


def read_rows(data: Any, job: str, what: str, columns: Mapping[str, str] | None = None) -> GivenRows:
    """Read the rows of an object, once.

    Args:
        what: name of the argument, for messages.
        columns: as data.columns of a run file.

    Raises:
        InputError: the object is no rows, or has none.
    """
    kind, how = type(data).__name__, How(columns or {}, fields=True)

    def odd(problem: str) -> InputError:
        return InputError(f"job {job!r}: {what} {problem}")

    if isinstance(data, Mapping):
        raise odd(
            f"is one mapping ({kind}) with {', '.join(map(str, data)) or 'nothing'}; give a list of rows, or one split"
        )
    try:
        batches = _batches(data)
    except (TypeError, ValueError, NotImplementedError) as error:  # Arrow's own are of these types
        raise odd(f"is a {kind} that Arrow cannot read ({error}); mend it, or give a list of mappings") from None
    if batches is not None:
        from packlora.data.tables import read_batches

        values = list(read_batches(batches, f"the {kind}", job, how))
    elif isinstance(data, Iterable) and not isinstance(data, bytes):
        is_table = hasattr(data, "column_names")  # every row has the keys of all others
        values = [(f"the {kind}, row {number}", _plain(row, is_table)) for number, row in enumerate(data, 1)]
    else:
        raise odd(f"is of type {kind}; it takes {ACCEPTED}")
    if not values:
        raise odd(f"has no rows (an empty {kind})")
    return GivenRows(kind, values, _digest(values, how))


def _batches(data: Any) -> Iterator[Any] | None:
    """Arrow's batches of a table, a data set or a data frame of pandas or Polars; None for other objects."""
    if callable(whole := getattr(data, "to_batches", None)):
        found: Iterator[Any] = iter(whole())
        return found
    if callable(formatted := getattr(data, "with_format", None)) and callable(getattr(data, "iter", None)):
        return (batch for table in formatted("arrow").iter(AT_ONCE) for batch in table.to_batches())
    if hasattr(data, "__arrow_c_stream__") and find_spec("pyarrow") is not None:
        import pyarrow

        frame: Iterator[Any] = iter(pyarrow.table(data).to_batches())
        return frame
    return None


def _plain(value: Any, is_table: bool = False) -> Any:
    """A value as JSON has it: mappings, lists, texts and Python's own numbers; other values stay.

    Args:
        is_table: leave out what is None.
    """
    if isinstance(value, Mapping):
        return {key: _plain(part, is_table) for key, part in value.items() if not (is_table and part is None)}
    if isinstance(value, list | tuple):
        return [_plain(part, is_table) for part in value]
    listed: Callable[[], Any] | None = getattr(value, "tolist", None)  # arrays, tensors, and their numbers
    return value if listed is None else listed()


def _digest(values: Iterable[tuple[str, Any]], how: How) -> str:
    """SHA-256 of what is read of rows; what says nothing (None) and notes of the author do not count."""
    digest = hashlib.sha256()
    for _, row in values:
        digest.update(json.dumps(_told(row, how), sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def _told(row: Any, how: How) -> Any:
    if not isinstance(row, Mapping):
        return repr(row)
    return {
        str(key): _plain(value, True) for key, value in row.items() if value is not None and _is_read(key, value, how)
    }


def _is_read(key: Any, value: Any, how: How) -> bool:
    listed = value if isinstance(value, list) else [value]
    return how.reads(key) or (bool(listed) and all(isinstance(one, numbers.Real) for one in listed))
