"""Files that are written whole, readable by whom they should be, and never through somebody's link."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from packlora.errors import InputError, unwritten
from packlora.files import KeptFolder, lock_folder, remove_leftovers, write_file, write_folder, write_json


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_lock_that_cannot_be_made_is_not_called_somebody_else_s(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> int:
        raise OSError(number, os.strerror(number), str(tmp_path / ".lock"))

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(OSError, match=r"\.lock") as caught, lock_folder(tmp_path):
        pass
    assert (unwritten(caught.value) or "").startswith(f"{os.strerror(number)}: {tmp_path}")
