"""Tables as data: only columns that rows are made of are read, and no file unpacks to far more than it is."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from packlora.data import tables, unpacking
from packlora.data.formats import parquet
from packlora.data.readers import read_data, read_rows
from packlora.data.rows import KEYS, check_row
from packlora.errors import InputError

FAR = 253402300800  # seconds: the first of the year 10000
ODD: dict[str, Any] = {
    "nanoseconds": pyarrow.array([1, 2], pyarrow.timestamp("ns")),
    "nanoseconds of a day": pyarrow.array([1, 2], pyarrow.time64("ns")),
    "a duration": pyarrow.array([1, 2], pyarrow.duration("ns")),
    "the year 10000": pyarrow.array([FAR, FAR], pyarrow.int64()).cast(pyarrow.timestamp("s")),
    "a day in the year 10000": pyarrow.array([FAR * 1000] * 2, pyarrow.int64()).cast(pyarrow.date64()),
    "a day in the year 3000000": pyarrow.array([2**30] * 2, pyarrow.date32()),
    "a zone that is nowhere": pyarrow.array([1, 2], pyarrow.timestamp("us", tz="Mars/Phobos")),
    "no UTF-8": pyarrow.StringArray.from_buffers(
        2, pyarrow.array([0, 1, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"\xff\xff")
    ),
}  # fmt: skip


def as_parquet(folder: Path, table: Any) -> Path:
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    return folder / "rows.parquet"


def as_saved(folder: Path, table: Any, compression: str | None = None) -> Path:
    """As `datasets.Dataset.save_to_disk` lays it out, which compresses nothing."""
    (folder / "set").mkdir()
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    with (
        pyarrow.OSFile(str(folder / "set" / "data.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema, options=options) as stream,
    ):
        stream.write_table(table)
    (folder / "set" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder / "set"


def refusal(path: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        read_rows(str(path), "first")
    return str(caught.value)


FORMS = pytest.mark.parametrize("write", [as_parquet, as_saved])


# --- columns that are read -------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("name", ODD)
def test_a_column_that_no_row_is_made_of_is_not_read(name: str, write: Callable[..., Path], tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "created": ODD[name], "completion": ["c", "d"]})
    rows = read_rows(str(write(tmp_path, table)), "first")
    assert [(row.prompt, row.completion) for row in rows] == [("a", "c"), ("b", "d")]


@FORMS
@pytest.mark.parametrize("name", ODD)
def test_a_value_that_python_cannot_hold_is_its_row_s_fault(
    name: str, write: Callable[..., Path], tmp_path: Path
) -> None:
    path = write(tmp_path, pyarrow.table({"prompt": ODD[name], "completion": ["c", "d"]}))
    said = refusal(path)
    assert said.startswith(f"job 'first': {path}, row 1: ") and "'prompt'" in said
    with pytest.raises(InputError, match="no rows: 2 rows were left out by on_bad_row"):
        read_data(str(path), "first", on_bad_row="skip")


@FORMS
@pytest.mark.parametrize("name", ["nanoseconds", "the year 10000", "a day in the year 10000"])
def test_a_time_within_a_message_is_a_text(name: str, write: Callable[..., Path], tmp_path: Path) -> None:
    said = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user", "assistant"]), pyarrow.array(["a", "b"]), ODD[name]], ["role", "content", "at"]
    )
    table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 2], said)})
    (row,) = read_rows(str(write(tmp_path, table)), "first")
    assert [(m["role"], m["content"], type(m["at"])) for m in row.messages or ()] == [
        ("user", "a", str), ("assistant", "b", str),
    ]  # fmt: skip


def as_json(values: list[Any]) -> Any:
    """Column of JSON, as the library datasets stores values of mixed types."""
    return pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array([json.dumps(value) for value in values]))


CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": None}}}]}
CONVERSATION = [{"role": "user", "content": 'a "b"'}, CALLED]
LISTED = pyarrow.ListArray.from_arrays([0, 2], as_json(CONVERSATION))
IN_PARTS = pyarrow.StructArray.from_arrays(
    [
        pyarrow.array(["user", "assistant"]), as_json(['a "b"', ""]),
        pyarrow.ListArray.from_arrays([0, 0, 1], as_json(CALLED["tool_calls"])),
    ],
    ["role", "content", "tool_calls"],
)  # fmt: skip


@FORMS
@pytest.mark.parametrize(
    "messages",
    [as_json([CONVERSATION]), LISTED, pyarrow.ListArray.from_arrays([0, 2], IN_PARTS)],
    ids=["whole", "each", "parts"],
)
def test_a_column_of_json_holds_what_the_json_says(messages: Any, write: Callable[..., Path], tmp_path: Path) -> None:
    (row,) = read_rows(str(write(tmp_path, pyarrow.table({"messages": messages}))), "first")
    user, answer = row.messages or ()
    assert user["content"] == 'a "b"' and answer["content"] == ""
    assert [one["function"]["arguments"] for one in answer["tool_calls"]] == [{"x": None}]


@FORMS
def test_a_text_of_a_column_of_json_has_no_quotes_and_one_that_is_no_json_is_its_row_s_fault(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    texts = pyarrow.ExtensionArray.from_storage(pyarrow.json_(), pyarrow.array(['"a\\n\\"b\\""', "{"]))
    path = write(tmp_path, pyarrow.table({"prompt": ["a", "b"], "completion": texts}))
    read = read_data(str(path), "first", on_bad_row="skip")
    assert [row.completion for row in read.rows] == ['a\n"b"']
    (said,) = read.skipped
    assert "row 2: the column 'completion' has a value that cannot be read: not valid JSON" in said


@FORMS
def test_a_table_without_a_known_column_is_refused_with_the_columns_that_it_has(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    table = pyarrow.table({"question": ["a"], "answer": ["b"]})
    said = refusal(write(tmp_path, table))
    assert "row 1: found question, answer; where question is asked and answer is to be learnt, name them" in said


@FORMS
def test_a_column_that_is_there_twice_is_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, ["prompt", "completion", "prompt"])
    assert "has the column 'prompt' twice" in refusal(write(tmp_path, table))


def test_a_data_set_of_the_hub_is_read_by_its_columns() -> None:
    table = pyarrow.table({"text": ["a", "b"], "created": ODD["nanoseconds"]})
    rows = SimpleNamespace(with_format=lambda form: SimpleNamespace(iter=lambda size: iter([table])))
    with mock.patch.dict(sys.modules, {"datasets": SimpleNamespace(load_dataset=lambda name, split: rows)}):
        assert [(row.text, row.where) for row in read_rows("owner/of-the-hub", "first")] == [
            ("a", "owner/of-the-hub, row 1"), ("b", "owner/of-the-hub, row 2"),
        ]  # fmt: skip


class Looked(dict[str, Any]):
    """A row that remembers what was looked for."""

    seen: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a", "completion": "b"}, {"messages": TURNS}, {"text": "a"}, {"input_ids": [1, 2]}, {},
        {"prompt": TURNS[:1], "completion": TURNS[1:]}, {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "input": "c", "output": "b"},
    ],
)  # fmt: skip
def test_all_that_a_row_is_looked_at_for_is_read(row: dict[str, Any]) -> None:
    looked = Looked(row)
    looked.seen = set()
    try:
        check_row(looked, "here", "first")
    except InputError:
        assert not row
    assert looked.seen <= KEYS


# --- what a file unpacks to --------------------------------------------------------------------------------------------------


def repeated(text: str, times: int) -> Any:
    """A column of one text, which a file holds once."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), pyarrow.array([text]))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of the limits."""
    monkeypatch.setattr(unpacking, "MOST_UNPACKED", 2**20)
    monkeypatch.setattr(unpacking, "UNPACKED_AT_ONCE", 2**18)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["by a dictionary", "in messages", "as what the text before begins with"])
