"""Data files of any content: read, or refused in a printable line that names the file and the place. Nothing hangs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from packlora.data.readers import read_rows
from packlora.errors import InputError

GOOD = b'{"prompt": "a", "completion": "b"}'


def refusal(path: Path | str) -> str:
    with pytest.raises(InputError) as caught:
        read_rows(str(path), "first")
    message = str(caught.value)
    assert message.startswith("job 'first': ")
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message) < 2000
    return message


def pipe(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path)


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (pipe, "is a pipe"),
        (zeros, "a device"),
        (loop, "does not exist"),
        (dangling, "does not exist"),
        (folder, "is a folder"),
    ],
)
def test_what_is_no_regular_file_is_refused_at_once(
    tmp_path: Path, suffix: str, make: Callable[[Path], None], said: str
) -> None:
    path = tmp_path / f"rows.{suffix}"
    make(path)
    start = time.process_time()
    assert said in refusal(path)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    "address", ["https://example.org/a.jsonl", "http://x/a.json", "hf://datasets/a/b", "s3://a/b.parquet"]
)
def test_an_address_is_refused_with_what_to_give_instead(address: str) -> None:
    assert f"data path {address} is an address; download the file" in refusal(address)


CONTENT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", ""), "NUL bytes": (b"\0" * 100, ""), "a NUL byte in a text": (b'{"text": "a\0"}', ""),
    "cut off": (GOOD[:-5], ""), "latin-1": ('{"text": "caf\xe9"}'.encode("latin-1"), "UTF-8"),
    "UTF-16": (GOOD.decode().encode("utf-16"), ""), "UTF-32": (GOOD.decode().encode("utf-32"), ""),
    "nested": (b'{"messages": ' + b"[" * 100_000, "nested too deep"),
    "nested mappings": (b'{"a": ' * 100_000, "nested too deep"),
    "a huge number": (b'{"text": ' + b"9" * 5000 + b"}", ""), "no JSON": (b"text", ""), "gzip": (b"\x1f\x8b\x08\0\0", ""),
    "a key twice": (b'{"prompt": "a", "prompt": "c", "completion": "b"}', "the key 'prompt' stands twice in one mapping"),
    "a key of a message twice": (b'{"messages": [{"role": "user", "role": "assistant", "content": "a"}]}', "the key 'role'"),
    "escapes in a key": (b'{"\\u001b[2J\\u001b]0;x\\u0007": 1}', r"found \x1b[2J\x1b]0;x\x07"),
    "newlines in a key": (b'{"a\\nb\\u2028": 1}', r"found a\nb\u2028"),
    "a long key": (b'{"' + b"k" * 10**6 + b'": 1}', "kkk ..."),
    "escapes in a role": (b'{"messages": [{"role": "a\\u001b[2J", "content": 1}]}', r"message 1 (a\x1b[2J) must be a text"),
    "a long role": (b'{"messages": [{"role": "' + b"r" * 10**6 + b'", "content": 1}]}', "rrr ..."),
    "an endless list of messages": (b'{"messages": [' + b"1," * 10**5 + b"1]}", "message 1 must be a mapping"),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("name", CONTENT)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, name: str, suffix: str) -> None:
    content, said = CONTENT[name]
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(b"[" + content + b"]" if suffix == "json" and content.startswith(b'{"') else content)
    message = refusal(path)
    assert str(path) in message
    assert said in message or suffix == "parquet"


@pytest.mark.parametrize("key", ["\x1b[2J", "a\nb"])
def test_a_file_name_is_shown_without_what_a_terminal_would_obey(tmp_path: Path, key: str) -> None:
    path = tmp_path / f"{key}.jsonl"
    path.write_bytes(b"x")
    assert "\x1b" not in refusal(path)


def test_one_line_of_fifty_megabytes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b" * 50_000_000}))
    start = time.process_time()
    (row,) = read_rows(str(path), "first")
    assert len(row.completion or "") == 50_000_000
    assert time.process_time() - start < 100


def test_the_reader_tells_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes((GOOD + b"\n") * 3)
    heard: list[tuple[str, int]] = []
    read_rows(str(path), "first", lambda text, done: heard.append((text, done)))
    assert heard == [("job first: reading rows.jsonl, rows", number) for number in (1, 2, 3)]
