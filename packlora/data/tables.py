"""Rows of tables: batches of Arrow, data sets that Hugging Face's save_to_disk wrote, data sets of the hub.

Only the columns that a row is made of (rows.py, KEYS) are read, and where fields are asked for those of numbers: what stands in
the others, a timestamp that Python cannot hold or an image that cannot be decoded, does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packlora.data.rows import How
from packlora.data.unpacking import Bound, claimed_by_message
from packlora.data.values import parse_json
from packlora.errors import InputError, needed, quoted

AT_ONCE = 1024
"""Rows that are in memory at once as Python's objects."""
DATASET, SPLITS = "state.json", "dataset_dict.json"
"""Files that mark the folder of a saved Hugging Face data set, and of one with splits."""

Values = Iterator[tuple[str, Any]]
"""Rows with their places; an InputError where a row cannot be read by itself."""


def check_pyarrow(what: str) -> None:
    """Raises InputError where the library of tables is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ModuleNotFoundError:
        raise needed("pyarrow", "parquet", what) from None


def read_saved(folder: Path, job: str, accepted: str, how: How) -> Values:
    """Rows of a data set of Hugging Face's save_to_disk, of one with splits of the split that is asked for, or of train.
    accepted: other data, for messages."""
    folder = _split(folder, job, accepted, how.split)

    def bad(text: str, line: int | None = None) -> InputError:
        return InputError(f"job {job!r}: {folder / DATASET}: {text}")

    check_pyarrow(f"job {job!r}: {folder}")
    import pyarrow

    try:
        state = parse_json((folder / DATASET).read_text(encoding="utf-8"), bad)
        names = [part["filename"] for part in state["_data_files"]]
        columns, indices = state.get("_format_columns"), state.get("_indices_data_files")
        if indices or not all(isinstance(name, str) and name == os.path.basename(name) for name in names):
            raise bad(
                "it does not name plain files beside it; save_to_disk the data set again, with flatten_indices() before"
            )
        bound = Bound(str(folder), sum(os.path.getsize(folder / name) for name in names), job)
        yield from read_batches(_saved_batches(folder, names, columns, bound), str(folder), job, how, bound)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        raise bad(f"it is not what save_to_disk writes ({type(error).__name__}: {error})") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"job {job!r}: cannot read the data set {folder}: {error}") from None


def read_hub(name: str, job: str, how: How) -> Values:
    """Rows of a data set that the library datasets finds: of the split that is asked for, or of train."""
    try:
        import datasets  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise InputError(
            f"job {job!r}: {name} is not a file here; to read it as a Hugging Face data set, "
            "install the extra: pip install 'packlora[datasets]'"
        ) from None
    try:
        named = () if how.subset is None else (how.subset,)
        rows = datasets.load_dataset(name, *named, split=how.split or "train").with_format("arrow")
    except Exception as error:  # the library raises many unrelated types for "not there"
        raise InputError(
            f"job {job!r}: {name} is neither a file nor a data set that loads: {error}; data.subset and data.split say which "
            "part of a data set is read"
        ) from None
    yield from read_batches((batch for table in rows.iter(AT_ONCE) for batch in table.to_batches()), name, job, how)


def _split(folder: Path, job: str, accepted: str, split: str | None) -> Path:
    if (folder / SPLITS).is_file():
        found = sorted(file.parent.name for file in folder.glob(f"*/{DATASET}"))
        if (split or "train") not in found:
            raise InputError(
                f"job {job!r}: the data set {folder} has no split {split or 'train'} (splits: {', '.join(found) or 'none'}); "
                "name one by data.split"
            )
        folder = folder / (split or "train")
    elif split is not None:
        raise InputError(f"job {job!r}: data.split {quoted(split)}: {folder} is no data set with splits; leave it out")
    if not (folder / DATASET).is_file():
        raise InputError(
            f"job {job!r}: data path {folder} is a folder, and not one that Hugging Face's save_to_disk wrote; give a file "
            f"({accepted}), or a pattern such as {folder}/*.jsonl"
        )
    return folder


def _saved_batches(folder: Path, names: list[str], columns: list[str] | None, bound: Bound) -> Iterator[Any]:
    import pyarrow

    for path in (str(folder / name) for name in names):
        with pyarrow.OSFile(path) as file:
            bound.check(sum(map(claimed_by_message, pyarrow.ipc.MessageReader.open_stream(file))))
        with pyarrow.OSFile(path) as file, pyarrow.ipc.open_stream(file) as stream:
            for batch in stream:
                yield batch.select(columns) if columns else batch


# --- from columns to rows ---------------------------------------------------------------------------------------------


def read_batches(
    batches: Iterator[Any],
    name: str,
    job: str,
    how: How,
    bound: Bound | None = None,
    left: dict[str, Any] | None = None,
) -> Values:
    """Rows of Arrow's batches.

    Args:
        name: for their places.
        left: placeholders for columns that were not read with the batches; None: the batches have all columns.
    """
    number, named = 0, set(how.columns.values())
    for whole in batches:
        read, rest = used(whole.schema, how)
        if twice := next((key for key in read if read.count(key) > 1), None):
            raise InputError(f"job {job!r}: {name} has the column {twice!r} twice; give each column a name of its own")
        if left is not None:
            rest = left
        elif len(read) < len(whole.schema.names):
            whole = whole.select(read)
        if bound is not None:
            bound.add(whole)
        for start in range(0, whole.num_rows, AT_ONCE):
            batch = whole.slice(start, AT_ONCE)
            columns = {key: _values(key, batch.column(key), f"job {job!r}: {name}, row ", number + 1) for key in read}
            for at in range(batch.num_rows):
                number += 1
                row = rest | {key: column[at] for key, column in columns.items()}
                problem = next((value for value in row.values() if isinstance(value, InputError)), None)
                yield (
                    f"{name}, row {number}",
                    problem or {key: value for key, value in row.items() if value is not None or key in named},
                )


def used(schema: Any, how: How) -> tuple[list[str], dict[str, Any]]:
    """The columns that a row is made of, with `fields` also those of numbers, and what stands for the others: that they are
    there is part of what is said of a table whose rows are none."""
    read = [one.name for one in schema if how.reads(one.name) or (how.fields and _is_of_numbers(one.type))]
    return read, dict.fromkeys((name for name in schema.names if name not in read), "")


def _is_of_numbers(kind: Any) -> bool:
    """Whether a column holds numbers, or lists of numbers."""
    from pyarrow import types

    kind = kind.value_type if _is_list(kind) else kind
    return any(is_kind(kind) for is_kind in (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal))


def _values(key: str, column: Any, where: str, first: int) -> list[Any]:
    """A column as Python's values; an InputError for what Python cannot hold."""
    import pyarrow

    too_odd = (ValueError, ArithmeticError, LookupError, pyarrow.ArrowException, RecursionError)
    wanted = _in_texts(column.type)
    try:
        found = list((column.cast(wanted) if wanted != column.type else column).to_pylist())
    except too_odd:
        found = list(column)
    out: list[Any] = []
    for number, value in enumerate(found, first):
        try:
            out.append(_plain(value.as_py() if isinstance(value, pyarrow.Scalar) else value, column.type))
        except (*too_odd, InputError) as error:
            out.append(InputError(f"{where}{number}: the column {key!r} has a value that cannot be read: {error}"))
    return out