def test_a_text_that_a_parquet_file_repeats_too_often_is_not_unpacked(how: str, tmp_path: Path) -> None:
    column = repeated("ab" * 2**14, 1000)
    nested, options = how == "in messages", dict[str, Any]()
    if how.startswith("as"):
        options = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
        column = column.dictionary_decode()
    if nested:
        said = pyarrow.StructArray.from_arrays(
            [column.dictionary_decode(), column.dictionary_decode()], ["role", "content"]
        )
        column = pyarrow.ListArray.from_arrays([*range(0, 1001, 10)], said)
    path = tmp_path / "rows.parquet"
    table = pyarrow.table({"messages" if nested else "text": column})
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)
    size = os.path.getsize(path)
    assert size < 5000
    (name,), each = table.column_names, 2**15 * (20 if nested else 1)
    at_once = unpacking.rows_at_once(pyarrow.parquet.read_metadata(path), path, [name], 1000)
    assert at_once == 1 or at_once * each <= unpacking.UNPACKED_AT_ONCE
    with mock.patch.object(tables, "_values", wraps=tables._values) as made:
        assert f"{path} has {size} bytes and unpacks to more than" in refusal(path)
    rows = sum(len(call.args[1]) for call in made.call_args_list)
    assert rows <= max(size * unpacking.MOST_RATIO, unpacking.MOST_UNPACKED) / 2**15


@pytest.mark.usefixtures("small")
def test_what_a_parquet_file_says_that_it_unpacks_to_is_looked_at_first(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 2**24]}), path, compression="zstd")
    with mock.patch.object(parquet, "rows_at_once", side_effect=AssertionError("is read")):
        assert "unpacks to more than" in refusal(path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("in_dictionary", [False, True])
def test_what_a_compressed_data_set_says_that_it_unpacks_to_is_looked_at_first(
    compression: str, in_dictionary: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacking, "MOST_RATIO", 100)  # lz4 makes a 255th of a text at best
    text = pyarrow.array(["ab" * 2**23])
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0]), text) if in_dictionary else text
    folder = as_saved(tmp_path, pyarrow.table({"text": column}), compression)
    with mock.patch.object(pyarrow.ipc, "open_stream", side_effect=AssertionError("is read")):
        assert "unpacks to more than" in refusal(folder)


@pytest.mark.usefixtures("small")
def test_a_text_that_a_data_set_repeats_too_often_is_not_unpacked(tmp_path: Path) -> None:
    folder = as_saved(tmp_path, pyarrow.table({"text": repeated("ab" * 2**14, 4000)}))
    with mock.patch.object(tables, "_values", side_effect=AssertionError("is unpacked")):
        assert "unpacks to more than" in refusal(folder)


@pytest.mark.parametrize("compression", ["zstd", "lz4", None])
def test_compressed_files_within_the_limit_are_read(compression: str | None, tmp_path: Path) -> None:
    table = pyarrow.table(
        {"text": [f"{n} " * 50 for n in range(3000)], "system": pyarrow.nulls(3000, pyarrow.string())}
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", compression=compression)
    wanted = table.column("text").to_pylist()
    for path in (tmp_path / "rows.parquet", as_saved(tmp_path, table, compression)):
        assert [row.text for row in read_rows(str(path), "first")] == wanted
