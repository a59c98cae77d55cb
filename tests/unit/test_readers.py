"""Data files to rows: the formats agree with each other, and everything else is refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from packlora.data.readers import read_rows
from packlora.data.rows import Row
from packlora.errors import InputError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
ROWS: list[dict[str, Any]] = [
    {"prompt": "a\u2028b", "completion": "é\n"}, {"messages": CHAT}, {"text": "\N{SNOWMAN}"}, {"prompt": "", "completion": ""},
    {"text": "t", "prompt": None, "id": 7},
]  # fmt: skip


def refusal(path: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        read_rows(str(path), "first")
    message = str(caught.value)
    assert message.startswith("job 'first': ")
    return message


def test_a_compressed_file_that_ends_too_early_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gzip raises an EOFError, which click takes for Ctrl-D."""
    broken = mock.Mock(side_effect=EOFError("end-of-stream marker"))
    monkeypatch.setattr("packlora.data.readers.rows_of_file", broken)
    assert "rows.jsonl: end-of-stream marker" in refusal(lines(tmp_path, "{}"))


def lines(tmp_path: Path, *texts: str, name: str = "rows.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def shown(row: Row) -> dict[str, Any]:
    found = {"prompt": row.prompt, "completion": row.completion, "messages": row.messages, "text": row.text}
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_every_format_gives_the_same_rows_each_with_its_place(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    elif suffix == "json":
        path.write_text(json.dumps(ROWS, indent=1))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS, pyarrow.schema([
            ("prompt", pyarrow.string()), ("completion", pyarrow.string()), ("text", pyarrow.string()),
            ("id", pyarrow.int64()),
            ("messages", pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))),
        ])), path)  # fmt: skip
    rows = read_rows(str(path), "first")
    wanted = [{key: row[key] for key in row if row[key] is not None and key != "id"} for row in ROWS]
    assert [shown(row) for row in rows] == wanted
    place = "line" if suffix == "jsonl" else "row"
    assert [row.where for row in rows] == [f"{path}, {place} {number}" for number in range(1, len(ROWS) + 1)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a"', "not valid JSON: Expecting ',' delimiter (column 13)"),
        ("text", "not valid JSON"),
        ("[1, 2]", "a row must be a mapping, found a list"),
        ("null", "a row must be a mapping, found nothing"),
        ("{}", "found no fields"),
        (
            '{"prompt": "a"}',
            "found prompt without a completion, as rows of a job with rollout have it (learning from rewards); rows are "
            "{prompt, completion}, {messages}, {text}, {input_ids, labels}, ",
        ),
        ('{"completion": "a", "input": 1}', "found completion, input"),
        (
            '{"id": 1, "question": "a", "answer": "b"}',
            "found id, question, answer; data.columns says which of these are fields of a row; rows are {prompt, comp",
        ),
        ('{"prompt": "a", "completion": null}', "found prompt, completion"),
        ('{"prompt": "a", "completion": "b", "text": "c"}', "has fields of several kinds (prompt, completion, text)"),
        ('{"messages": [], "text": "c"}', "has fields of several kinds"),
        ('{"prompt": 3, "completion": "b"}', "'prompt' must be a text, found a number"),
        ('{"prompt": "a", "completion": ["b"]}', "'completion' must be a text, found a list"),
        ('{"text": 1.5}', "'text' must be a text, found a number"),
        ('{"text": "ab\\ud83d"}', "'text' holds half of a surrogate pair at character 3"),
        ('{"messages": []}', "'messages' must be a list of at least one {role, content}"),
        ('{"messages": "hi"}', "'messages' must be a list of at least one {role, content}"),
        ('{"messages": ["hi"]}', "message 1 must be a mapping with a role and a content"),
        ('{"messages": [{"content": "hi"}]}', "message 1 must be a mapping with a role and a content"),
        ('{"messages": [{"role": " ", "content": "hi"}]}', "message 1 must be a mapping with a role and a content"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}',
            "the content of message 2 (assistant)",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "message 1 has the block {'type': 'text'} in its content; known are {type: text, text}",
        ),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "message 1 (user) holds half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_what_was_found(tmp_path: Path, line: str, problem: str) -> None:
    path = lines(tmp_path, '{"text": "good"}', "", line, '{"text": "good"}')
    message = refusal(path)
    assert f"{path}, line 3: " in message
    assert problem in message


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.jsonl", b"", "has no rows"), ("rows.jsonl", b"\n \n", "has no rows"), ("rows.json", b"[]", "has no rows"),
        ("rows.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}', "line 2: not UTF-8 text"), ("rows.json",
         b'["caf\xe9"]', "is not UTF-8 text"),
        ("rows.json", b'{"text": "a"}', "must hold a list of rows; found a mapping"),
        ("rows.json", b'[\n{"text": "a"}\nx]', "line 3: not valid JSON"), ("rows.json", b"", "line 1: not valid JSON"),
        ("rows.parquet", b"not parquet", "as parquet"), ("rows.parquet", b"", "as parquet"),
        ("rows.tsv", b"text\na\n", "ends in '.tsv'; accepted are .csv, .json, .jsonl and .parquet"),
        ("rows.csv", b"", "has no rows"), ("rows.csv", b"text\n", "has no rows"),
        ("rows.csv", b"text,\na,b\n", "each once; column 2 has none (pandas writes its index so, unless index=False)"),
        ("rows.csv", b"text,text\na,b\n", "begins with the names of its columns, each once; 'text' stands twice"),
        ("rows.csv", b"text\na,b\n", "line 2: 2 cells, but there are 1 columns"),
        ("rows.csv", b'text\n"a\n', "as csv, near line 2: unexpected end of data"),
        ("rows.csv", b"t\xe9xt\na\n", "is not UTF-8"),
        ("rows", b"text", "ends in ''; accepted are"), ("rows.JSONL", b"", "ends in '.JSONL'"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_rows_is_refused_by_name(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(path)
    assert str(path) in message
    assert problem in message


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    assert f"{tmp_path}/rows.jsonl does not exist" in refusal(tmp_path / "rows.jsonl")
    assert f"{tmp_path} is a folder" in refusal(tmp_path)
    assert "owner/no-such-data-set is n" in refusal(
        "owner/no-such-data-set"
    )  # not a file; and not a data set, or no library
