"""Files that are written whole, readable by whom they should be, and never through somebody's link."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from packlora.errors import InputError, unwritten
from packlora.files import (
    KeptFolder,
    json_text,
    lock_folder,
    remove_folder,
    remove_leftovers,
    write_file,
    write_folder,
    write_json,
)
from packlora.report import follow
from packlora.sweep import control


def private(file: Path) -> None:
    """As safetensors writes: for the owner alone."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    file.chmod(0o600)


@pytest.mark.parametrize(("umask", "wanted"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_modes_follow_the_umask_whatever_the_writer_does(umask: int, wanted: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_file(tmp_path / "file", private)
        write_folder(tmp_path / "folder", lambda folder: private(folder / "file"))
    finally:
        os.umask(before)
    for file in (tmp_path / "file", tmp_path / "folder" / "file"):
        assert file.stat().st_mode & 0o777 == wanted


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".tmp-x.json").symlink_to(precious)
    write_json(tmp_path / "x.json", {})
    assert precious.read_text() == "precious"
    assert not (tmp_path / "x.json").is_symlink()


def test_leftovers_go_and_what_a_link_among_them_leads_to_stays(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("precious")
    work = tmp_path / "work"
    (work / ".tmp-folder").mkdir(parents=True)
    (work / ".tmp-file").write_text("")
    (work / ".tmp-link").symlink_to(kept)
    remove_leftovers(work)
    assert list(work.iterdir()) == []
    assert (kept / "file").read_text() == "precious"


def test_a_lock_is_let_go_but_not_that_of_another_run_in_the_same_place(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    with lock_folder(folder):
        with pytest.raises(InputError, match="in use by another run"), lock_folder(folder):
            pass
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        with lock_folder(folder):
            assert (folder / ".lock").exists()
            (folder / ".lock").rename(folder / "theirs")
            (folder / ".lock").write_text("")
        assert (folder / ".lock").exists()  # it was not the one that was held
    assert (folder / ".lock").exists()
    (folder / ".lock").unlink()
    with lock_folder(folder):
        pass
    assert not (folder / ".lock").exists()


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_folder_that_is_no_longer_there_is_noticed(how: str, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir()
    (tmp_path / "link").symlink_to(path)
    kept, through_a_link = KeptFolder(path), KeptFolder(tmp_path / "link")
    kept.check()
    through_a_link.check()
    if how == "moved":
        path.rename(tmp_path / "moved")
    else:
        path.rmdir()
    if how == "replaced":
        path.mkdir()
    for each in (kept, through_a_link):
        with pytest.raises(FileNotFoundError, match="was deleted, moved or replaced"):
            each.check()


def test_a_write_that_fails_names_its_file(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        os.write(os.open("/dev/full", os.O_WRONLY), b"x")

    with pytest.raises(OSError, match=r"run\.json") as caught:
        write_file(tmp_path / "run.json", full)
    assert unwritten(caught.value) == f"No space left on device: {tmp_path / 'run.json'}; free some space there"


@pytest.mark.parametrize("left", ["nothing", "an empty file", "a folder"])
def test_a_folder_whose_lock_was_removed_is_held_all_the_same(left: str, tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        (tmp_path / ".lock").unlink()
        if left == "an empty file":
            (tmp_path / ".lock").touch()
        elif left == "a folder":
            (tmp_path / ".lock").mkdir()
        found = r"in use by another run" if left != "a folder" else "is not a plain file"
        with pytest.raises(InputError, match=found), lock_folder(tmp_path):
            pass
        assert control.is_held(tmp_path) and follow.is_held(tmp_path / ".lock") is not False
    assert not control.is_held(tmp_path)


def test_where_a_file_system_locks_no_folders_the_lock_s_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = fcntl.flock

    def flock(handle: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EBADF, "as NFS says")
        original(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock_folder(tmp_path):
        assert control.is_held(tmp_path)
        with pytest.raises(InputError, match="in use by another run"), lock_folder(tmp_path):
            pass


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_lock_that_cannot_be_made_is_not_called_somebody_else_s(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(number, os.strerror(number), str(tmp_path / ".lock"))

    with monkeypatch.context() as until_here:
        until_here.setattr(os, "open", full)
        with pytest.raises(OSError, match=r"\.lock") as caught, lock_folder(tmp_path):
            pass
    assert (unwritten(caught.value) or "").startswith(f"{os.strerror(number)}: {tmp_path}")


class Crash(BaseException):
    """The process ends here."""


class Operations:
    """Lets file operations go wrong. at: by number, an error to raise; each goes wrong once, a Crash for good."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at: dict[int, BaseException] = {}
        self.count = 0
        monkeypatch.setattr(os, "fsync", lambda handle: None)
        for name in ("replace", "fsync", "open", "unlink", "rmdir", "mkdir"):
            monkeypatch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if error := self.at.get(self.count):
                raise error
            return original(*args, **kwargs)

        return call

    def run(self, call: Callable[[], object], at: dict[int, BaseException]) -> bool:
        """Whether it ended without an error."""
        self.at, self.count = at, 0
        try:
            call()
            return True
        except (Crash, OSError):
            return False
        finally:
            self.at = {}


def holds(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "file").write_text(text)

    return write


def test_a_folder_that_is_replaced_keeps_its_name_and_a_whole_content_after_any_fault_and_a_crash_in_the_second_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, operations = tmp_path / "job" / "folder", Operations(monkeypatch)
    path.parent.mkdir()
    write_folder(path, holds("old"))

    def again() -> None:
        remove_leftovers(path.parent)
        write_folder(path, holds("newest"))

    first, tried = 0, 0
    while True:
        first += 1
        second, ended = 0, False
        while not ended:
            second += 1
            holds("old")(path)
            went_well = operations.run(lambda: write_folder(path, holds("new")), {first: OSError(errno.EIO, "luck")})
            ended = operations.run(again, {second: Crash()}) and operations.count < second
            tried += 1
            remove_leftovers(path.parent)
            assert [one.name for one in path.parent.iterdir()] == ["folder"]
            assert (path / "file").read_text() in (("newest",) if ended else ("old", "new", "newest"))
        if went_well and operations.run(lambda: write_folder(path, holds("new")), {first: Crash()}):
            break
    assert first > 10 and tried > 100


def test_a_folder_that_cannot_be_flushed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Space is often found to be used up only then, and a second whole copy would go on using it."""

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_folder(tmp_path / "folder", holds("old"))
    monkeypatch.setattr("packlora.files.sync", full)
    with pytest.raises(OSError, match="No space left"):
        write_folder(tmp_path / "folder", holds("new"))
    assert [one.name for one in tmp_path.iterdir()] == ["folder"] and (
        tmp_path / "folder" / "file"
    ).read_text() == "old"


def test_a_folder_whose_removal_fails_or_is_broken_off_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, operations, number, removed = tmp_path / "job" / "folder", Operations(monkeypatch), 0, False
    path.parent.mkdir()
    while not removed:
        number += 1
        for error in (OSError(errno.EIO, "luck"), Crash()):
            write_folder(path, holds("old"))
            operations.run(lambda: remove_folder(path), {number: error})
            removed = operations.count < number
            was_there = path.exists()
            remove_leftovers(path.parent)
            assert [one.name for one in path.parent.iterdir()] == ["folder"] * was_there
            assert not was_there or (path / "file").read_text() == "old"
    assert number > 5


@pytest.mark.parametrize(
    "value",
    [
        {}, [], "é\n", None, 1.5, {"a": {}}, {"a": [], "b": [[]]}, [[1, 2], [3]], [{"a": 1}, {"b": [1, {"c": None}]}],
        {1: {"x": 2}, False: [{}], None: 0, 2.5: []}, {"long": "x" * 1000, "more": 1}, {"deep": [{"line": "x" * 1000, "y": 2}]},
        {'"': {"\u00e9": "\\"}}, ({"a": (1, 2)},), list(range(1000)),
    ],
)  # fmt: skip
def test_json_for_people_says_what_json_says(value: Any, tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", value)
    assert json.loads((tmp_path / "file.json").read_text()) == json.loads(json.dumps(value))


def test_json_for_people_has_a_line_for_each_entry_of_a_log_and_for_each_key_of_a_long_object() -> None:
    assert json_text({"a": 1, "log": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]}).splitlines() == [
        "{", '  "a": 1,', '  "log": [', '    {"step": 1, "loss": 0.5},', '    {"step": 2, "loss": 0.25}', "  ]", "}",
    ]  # fmt: skip
    assert len(json_text({f"key {number}": number for number in range(100)}).splitlines()) == 102
    for odd in (float("nan"), [float("inf")], {"a": [{"b": float("nan")}]}):
        with pytest.raises(ValueError, match="JSON compliant"):
            json_text(odd)