def _in_texts(kind: Any, is_inside: bool = False) -> Any:
    """A nested type with texts in the place of times: of some Python has no values, and templates write texts."""
    import pyarrow
    from pyarrow import types

    if is_inside and types.is_temporal(kind) and not types.is_interval(kind):
        return pyarrow.string()
    if types.is_struct(kind):
        return pyarrow.struct([(part.name, _in_texts(part.type, True)) for part in _parts(kind)])
    if _is_list(kind):
        inner = _in_texts(kind.value_type, True)
        return kind if inner == kind.value_type else pyarrow.large_list(inner)
    return kind


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    known = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(getattr(types, name)(kind) for name in known if hasattr(types, name))


def _parts(kind: Any) -> list[Any]:
    """The fields of a struct."""
    return [kind.field(number) for number in range(kind.num_fields)]


def _plain(value: Any, kind: Any) -> Any:
    """Value of a table as a text file would hold it: a column of JSON is decoded, and a mapping, which has the keys of all
    others, loses those that hold nothing."""
    from pyarrow import types

    if value is None:
        return None
    if getattr(kind, "extension_name", None) == "arrow.json":
        return parse_json(value, lambda text, _: InputError(text))
    if types.is_struct(kind):
        read = {part.name: _plain(value[part.name], part.type) for part in _parts(kind)}
        return {key: part for key, part in read.items() if part is not None}
    return [_plain(part, kind.value_type) for part in value] if _is_list(kind) else value
